"""A trace becomes a Timeline: live bytes on the CPU, PyTorch's caching allocator for CUDA."""

from __future__ import annotations

import pytest
import torch

from brim.core import Category, EventKind, Storage, Trace
from brim.errors import UsageError
from brim.predict.tracer import trace
from brim.simulate import simulate

MIB = 1 << 20


def made(target: str, *lives: tuple[int, int, int | None]) -> Trace:
    storages = tuple(
        Storage(id=i, bytes=size, category=Category.TEMPORARY, module="", born=born, died=died)
        for i, (size, born, died) in enumerate(lives)
    )
    return Trace(model="made", target=target, ops=(), storages=storages)


def test_on_the_cpu_the_peak_is_of_live_bytes_in_the_order_of_the_clock():
    timeline = simulate(made("cpu", (100, 0, 3), (50, 1, 2), (70, 4, None)))
    assert timeline.facts["peak_bytes.allocated"] == 150
    assert [event.bytes for event in timeline] == [100, 50, 50, 100, 70]
    assert not timeline.measured


def test_on_cuda_blocks_are_rounded_and_segments_reserved():
    timeline = simulate(made("cuda", (100, 0, None), (3 * MIB, 1, 2), (30 * MIB, 3, None)))
    assert timeline.facts["peak_bytes.allocated"] == 512 + 30 * MIB
    assert timeline.facts["peak_bytes.reserved"] == (2 + 20 + 30) * MIB
    assert timeline.facts["peak_bytes.requested"] == 100 + 30 * MIB
    assert "peak_bytes.process" not in timeline.facts
    assert sum(event.kind is EventKind.SEGMENT_ALLOC for event in timeline) == 3


def test_allocator_settings_change_what_is_reserved():
    lives = made("cuda", (3 * MIB, 0, None))
    assert simulate(lives, alloc_conf="expandable_segments:True").facts["peak_bytes.reserved"] == 20 * MIB
    odd = made("cuda", (9 * MIB + 1, 0, None))
    rounded = simulate(odd, alloc_conf="roundup_power2_divisions:2").facts["peak_bytes.allocated"]
    assert rounded == 12 * MIB


def test_with_a_gpu_the_context_is_counted_and_the_memory_is_a_limit():
    small = simulate(made("cuda", (MIB, 0, None)), gpu="RTX 4090")
    assert small.facts["peak_bytes.process"] > small.facts["peak_bytes.reserved"]
    large = simulate(made("cuda", (20 << 30, 0, None), (20 << 30, 1, None)), gpu="RTX 4090")
    assert [event.kind for event in large][-1] is EventKind.OOM


def test_the_workspace_is_the_one_of_the_gpu_that_is_simulated():
    def build():
        weight = torch.ones(8, 8, device="cuda")
        return lambda: weight @ weight

    traced = trace(build, steps=1, target="cuda")
    names = ("RTX 4090", "NVIDIA H100 80GB HBM3")
    ada, hopper = (simulate(traced, gpu=name).facts["peak_bytes.requested"] for name in names)
    assert hopper - ada == 32 * MIB - 8_519_680


def test_a_gpu_or_setting_means_nothing_for_the_cpu():
    with pytest.raises(UsageError, match="gpu for a trace of the CPU"):
        simulate(made("cpu", (1, 0, None)), gpu="A100")
    with pytest.raises(UsageError, match="alloc_conf"):
        simulate(made("cpu", (1, 0, None)), alloc_conf="expandable_segments:True")


def test_unknown_gpus_and_settings_are_refused():
    with pytest.raises(UsageError):
        simulate(made("cuda", (1, 0, None)), gpu="RTX 9999")
    with pytest.raises(UsageError):
        simulate(made("cuda", (1, 0, None)), alloc_conf="expandible_segments:True")
