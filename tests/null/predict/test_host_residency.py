"""Tensors that rest in RAM, in a trace that knows one device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from brim.core.trace import TO_DEVICE, TO_RAM
from brim.predict.dispatch import RecordingMode
from brim.predict.tracer import trace


def recording() -> RecordingMode:
    return next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, RecordingMode))


def program():
    shard, other = torch.zeros(1000), torch.zeros(10)
    recording().rest_in_ram(shard)

    def step():
        with recording().crossing(to_ram=False):
            here = shard.clone()
        made = here * 2
        with recording().crossing(to_ram=True):
            back = made.clone()
        shard.add_(back)
        doubled = shard + back
        with recording().making_in_ram():
            counter = torch.zeros(7)
        return other + 1, here, made, doubled, counter

    return step


def test_what_is_made_in_ram_is_told_apart():
    made = trace(program, steps=1)
    built = [storage for storage in made.storages if storage.born < made.step_starts[0]]
    assert [(storage.bytes, storage.in_ram) for storage in built] == [(4000, True), (40, False)]
    stepped = [storage for storage in made.storages if storage.born >= made.step_starts[0]]
    assert [(storage.bytes, storage.in_ram) for storage in stepped] == [
        (4000, False), (4000, False), (4000, True), (4000, True), (28, True), (40, False),
    ]  # fmt: skip
    ops = {op.name: op for op in made.ops}
    assert (ops[TO_DEVICE].written_bytes, ops[TO_RAM].written_bytes) == (4000, 4000)
    assert ops["aten.add_.Tensor"].in_ram
    assert not ops["aten.mul.Tensor"].in_ram


def test_without_any_nothing_is_in_ram():
    made = trace(lambda: lambda: torch.ones(3) + 1, steps=1)
    assert not any(storage.in_ram for storage in made.storages)
    assert not any(op.in_ram for op in made.ops)
