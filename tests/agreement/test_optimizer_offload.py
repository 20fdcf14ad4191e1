"""Optimizer offload applied to fake memory within a trace, and for real: the same events, bytes and peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim.core import EventKind, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.tiers import Memory, fake_memory
from brim.techniques.optimizer_offload.technique import apply
from support.offloaded import MIB, OPTIMIZERS, WORDS, machine, make

STEPS = 3
Facts = dict[str, Any]


def facts(memory: Memory, timeline: Timeline, written_bytes: int) -> Facts:
    """Allocations of each tier in their order, all moves (lanes run beside one another), peaks and totals."""
    events = list(timeline)
    return {
        "pools": [
            (e.kind.name, e.tier, e.bytes, e.label) for e in events if e.kind not in (EventKind.COPY, EventKind.IDLE)
        ],
        "moves": Counter((e.source, e.tier, e.bytes, e.label) for e in events if e.kind is EventKind.COPY),
        "peaks": {pool.tier: pool.peak_bytes for pool in (memory.compute, memory.ram)},
        "copied": dict(memory.recorder.copied_bytes),
        "disk": memory.scratch().peak_bytes if DISK in str(memory.recorder.copied_bytes) else 0,
        "written": written_bytes,
    }


def stepper(memory: Memory, name: str, early: bool, clip: bool, **options: Any) -> tuple[Any, Callable[[], None]]:
    model = make(tied=True, layers=3)
    model.unused.requires_grad_(False)
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    handle = apply(model, optimizer, memory, block_bytes=3000, **options)
    ids = torch.arange(12).view(2, 6) % WORDS

    def step() -> None:
        for part in range(2):
            loss = model(ids)
            if early and part == 1:
                with handle.final():
                    loss.backward()
            else:
                loss.backward()
        if clip:
            handle.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()

    return handle, step


def measured(kind: str, folder: Path, *args: Any, **options: Any) -> Facts:
    memory = machine(kind, folder)
    handle, step = stepper(memory, *args, **options)
    for _ in range(STEPS):
        step()
    for records in (handle._storage.states.records, handle._storage.gradients.records):
        if records is not None:
            records.settle()
    found = facts(memory, memory.recorder.timeline, handle.written_bytes_per_step)
    handle.remove()
    memory.close()
    return found


def predicted(kind: str, *args: Any, **options: Any) -> Facts:
    made: list[Any] = []

    def build() -> Callable[[], None]:
        timeline = Timeline("p", measured=False)
        tier = RAM if kind == "cpu" else VRAM
        memory = fake_memory(timeline, compute_tier=tier, compute_bytes=8 * MIB, ram_bytes=8 * MIB)
        handle, step = stepper(memory, *args, **options)
        made.extend([memory, timeline, handle])
        return step

    brim.trace(build, target="cpu", steps=STEPS)
    memory, timeline, handle = made
    return facts(memory, timeline, handle.written_bytes_per_step)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "states", "gradients", "way"),
    [
        ("adamw", "cpu", "disk", "keep", "step"),
        ("adamw", "cpu", "disk", "keep", "final"),
        ("adamw", "cpu", "disk", "disk", "final"),
        ("adamw", "cpu", "disk", "disk", "clip"),
        ("adamw", "emulated", "ram", "ram", "final"),
        ("adamw", "emulated", "ram", "ram", "clip"),
        ("adamw", "emulated", "disk", "ram", "step"),
        ("adamw", "emulated", "keep", "disk", "step"),
        ("sgd momentum", "emulated", "disk", "keep", "final"),
        ("adafactor", "cpu", "disk", "disk", "step"),
    ],
)
def test_what_is_predicted_is_what_happens(
    name: str, kind: str, states: str, gradients: str, way: str, tmp_path: Path
) -> None:
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    args, options = (name, way == "final", way == "clip"), {"states": states, "gradients": gradients}
    real, foreseen = measured(kind, folder, *args, **options), predicted(kind, *args, **options)
    assert foreseen == real
    assert real["peaks"][RAM] > 0
    if DISK in (states, gradients):
        assert real["copied"][RAM, DISK] > 0
