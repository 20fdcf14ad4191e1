"""Plain PyTorch, everything in memory."""

from __future__ import annotations

from peers.training import Outcome, Setting, looped, make_optimizer, open_model, usual_step, values_of

TITLE = "plain PyTorch"
PACKAGE = "torch"
LOSSLESS = True


def run(setting: Setting) -> Outcome:
    model = open_model(setting)
    return looped(setting, usual_step(model, make_optimizer(model)), values_of(model))
