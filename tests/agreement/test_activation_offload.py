"""Activation offload on fake tensors and for real: the same copies and peaks, and what the process allocates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import brim
from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory import transfer
from brim.memory.pool import Pool
from brim.memory.recorder import Recorder
from brim.memory.tiers import Memory
from brim.techniques.activation_offload.technique import apply, offloadable_bytes
from support.cpu.truth import measured_peak_bytes
from support.offloaded_activations import BLOCKS, FAKES, KIB, MIB, SMALLEST, TIERS, WINDOW, Net, step

STEPS = 3


def facts(memory: Memory) -> dict[str, Any]:
    disk_bytes = memory.scratch().peak_bytes if memory.host is None else 0
    return {
        "copied": memory.recorder.copied_bytes,
        "peaks": (memory.compute.peak_bytes, memory.ram.peak_bytes, disk_bytes),
        "held": (memory.compute.held_bytes, memory.ram.held_bytes),
    }


def run(memory: Memory, blocks: tuple[str, ...], window_bytes: int) -> dict[str, Any]:
    net, x = Net(), torch.zeros(4, 64, 64)
    handle = apply(net, blocks, memory, smallest_bytes=SMALLEST, window_bytes=window_bytes)
    for _ in range(STEPS):
        step(net, x)
    memory.compute.settle()
    found = facts(memory) | {"misses": handle.misses}
    handle.remove()
    memory.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("tier", list(TIERS))
@pytest.mark.parametrize("blocks", [BLOCKS, BLOCKS[::2]], ids=["all", "some"])
@pytest.mark.parametrize("window_bytes", [0, WINDOW, 64 * MIB])
def test_what_is_predicted_is_what_happens(tier: str, blocks: tuple[str, ...], window_bytes: int) -> None:
    real = run(TIERS[tier](), blocks, window_bytes)
    with FakeTensorMode(), torch.random.fork_rng():
        predicted = run(FAKES[tier](), blocks, window_bytes)
    assert predicted == real
    assert (real["copied"] == {}) == (window_bytes == 64 * MIB)


class CountedSource:
    """Page-aligned memory out of PyTorch's allocator, so that its profiler sees all that a step allocates."""

    def make(self, bytes: int) -> torch.Tensor:
        whole = torch.empty(bytes + 4096, dtype=torch.uint8)
        begin = -whole.data_ptr() % 4096
        return whole[begin : begin + bytes]

    def release(self, tensor: torch.Tensor) -> None:
        """It is counted as freed when it dies."""


def counted(tier: str) -> Memory:
    recorder = Recorder(Timeline("run", measured=True))
    if tier == "disk":
        return Memory(compute=Pool(RAM, 64 * MIB, CountedSource(), recorder), host=None, recorder=recorder)
    host = Pool(RAM, 64 * MIB, CountedSource(), recorder)
    return Memory(compute=Pool(VRAM, 64 * MIB, CountedSource(), recorder), host=host, recorder=recorder)


def building(make: Callable[[], Memory] | None, memories: list[Memory]) -> Callable[[], Callable[[], Any]]:
    """What a tracer, or a profiler, watches: a net of 8 MiB of activations and three steps of it."""

    def build() -> Callable[[], Any]:
        net, x = Net(width=128), torch.zeros(4, 128, 128)
        if make is not None:
            memories.append(make())
            apply(net, BLOCKS, memories[-1], smallest_bytes=SMALLEST, window_bytes=MIB)
        return lambda: step(net, x)

    return build


@pytest.mark.thorough
@pytest.mark.parametrize("late_s", [0, 0.003])
@pytest.mark.parametrize("tier", list(TIERS))
def test_a_trace_with_it_applied_predicts_what_the_process_allocates(
    tier: str, late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the threads are that copy."""
    outcome = transfer._Lane.outcome

    def late(self: Any, job: Callable[[], None]) -> Any:
        time.sleep(late_s)
        return outcome(self, job)

    monkeypatch.setattr(transfer._Lane, "outcome", late)
    memories: list[Memory] = []
    with torch.random.fork_rng():
        plain = brim.simulate(brim.trace(building(None, []), steps=2, target="cpu")).peak_bytes.allocated
        offloaded = brim.trace(building(FAKES[tier], memories), steps=2, target="cpu")
    predicted = brim.simulate(offloaded).peak_bytes.allocated
    measured = measured_peak_bytes(building(lambda: counted(tier), memories), steps=2)
    assert predicted == pytest.approx(measured, rel=0.01)
    if tier == "disk":
        assert predicted < 0.5 * plain
    assert memories[0].recorder.copied_bytes == memories[1].recorder.copied_bytes
    for memory in memories:
        memory.close()


def test_offloadable_bytes_are_copied() -> None:
    with torch.random.fork_rng():
        trace = brim.trace(building(None, []), steps=2, target="cpu")
    foreseen = sum(offloadable_bytes(trace, BLOCKS, compute=RAM, smallest_bytes=SMALLEST).values())
    memories: list[Memory] = []
    building(TIERS["disk"], memories)()()
    out_bytes = memories[0].recorder.copied_bytes[RAM, DISK]
    memories[0].close()
    assert out_bytes <= foreseen <= out_bytes + MIB + 64 * 5 * 8 * KIB
