"""Events per second of the simulated caching allocator, on random request sequences. Prints a table, writes JSON.

``python bench/allocator.py [--events 1000000] [--json FILE]``
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import AllocatorConfig

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:256",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
)


def requests(events: int, live: int, seed: int = 0) -> list[int]:
    """Sizes to allocate (> 0) and, negated, which of the live blocks to free; about ``live`` blocks at once."""
    random_ = random.Random(seed)
    made: list[int] = []
    held = 0
    for _ in range(events):
        if held and random_.random() < held / (2 * live):
            made.append(-random_.randrange(held) - 1)
            held -= 1
        else:
            made.append(int(2 ** random_.uniform(6, 27)))
            held += 1
    return made


def run(made: list[int], text: str) -> tuple[float, CachingAllocator]:
    """Seconds that the sequence takes under the settings, and the allocator afterwards."""
    allocator = CachingAllocator(AllocatorConfig.parse(text), capacity_bytes=1 << 40)
    blocks = []
    start = time.perf_counter()
    for request in made:
        if request > 0:
            blocks.append(allocator.malloc(request))
        else:
            index = -request - 1
            allocator.free(blocks[index])
            blocks[index] = blocks[-1]
            blocks.pop()
    return time.perf_counter() - start, allocator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=2_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = requests(options.events, options.live)
    rows = []
    print(f"{'settings':70} {'events/s':>12} {'per minute':>14} {'reserved GiB':>13}")
    for text in SETTINGS:
        seconds, allocator = run(made, text)
        rate = len(made) / seconds
        rows.append({"settings": text, "events": len(made), "seconds": seconds, "events_per_s": rate})
        peak = allocator.stats.reserved_peak_bytes / 2**30
        print(f"{text or '(default)':70} {rate:12,.0f} {rate * 60:14,.0f} {peak:13.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
