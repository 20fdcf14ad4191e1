"""Time and memory to read and to replay a memory snapshot of many events. Prints a table, writes JSON.

``python bench/snapshot.py [--events 600000] [--json FILE]``: a synthetic file of about 200 bytes an event, as real
snapshots with Python stacks are.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from brim.allocator.caching_allocator import CachingAllocator
from brim.recordings import snapshot
from brim.recordings.replay import replay


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


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(path: Path) -> dict[str, float]:
    before = peak_rss_bytes()
    start = time.perf_counter()
    found = snapshot.read(path)
    read_s = time.perf_counter() - start
    peak = peak_rss_bytes()
    start = time.perf_counter()
    for history in found.devices:
        replay(history)
    size = path.stat().st_size
    return {
        "events": len(found.devices[0].actions),
        "file_bytes": size,
        "read_s": read_s,
        "replay_s": time.perf_counter() - start,
        "peak_rss_bytes": peak,
        "rss_per_file_byte": (peak - before) / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=600_000)
    parser.add_argument("--file", type=Path, help="a file to measure; default: write a synthetic one first")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if path is None:
            path = Path(folder) / "run.pickle"
            import multiprocessing

            maker = multiprocessing.get_context("spawn").Process(target=write, args=(path, options.events))
            maker.start()  # in a process of its own, so that its memory does not count
            maker.join()
        row = measure(path)
    for name, value in row.items():
        print(f"{name:20} {value:,.2f}")
    if options.json:
        options.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
