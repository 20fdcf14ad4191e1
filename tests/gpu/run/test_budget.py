"""What a fit leaves reserved of a GPU, and what a program without a budget gets of it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import brim
from brim.measure.capacity import free_bytes
from brim.run.fitting import budgets, held_vram_bytes, machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20


def net() -> nn.Sequential:
    """Layers of 16 MiB, each in a segment of its own."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU()) for _ in range(8)])


@torch.no_grad()
def test_what_a_model_had_on_the_device_is_given_back_when_it_is_fitted():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = net().cuda()
    assert torch.cuda.memory_reserved() - before >= 128 * MIB
    torch.cuda.reset_peak_memory_stats()
    handle = brim.fit(model, vram=72 * MIB, ram="1GiB", activations="1MiB")
    assert torch.cuda.memory_reserved() - before <= 72 * MIB
    assert torch.cuda.max_memory_reserved() - before <= 128 * MIB + 72 * MIB
    handle.remove()


def test_a_budget_that_nobody_gave_has_what_the_model_holds_already():
    gc.collect()
    torch.cuda.empty_cache()
    hardware = machine("cuda")
    free = budgets(hardware, None, "1GiB", "cuda")["vram"]
    model = net().cuda()
    assert held_vram_bytes(model, None) == 128 * MIB
    found = budgets(hardware, None, "1GiB", "cuda", held_vram_bytes=held_vram_bytes(model, None))["vram"]
    assert found == pytest.approx(free, abs=2 * MIB)


def test_a_program_s_memory_fraction_bounds_what_is_free():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(512 * MIB / total)
    try:
        assert free_bytes("vram") <= 512 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
