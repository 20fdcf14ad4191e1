"""Damaged and hostile files give a result or one typed error, within a few times their size in memory.

``BRIM_FUZZ_SECONDS`` sets how long each reader, and the command, is tried; the default is short. Ten minutes each:
``BRIM_FUZZ_SECONDS=600 pytest tests/null/cli/test_explain_fuzz.py -k damaged``. ``BRIM_FUZZ_SEED`` begins elsewhere.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import pickle
import random
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import nsight_database
from _simulated_recording import Recording
from brim.cli import main
from brim.cli.explain_source import parsed_timeline
from brim.core import EventKind, Timeline
from brim.errors import BrimError
from brim.measure import snapshot
from brim.memory.recorded_timeline import recorded_run
from brim.report.explain import summary
from brim.report.oom import read_oom
from brim.units import KIB, MIB
from profiles import called, copied, kernel, memory, operation

SECONDS = float(os.environ.get("BRIM_FUZZ_SECONDS", "2"))
TIMES_THE_INPUT, SPARE_BYTES = 4, 6 * MIB  # of hostile pickles
# Beside what a file with nothing in it takes. Each number of a timeline is an object for a while, each event of a
# recording some; a message in a log, of 100 characters, becomes numbers, an explanation and advice.
TIMES = {"snapshot": 12, "timeline": 8, "message": 24}
SPARE_PER_FILE_BYTES = 256 * KIB


def recordings(rounds: int = 1) -> list[bytes]:
    made = []
    for settings in ("", "expandable_segments:True"):
        run = Recording(settings, 400 * MIB * rounds)
        for _ in range(rounds):
            blocks = [run.malloc(size << 18) for size in range(1, 30)]
            for block in blocks[::2]:
                run.free(block)
        data = run.dump()
        made += [data, pickle.dumps(pickle.loads(data), protocol=2)]  # written by this test
    return made


def timelines(count: int = 40) -> list[bytes]:
    made = Timeline("run", measured=True, facts={"budget_bytes.vram": 5.0})
    for number in range(count):
        made.add(
            EventKind.ALLOC, "vram", 512 * number, storage=number, label=f"l{number % 40}", category="activation"
        )
        if number % 3 == 0:
            made.add(EventKind.FREE, "vram", 512 * number, storage=number)
    return [json.dumps(made.to_json()).encode()]


MESSAGES = [
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 23.65 "
    b"GiB of which 100.00 MiB is free. Process 77 has 15.00 GiB memory in use. Of the allocated memory 7.00 GiB is "
    b"allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated.\n[rank1]: RuntimeError: CUDA "
    b"error: out of memory\n",
    b"RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.\nggml_gallocr_reserve_n: failed "
    b"to allocate CUDA1 buffer of size 1048576\nOOM when allocating tensor with shape[3,3,512,1024] and type half",
    b"MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB, max allowed: 18.13 GiB). "
    b"Tried to allocate 5.81 GiB.\n\xff\xfe2024-05-01 12:00:00 ERROR DataLoader worker (pid 4) is killed by",
]
# Instructions of pickles that are worth inserting anywhere.
PIECES = [
    b"\x94", b"h\x00", b"j\x00\x00\x00\x00", b"2", b"0", b"1", b"(", b"t", b"l", b"d", b"e", b"u", b"]", b"}", b")",
    b"\x85", b"\x86", b"\x87", b"N", b".", b"c__builtin__\neval\n", b"\x93", b"R", b"\x81", b"\x92", b"b", b"i", b"o",
    b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"Q", b"P0\n", b"\x97", b"\x98", b"\x96" + b"\xff" * 8,
    b"X" + struct.pack("<I", 2**32 - 1), b"\x8d" + struct.pack("<Q", 2**62), b"\x8b" + struct.pack("<i", -1),
    b"\x95" + struct.pack("<Q", 2**63), b"r" + struct.pack("<I", 2**31), b"q\xff", b"\x8f", b"\x90", b"\x91",
    b"G" + struct.pack(">d", float("nan")), b"I99999999999999999999\n", b"S'x'\n", b"V\\ud800\n", b"[" * 500,
    b"{" * 500, b"\x80\x05",
    b"9" * 400, b"1e999", b"-1", b"NaN", b"null", b'"', b"\\u0000", b"\x00", b"\x1b[31m", b"\r", b"[rank7]: ",
    "İ".encode() * 60, "ẞﬁ\u2028\u0085".encode(), b"\x1b]0;title\x07", b"\xc2\x9b2J",
]  # fmt: skip


def mutated(seeds: list[bytes], random_: random.Random) -> bytes:
    data = bytearray(random_.choice(seeds))
    for _ in range(random_.choice((1, 1, 2, 3, 8, 20))):
        at = random_.randrange(len(data) + 1)
        what = random_.random()
        if what < 0.35:
            data[at : at + 1] = bytes([random_.randrange(256)])
        elif what < 0.6:
            data[at:at] = random_.choice(PIECES)
        elif what < 0.7:
            del data[at : at + random_.randrange(1, 40)]
        elif what < 0.8:
            other = random_.choice(seeds)
            start = random_.randrange(len(other))
            data[at:at] = other[start : start + random_.randrange(1, 200)]
        elif what < 0.9:
            piece = bytes(data[at : at + random_.randrange(1, 100)])
            data[at:at] = piece * random_.choice((2, 10, 100))
        else:
            del data[at:]
    return bytes(data)


def read_snapshot(data: bytes) -> None:
    found = snapshot.parse(data)
    for history in found.devices:
        recorded_run(history, "fuzzed", stacks=found.stacks)


def read_timeline(data: bytes) -> None:
    summary(parsed_timeline(data, "fuzzed"))


def read_log(data: bytes) -> None:
    assert read_oom(io.BytesIO(data))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a kind of file is read, some to damage, a long one, and one with nothing in it."""

    read: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    long: Callable[[], bytes]
    empty: bytes


