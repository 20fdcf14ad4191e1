"""Time and memory to read and to replay a memory snapshot of many events. Prints a table, writes JSON.

``python bench/snapshot.py [--events 600000] [--json FILE]``: a synthetic file of about 200 bytes an event, as real
snapshots with Python stacks are.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from multiprocessing import Process
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from brim.recordings import snapshot
from brim.recordings.timeline import recorded_run
from support.synthetic_snapshot import write


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
        recorded_run(history, "run")
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
            # In a process of its own, so that its memory does not count.
            process = Process(target=write, args=(path, options.events))
            process.start()
            process.join()
        row = measure(path)
    for name, value in row.items():
        print(f"{name:20} {value:,.2f}")
    if options.json:
        options.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
