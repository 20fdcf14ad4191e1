"""``brim.fit`` under the usual loop, which stays as it is."""

from __future__ import annotations

import os

import torch

import brim
from peers.train_brim import choice_of
from peers.training import Outcome, Setting, batches, looped, make_optimizer, open_model, usual_step

TITLE = "brim.fit"
PACKAGE = "brim"
LOSSLESS = True


def run(setting: Setting) -> Outcome:
    os.environ["BRIM_SCRATCH"] = str(setting.scratch)
    model = open_model(setting)
    optimizer = make_optimizer(model)
    example = next(batches(setting))
    handle = brim.fit(model, optimizer, ram=setting.budget_bytes, device="cpu", example=example)
    facts = {"promised_bytes": dict(handle.plan.promise.peak_bytes), **choice_of(handle.plan, 1)}

    def value(name: str) -> torch.Tensor:
        return handle.value(name)

    return looped(setting, usual_step(model, optimizer), value, facts=facts, close=handle.close)
