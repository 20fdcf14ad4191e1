"""torchao's 8-bit AdamW in a trace: its states, and what its compiled step takes beside them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import brim
from brim.core import Category
from brim.estimation.optimizers import make_optimizer
from brim.predict.optimizer_states import state_bytes


def traced(*shape: int) -> brim.core.Trace:
    def build():
        parameter = nn.Parameter(torch.empty(shape, device="cuda"))
        optimizer = make_optimizer("adamw8bit", [parameter])

        def step() -> None:
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return brim.trace(build, steps=2, target="cuda")


def beside_the_state(trace: brim.core.Trace) -> Counter[int]:
    """Sizes of what comes and goes in the optimizer's part of the steps."""
    starts = [op.at for op in trace.ops if op.phase == "optimizer"]
    inside = (s for s in trace.storages if s.category is not Category.OPTIMIZER_STATE and s.died is not None)
    return Counter(s.bytes for s in inside if any(abs(s.born - at) <= 1 for at in starts))


@pytest.mark.parametrize("shape", [(40, 256), (30, 100), (4096,)])
def test_its_states_are_those_of_the_formula_but_for_counters(shape: tuple[int, ...]) -> None:
    held = sum(s.bytes for s in traced(*shape).storages if s.category is Category.OPTIMIZER_STATE)
    assert held == state_bytes("adamw8bit", shape, 4) - 4


def test_a_large_parameter_has_both_moments_in_float32_while_it_is_updated() -> None:
    count = 2048 * 1024  # 64 blocks of 256 for each of 128 multiprocessors
    found = beside_the_state(traced(2048, 1024))
    assert found[count * 4] >= 2 * 2
    assert found[count // 256 * 4] == 2 * 2


def test_a_small_one_is_updated_in_registers() -> None:
    assert beside_the_state(traced(1024, 1024)) == Counter()


def test_rows_that_are_no_whole_blocks_take_new_scales() -> None:
    assert beside_the_state(traced(512, 96))[512 * 96 // 256 * 4] == 2 * 2
