"""What is read off a trace adds up to the trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import brim
from brim.core import Category, Hardware, Tier, Trace
from brim.core.hardware import RAM
from brim.estimation.simulation import simulate
from brim.planning.solver.step_profile import BACKWARD, FULL, KEEP, SELECTIVE, UPDATE
from brim.planning.solver.training import profile_of
from brim.predict import cost
from brim.techniques.blocks import find_blocks
from brim.techniques.checkpointing import technique as checkpointing

CPU = Hardware(
    name="a processor",
    compute=RAM,
    tiers=(Tier(name=RAM, capacity_bytes=1 << 40, bytes_per_s=10e9),),
    flops_per_s={"float32": 50e9},
)
BATCH, WIDTH = 6, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Layer() for _ in range(5))), nn.Linear(WIDTH, 3))


@pytest.fixture(scope="module")
def traced() -> Trace:
    def build() -> Callable[[], None]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.empty(BATCH, 7, WIDTH)

        def step() -> None:
            model(data).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return brim.trace(build, steps=2, target="cpu")


def test_the_profile_has_the_peaks_bytes_and_seconds_of_the_trace(traced: Trace) -> None:
    model = make()
    partition = find_blocks(model)
    trained = {block.name: block.bytes for block in partition.blocks}
    layers = checkpointing.blocks(model)
    held = sum(p.numel() * 4 for p in model.parameters())
    found = profile_of(
        traced, partition, CPU, batch=BATCH, trained_bytes=trained, state_bytes=2 * held, repeated=layers
    )
    whole = simulate(traced).peak_bytes.allocated
    assert found.weight_bytes == held
    assert 4 * held <= found.peak_bytes[UPDATE] <= whole
    assert 3 * held <= found.peak_bytes[BACKWARD] <= whole <= max(found.peak_bytes.values()) + held
    by_name = {block.name: block for block in found.blocks}
    assert set(layers) <= set(by_name)
    kept = sum(
        s.bytes
        for s in traced.storages
        if s.category is Category.ACTIVATION and s.born >= traced.step_starts[-1] and s.module.startswith("1.")
    )
    assert sum(by_name[name].kept_bytes[KEEP] for name in layers) == kept > 0
    for name in layers:
        bytes_by_choice = by_name[name].kept_bytes
        assert bytes_by_choice[FULL] <= bytes_by_choice[SELECTIVE] < bytes_by_choice[KEEP]
        assert by_name[name].again_s[FULL] >= by_name[name].again_s[SELECTIVE] > 0
        assert by_name[name].backward_s > by_name[name].forward_s > 0
    total = sum(b.forward_s + b.backward_s for b in found.blocks) + sum(found.outside_s) + found.update_s
    assert total == pytest.approx(cost.step_s(traced, CPU))


def test_a_leaf_that_is_a_block_can_not_be_checkpointed(traced: Trace) -> None:
    model = make()
    partition = find_blocks(model)
    found = profile_of(traced, partition, CPU, batch=BATCH, trained_bytes={}, state_bytes=0, repeated=[])
    assert all(set(block.kept_bytes) == {KEEP} and not block.offload_bytes for block in found.blocks)
    assert found.gradient_bytes == 0
