"""``torch.autograd.graph.save_on_cpu``. Where the CPU computes it copies each saved tensor within RAM: a row all the
same, as that is what its user gets.
"""

from __future__ import annotations

from torch.autograd.graph import save_on_cpu

from peers.training import Outcome, Setting, looped, make_optimizer, open_model, usual_step, values_of

TITLE = "save_on_cpu"
PACKAGE = "torch"
LOSSLESS = True


def run(setting: Setting) -> Outcome:
    model = open_model(setting)
    return looped(setting, usual_step(model, make_optimizer(model), save_on_cpu), values_of(model))