KINDS = {
    "snapshot": Kind(
        read=read_snapshot,
        seeds=recordings,
        long=lambda: recordings(60)[0],
        empty=pickle.dumps({"segments": [], "device_traces": []}),
    ),
    "timeline": Kind(
        read=read_timeline,
        seeds=timelines,
        long=lambda: timelines(8_000)[0],
        empty=json.dumps(Timeline("run", measured=True).to_json()).encode(),
    ),
    "message": Kind(
        read=read_log, seeds=lambda: MESSAGES, long=lambda: b"\n".join(MESSAGES * 400), empty=b"out of memory"
    ),
}


def peak_bytes(kind: str, data: bytes) -> tuple[bool, int]:
    """Whether it was read, and what that took."""
    tracemalloc.start()
    try:
        KINDS[kind].read(data)
        return True, tracemalloc.get_traced_memory()[1]
    except BrimError:
        return False, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@functools.cache
def fixed_bytes(kind: str) -> int:
    """For a file with nothing in it. The first call imports, so the second one counts."""
    return [peak_bytes(kind, KINDS[kind].empty)[1] for _ in range(2)][1]


def judged(kind: str, data: bytes, seed: int = 0) -> bool:
    most = fixed_bytes(kind) + TIMES[kind] * len(data) + SPARE_PER_FILE_BYTES
    try:
        read, taken_bytes = peak_bytes(kind, data)
    except Exception as error:
        raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error
    assert taken_bytes <= most, (kind, seed, len(data), taken_bytes)
    return read


