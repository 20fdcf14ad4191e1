"""Writes memory snapshots of any length as PyTorch does: some 200 bytes an event, as real ones with stacks have."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from brim.allocator.caching_allocator import CachingAllocator


def write(path: Path, events: int) -> None:
    """A run of the simulated allocator as PyTorch would have dumped it, without the final segments."""
    random_ = random.Random(0)
    frames = [{"filename": f"/site-packages/torch/{i}.py", "line": i, "name": f"call_{i}"} for i in range(2_000)]
    stacks = [random_.sample(frames, 24) for _ in range(5_000)]
    trace: list[dict[str, Any]] = []

    def add(action: str, address: int, size: int, stack: list[Any]) -> None:
        trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": 1_748_474_327_043_778 + len(trace),
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": stack[:],
            }
        )

    allocator = CachingAllocator(on_segment=lambda action, at, size, stream: add(action, at, size, stacks[0]))
    blocks = []
    while len(trace) < events:
        if random_.random() < 0.5 or not blocks:
            block = allocator.malloc(int(2 ** random_.uniform(9, 26)))
            add("alloc", block.address, block.requested, random_.choice(stacks))
            blocks.append(block)
        if len(blocks) > 1_000 or (random_.random() < 0.5 and blocks):
            block = blocks.pop(random_.randrange(len(blocks)))
            for action in ("free_requested", "free_completed"):
                add(action, block.address, block.requested, random_.choice(stacks))
            allocator.free(block)
    with path.open("wb") as file:
        pickle.dump({"segments": [], "device_traces": [trace], "allocator_settings": {}}, file)
