"""Lossless techniques together, at random: losses, parameters and buffers are bit for bit those of plain training."""

from __future__ import annotations

import random

import pytest

import trained
from brim.techniques import checkpointing, inplace_activations, precision


@pytest.mark.parametrize("seed", range(10))
def test_five_steps_are_bit_for_bit_the_same(seed: int) -> None:
    draw = random.Random(seed)
    family, kind = draw.choice(list(trained.FAMILIES)), draw.choice(["fp32", "bf16-mixed"])
    plain, other = trained.make(family), trained.make(family)
    before = trained.surface(other)
    choices = {name: draw.choice(checkpointing.CHOICES) for name in checkpointing.blocks(other)}
    handles = [
        precision.apply(other, None, kind),
        checkpointing.apply(other, choices),
        inplace_activations.apply(other, trained.batch(family, 0)),
    ]
    losses = []
    for model in (plain, other):
        with handles[0].forward():
            losses.append(trained.train(model, family))
    assert losses[0] == losses[1]
    assert trained.same_state(plain, other)
    for handle in reversed(handles):
        handle.remove()
    assert trained.surface(other) == before