def damaged(seeds: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """For as long as it was asked for, at least once."""
    seed = int(os.environ.get("BRIM_FUZZ_SEED", "0"))
    end = time.monotonic() + SECONDS
    while True:
        seed += 1
        yield seed, mutated(seeds, random.Random(seed))
        if time.monotonic() > end:
            return


@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_give_a_result_or_one_typed_error_within_bounds(kind):
    found = Counter(judged(kind, data, seed) for seed, data in damaged(KINDS[kind].seeds()))
    assert found[True], found
    assert found[False], found


@pytest.mark.parametrize("kind", KINDS)
def test_long_files_are_read_within_bounds(kind):
    """Where what a file takes is far more than what is taken anyway."""
    data = KINDS[kind].long()
    assert TIMES[kind] * len(data) > 10 * (fixed_bytes(kind) + SPARE_PER_FILE_BYTES)
    assert judged(kind, data)


ODD = {
    "longer in lower case": "İ" * 100,
    "shorter in lower case": "ẞ" * 100,
    "colours": "\x1b[31m\x1b[1m",
    "a title": "\x1b]0;title\x07",
    "zeros": "\0" * 40,
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


def traces() -> list[bytes]:
    events = [kernel(at * 10, 7, key=at) for at in range(5)]
    events += [called("cudaLaunchKernel", at * 10 - 3, 2, key=at) for at in range(5)]
    events += [called("cudaDeviceSynchronize", 5, 20), operation("aten::item", 4, 30), copied(17, 2, 4096)]
    events += [memory(3, 512), memory(4, -512), memory(5, 4096, kind=0)]
    plain = json.dumps({"traceEvents": events}).encode()
    return [plain, gzip.compress(plain, mtime=0)]


def databases() -> list[bytes]:
    rows = {
        "StringIds": nsight_database.NAMES,
        "CUPTI_ACTIVITY_KIND_KERNEL": [nsight_database.kernel(at * 100, at * 100 + 70, at) for at in range(9)],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [nsight_database.copy(at * 50, at * 50 + 9, 64, at, at % 6) for at in range(9)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [nsight_database.call(at * 90, at * 90 + 20, 2, at) for at in range(9)],
    }
    with tempfile.TemporaryDirectory() as folder:
        return [nsight_database.write(Path(folder) / "report.sqlite", rows).read_bytes()]


FILES = {
    "snapshot": recordings,
    "timeline": timelines,
    "message": lambda: MESSAGES,
    "trace": traces,
    "database": databases,
}


def refused_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON.")


def commanded(path: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the command explained it: as text with a page, and as JSON. Anything but that is one error in words."""
    page = path.with_suffix(".html")
    codes = [main(["explain", str(path), *more]) for more in (["--html", str(page)], ["--json"])]
    text, errors = capsys.readouterr()
    assert codes[0] == codes[1], codes
    assert codes[0] in (0, 1, 2), codes
    assert bool(errors) == bool(codes[0]), errors
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
def test_the_command_tells_what_is_in_damaged_files_or_one_error(kind, tmp_path, capsys):
    path, found = tmp_path / "file", Counter[bool]()
    for seed, data in damaged(FILES[kind]()):
        path.write_bytes(data)
        try:
            found[commanded(path, capsys)] += 1
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error
    assert found[True], found


def bomb(levels: int, width: int, make: Callable[[Any], Any]) -> bytes:
    """Containers that hold the one before several times: references, so small in the file."""
    made: Any = ["ha"]
    for _ in range(levels):
        made = make([made] * width)
    return pickle.dumps({"segments": made, "device_traces": []})


HOSTILE = {
    "laughing lists": bomb(40, 10, list),
    "laughing tuples": bomb(40, 10, tuple),
    "laughing dictionaries": bomb(40, 10, lambda parts: dict(enumerate(parts))),
    "dup": b"\x80\x04]" + b"2" * 300_000 + b".",
    "memo of one value": b"\x80\x04]" + b"\x94" * 300_000 + b".",
    "gets": b"\x80\x04]\x94(" + b"h\x00" * 300_000 + b"e.",
    "frames": b"\x80\x04" + (b"\x95" + struct.pack("<Q", 2**63)) * 30_000 + b"N.",
    "an unterminated frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
    "persistent": b"\x80\x04P0\n.",
    "persistent by value": b"\x80\x04NQ.",
    "extension": b"\x80\x04\x82\x01.",
    "extension of 4 bytes": b"\x80\x04\x84\x01\x00\x00\x00.",
    "a new object": b"\x80\x04cos\nsystem\n)\x81.",
    "an out-of-band buffer": b"\x80\x05\x97.",
    "bytes of 4 GB": b"\x80\x04B" + struct.pack("<I", 2**32 - 1),
    "a byte array of 2**60": b"\x80\x05\x96" + struct.pack("<Q", 2**60),
    "one list for all": b"\x80\x04]\x94" + b"h\x00a" * 100_000 + b".",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_are_refused_or_hold_nothing_within_bounds(data):
    tracemalloc.start()
    started = time.monotonic()
    try:
        with suppress(BrimError):
            assert not snapshot.parse(data).devices
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= TIMES_THE_INPUT * len(data) + SPARE_BYTES
    assert time.monotonic() - started < 20
