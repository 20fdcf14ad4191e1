"""Damaged profiles given to the command, long files of every kind, and odd characters in logs.

``BRIM_FUZZ_SECONDS`` sets how long the command is tried on each kind; the default is 100 inputs. Ten minutes,
with other examples than the last time:

    BRIM_FUZZ_SECONDS=600 BRIM_FUZZ_SEED=$RANDOM pytest tests/null/cli/explain/test_command_fuzz_profiles.py
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from brim.cli import main
from brim.core import EventKind, Timeline
from brim.recordings import snapshot
from brim.recordings.timeline import recorded_run
from brim.report.explain import summary
from brim.report.oom.reader import read_oom
from brim.units import KIB, MIB
from support.damaged import changed
from support.profiles import called, copied, kernel, memory, operation
from support.simulated_recording import Recording

SECONDS = float(os.environ.get("BRIM_FUZZ_SECONDS", "0"))
INPUTS = 100  # at least, however long they take
SEED = int(os.environ.get("BRIM_FUZZ_SEED", "0"))
SPARE_BYTES = 256 * KIB
MESSAGES = [
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 23.65 "
    b"GiB of which 100.00 MiB is free. Of the allocated memory 7.00 GiB is allocated by PyTorch.\n[rank1]: "
    b"RuntimeError: CUDA error: out of memory\n",
    b"RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.\n"
    b"OOM when allocating tensor with shape[3,3,512,1024] and type half",
    b"MPS backend out of memory (MPS allocated: 15.72 GiB, max allowed: 18.13 GiB). Tried to allocate 5.81 GiB.\n",
]


def traces() -> list[bytes]:
    events = [kernel(at * 10, 7, key=at) for at in range(5)]
    events += [called("cudaLaunchKernel", at * 10 - 3, 2, key=at) for at in range(5)]
    events += [called("cudaDeviceSynchronize", 5, 20), operation("aten::item", 4, 30), copied(17, 2, 4096)]
    events += [memory(3, 512), memory(4, -512), memory(5, 4096, kind=0)]
    plain = json.dumps({"traceEvents": events}).encode()
    return [plain, gzip.compress(plain, mtime=0)]


FILES = {"trace": traces}


def refused_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON.")


def commanded(path: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the command explained it: as text with a page, and as JSON. Anything but that is one error in words."""
    page = path.with_suffix(".html")
    codes = [main(["explain", str(path), *more]) for more in (["--html", str(page)], ["--json"])]
    text, errors = capsys.readouterr()
    assert codes[0] == codes[1], codes
    assert codes[0] in (0, 1, 2), codes
    assert ("Error: " in errors) == bool(codes[0]), errors
    assert page.exists() == (codes[0] == 0)
    if codes[0]:
        assert not text
        return False
    assert page.read_bytes().startswith(b"<!doctype html>")
    assert page.stat().st_size < 10 * MIB
    page.unlink()
    lines, brace, document = text.partition("\n{")
    json.loads(brace + document, parse_constant=refused_constant)
    assert all(line.isprintable() for line in lines.splitlines())
    return True


@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("kind", FILES)
def test_the_command_tells_what_is_in_damaged_profiles_or_one_error(kind, tmp_path, capsys):
    path, found, seeds = tmp_path / "file", Counter[bool](), FILES[kind]()
    seed, end = SEED, time.monotonic() + SECONDS
    while seed - SEED < INPUTS or time.monotonic() < end:
        seed += 1
        given = seed - SEED - 1
        path.write_bytes(
            seeds[given] if given < len(seeds) else changed(random_ := random.Random(seed), random_.choice(seeds))
        )
        try:
            found[commanded(path, capsys)] += 1
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error
    assert found[True], found
    assert found[False], found


def read_snapshot(data: bytes) -> None:
    found = snapshot.parse(data)
    for history in found.devices:
        recorded_run(history, "fuzzed", stacks=found.stacks)


def read_timeline(data: bytes) -> None:
    summary(Timeline.read(io.BytesIO(data), "fuzzed"))


def read_log(data: bytes) -> None:
    assert read_oom(io.BytesIO(data))


def long_recording() -> bytes:
    run = Recording("", 1 << 40)
    for _ in range(60):
        blocks = [run.malloc(size << 18) for size in range(1, 30)]
        for block in blocks[::2]:
            run.free(block)
    return run.dump()


def long_timeline() -> bytes:
    made = Timeline("run", measured=True)
    for number in range(8_000):
        made.add(
            EventKind.ALLOC, "vram", 512 * number, storage=number, label=f"l{number % 40}", category="activation"
        )
        if number % 3 == 0:
            made.add(EventKind.FREE, "vram", 512 * number, storage=number)
    return json.dumps(made.to_json()).encode()


# Times the file: each number of a timeline is an object for a while, each event of a recording several; of a message
# in a log, of some 100 characters, come numbers, an explanation and advice.
LONG: dict[str, tuple[Callable[[bytes], None], Callable[[], bytes], int]] = {
    "snapshot": (read_snapshot, long_recording, 10),
    "timeline": (read_timeline, long_timeline, 4),
    "message": (read_log, lambda: b"\n".join(MESSAGES * 400), 12),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_files_are_read_within_bounds(kind):
    """Where what a file takes is far more than what is taken anyway."""
    read, make, times = LONG[kind]
    data = make()
    read(data)  # what is imported and compiled once is not counted
    tracemalloc.start()
    try:
        read(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert times * len(data) > 8 * SPARE_BYTES
    assert peak_bytes <= times * len(data) + SPARE_BYTES, peak_bytes / len(data)


ODD = {
    "longer in lower case": "İ" * 100,
    "shorter in lower case": "ẞ" * 100,
    "colours": "\x1b[31m\x1b[1m",
    "a title": "\x1b]0;title\x07",
    "zeros": "\0" * 8,
    "other ends of lines": "\u2028\x85\x0b\x0c",
    "both directions": "\u202e\u2066",
}


@pytest.mark.parametrize("before", ODD.values(), ids=ODD)
@pytest.mark.parametrize("message", MESSAGES, ids=["PyTorch", "others", "MPS"])
def test_odd_characters_before_the_telling_words_change_nothing(before, message):
    plain = read_oom(io.BytesIO(b" " + message))
    odd = read_oom(io.BytesIO(before.encode() + b" " + message))
    assert [one.family for one in odd] == [one.family for one in plain]
    assert [one.numbers_bytes for one in odd] == [one.numbers_bytes for one in plain]
    assert [one.cause for one in odd] == [one.cause for one in plain]
