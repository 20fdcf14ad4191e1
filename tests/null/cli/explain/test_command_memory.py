"""What ``brim explain``'s readers take: at most four times the file beside a few MiB, whatever it holds.

Measured is the growth of the resident set of a process that has imported everything already, until a Timeline (of a
log: the messages; of a profile: figures and Timelines) is there. ``FLOOR_BYTES`` is what buffers, and the tables that
no file is too small for, take. Of a packed trace the text counts, not what it is packed to.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.core import EventKind, Timeline
from brim.units import KIB, MIB
from support import synthetic_snapshot, synthetic_trace
from support.simulated_recording import Recording

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a high water of RAM")
TIMES = 4
FLOOR_BYTES = 4 * MIB
SCRIPT = Path(__file__).parents[3] / "support" / "reading_memory.py"
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU {} has a total capacity of 23.65 GiB "
    "of which 100.00 MiB is free. Of the allocated memory 7.00 GiB is allocated by PyTorch.\n"
)


def messages(count: int, kinds: int) -> bytes:
    return "".join(MESSAGE.format(f"{number % kinds}.25", number % 8) for number in range(count)).encode()


def short_lines(size: int) -> bytes:
    """As many objects as a log can have."""
    return messages(1, 1) + b"of memory\nab\n" * (size // 13)


def recorded(rounds: int, *, old: bool = False) -> bytes:
    """Events without stacks: of no file has an event fewer bytes. ``old``: as PyTorch 1.x wrote segments."""
    run = Recording("", 1 << 40)
    kept = [run.malloc(size << 18) for size in range(1, 30)]
    for _ in range(rounds):
        blocks = [run.malloc(size << 18) for size in range(1, 30)]
        for block in blocks:
            run.free(block)
    assert kept
    if not old:
        return run.dump()
    body = pickle.loads(run.dump())  # written by this test
    frames = [{"filename": f"{number}.py", "line": number, "name": "call"} for number in range(20)]
    for segment in body["segments"]:
        for block in segment["blocks"]:
            asked, at = block.pop("requested_size"), block.pop("address")
            if block["state"] != "inactive":
                block["history"] = [{"addr": at, "real_size": asked, "frames": list(frames)}]
    return pickle.dumps(body, protocol=2)


def without_history(blocks: int) -> bytes:
    """Every other block in use, no event."""
    segments, size = [], 3 * MIB
    frames = [{"filename": f"{number}.py", "line": number, "name": "call"} for number in range(20)]
    for start in range(1 << 40, (1 << 40) + blocks * size, 100 * size):
        states = ["active_allocated", "inactive"] * 50
        rows = [
            {
                "address": start + at * size,
                "size": size,
                "requested_size": size - at,
                "state": state,
                "frames": frames,
            }
            for at, state in enumerate(states)
        ]
        segments.append(
            {"device": 0, "address": start, "total_size": 100 * size, "stream": 0, "segment_type": "large"}
            | {"segment_pool_id": (0, 0), "is_expandable": False, "blocks": rows}
        )
    return pickle.dumps({"segments": segments, "device_traces": [[]], "allocator_settings": {}})


def timeline(count: int) -> bytes:
    made = Timeline("run", measured=True)
    for number in range(count):
        made.add(EventKind.ALLOC, "vram", 512 * (number % 9), storage=number, label=f"l{number % 40}")
        if number % 3 == 0:
            made.add(EventKind.FREE, "vram", 512 * (number % 9), storage=number)
    return json.dumps(made.to_json()).encode()


def trace(folder: Path, count: int, name: str = "trace.json") -> bytes:
    synthetic_trace.write(folder / name, count)
    return (folder / name).read_bytes()


def with_stacks(folder: Path, events: int) -> bytes:
    synthetic_snapshot.write(folder / "stacks.pickle", events)
    return (folder / "stacks.pickle").read_bytes()


# Kind, its least example, the file, and how many bytes it has at least (of a packed one: its text).
CASES: dict[str, tuple[str, Callable[[Path], bytes], int]] = {
    "log, few messages": ("log", lambda folder: messages(20, 20), 3 * KIB),
    "log, all messages": ("log", lambda folder: messages(20_000, 999), 3 * MIB),
    "log, the same message": ("log", lambda folder: messages(20_000, 1), 3 * MIB),
    "log, short lines": ("log", lambda folder: short_lines(4 * MIB), 3 * MIB),
    "log, one long line": ("log", lambda folder: messages(20_000, 3).replace(b"\n", b" "), 3 * MIB),
    "log, text around": ("log", lambda folder: b"loss 1.5\n" * 800_000 + messages(1, 1), 6 * MIB),
    "snapshot, small": ("snapshot", lambda folder: recorded(3), 10 * KIB),
    "snapshot, events alone": ("snapshot", lambda folder: recorded(1200), 2 * MIB),
    "snapshot, with stacks": ("snapshot", lambda folder: with_stacks(folder, 20_000), 3 * MIB),
    "snapshot, old": ("snapshot", lambda folder: recorded(300, old=True), MIB),
    "snapshot, no history": ("snapshot", lambda folder: without_history(90_000), 3 * MIB),
    "trace, small": ("trace", lambda folder: trace(folder, 60), 10 * KIB),
    "trace": ("trace", lambda folder: trace(folder, 30_000), 5 * MIB),
    "trace, packed": ("trace", lambda folder: trace(folder, 30_000, "trace.json.gz"), 5 * MIB),
    "timeline, small": ("timeline", lambda folder: timeline(200), 8 * KIB),
    "timeline": ("timeline", lambda folder: timeline(120_000), 5 * MIB),
}
LEAST: dict[str, Callable[[Path], bytes]] = {
    "log": lambda folder: messages(1, 1),
    "snapshot": lambda folder: recorded(1),
    "trace": lambda folder: trace(folder, 30),
    "timeline": lambda folder: timeline(3),
}


@functools.cache
def environment() -> dict[str, str]:
    import brim

    return os.environ | {"PYTHONPATH": str(Path(brim.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def grown_bytes(kind: str, example: Path, path: Path) -> int:
    command = [sys.executable, str(SCRIPT), kind, str(example), str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(), timeout=250)
    return int(done.stdout)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_file_takes_no_more_than_four_times_its_size_and_a_few_mib(case, tmp_path):
    kind, make, least_bytes = CASES[case]
    example, path = tmp_path / "example", tmp_path / "given"
    example.write_bytes(LEAST[kind](tmp_path))
    data: Any = make(tmp_path)
    path.write_bytes(data)
    size = len(gzip.decompress(data)) if data.startswith(b"\x1f\x8b") else len(data)
    assert size >= least_bytes
    grown = grown_bytes(kind, example, path)
    assert grown <= TIMES * size + FLOOR_BYTES, f"{grown / size:.1f} times {size:,} bytes"
