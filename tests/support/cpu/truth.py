"""Measure what a real CPU run allocates, event by event, as PyTorch's profiler reports it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def memory_events(build: Callable[[], Callable[[], Any]], steps: int) -> list[tuple[int, str]]:
    """Every allocation (positive bytes) and free (negative) on the CPU, in order, with the operation around it."""
    gc.collect()  # what an earlier run left in cycles must not be freed within this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step = build()
        for _ in range(steps):
            step()
        held = step  # what build made stays alive until the profiler has stopped
    del held
    operations: list[tuple[int, str]] = []  # stack of (end, name)
    found = []
    events = sorted(prof.profiler.kineto_results.events(), key=lambda e: (e.start_ns(), -e.duration_ns()))
    for event in events:
        if event.name() == "[memory]":
            while operations and operations[-1][0] < event.start_ns():
                operations.pop()
            found.append((event.nbytes(), "/".join(name for _, name in operations[-3:])))
        elif event.name().startswith(("aten::", "mkldnn", "transformers::")):
            while operations and operations[-1][0] <= event.start_ns():
                operations.pop()
            operations.append((event.start_ns() + event.duration_ns(), event.name()))
    return found


def peak_bytes(events: list[tuple[int, str]]) -> int:
    held = peak = 0
    for count, _ in events:
        held += count
        peak = max(peak, held)
    return peak


def measured_peak_bytes(build: Callable[[], Callable[[], Any]], steps: int) -> int:
    torch.manual_seed(0)
    return peak_bytes(memory_events(build, steps))
