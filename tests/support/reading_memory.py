"""Reads one file in this process, which does nothing else, and prints by how much its memory grew at most.

``python reading_memory.py KIND EXAMPLE FILE``: a small ``EXAMPLE`` of the kind is read first, so that what is
imported and compiled once is there already.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_log(path: Path) -> Any:
    from brim.report.oom.reader import read_oom

    with path.open("rb") as file:
        return read_oom(file)


def read_snapshot(path: Path) -> Any:
    """As a Timeline, which takes a replay."""
    from brim.recordings import snapshot
    from brim.recordings.timeline import recorded_run

    found = snapshot.read(path)
    return [recorded_run(history, "run", stacks=found.stacks) for history in found.devices]


def read_profile(path: Path) -> Any:
    from brim.profiles import profiler as profile

    return profile.read(path)


def read_timeline(path: Path) -> Any:
    from brim.core import Timeline
    from brim.report.explain import summary

    made = Timeline.read(path)
    return made, summary(made)


READERS: dict[str, Callable[[Path], Any]] = {
    "log": read_log,
    "snapshot": read_snapshot,
    "trace": read_profile,
    "timeline": read_timeline,
}


def status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"Linux tells {name}"
    return int(found[1]) * 1024


def main() -> None:
    kind, example, path = sys.argv[1:]
    READERS[kind](Path(example))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high water begins anew
    before = status_bytes("VmRSS")
    held = READERS[kind](Path(path))
    print(status_bytes("VmHWM") - before)
    del held


if __name__ == "__main__":
    main()
