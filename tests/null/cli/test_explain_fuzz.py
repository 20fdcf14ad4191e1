"""Damaged and hostile files give a result or one typed error, within a few times their size in memory.

``BRIM_FUZZ_SECONDS`` sets how long each reader is tried; the default is short.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from _simulated_recording import Recording
from brim.cli.explain_source import parsed_timeline
from brim.core import EventKind, Timeline
from brim.errors import BrimError
from brim.measure import snapshot
from brim.memory.recorded_timeline import recorded_run
from brim.report.explain import summary
from brim.report.oom import read_oom
from brim.units import MIB

SECONDS = float(os.environ.get("BRIM_FUZZ_SECONDS", "2"))
TIMES_THE_INPUT, SPARE_BYTES = 4, 6 * MIB


def recordings() -> list[bytes]:
    made = []
    for settings in ("", "expandable_segments:True"):
        run = Recording(settings, 400 * MIB)
        blocks = [run.malloc(size << 18) for size in range(1, 30)]
        for block in blocks[::2]:
            run.free(block)
        data = run.dump()
        made += [data, pickle.dumps(pickle.loads(data), protocol=2)]  # written by this test
    return made


def timelines() -> list[bytes]:
    made = Timeline("run", measured=True, facts={"budget_bytes.vram": 5.0})
    for number in range(40):
        made.add(EventKind.ALLOC, "vram", 512 * number, storage=number, label=f"l{number}", category="activation")
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


READERS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "snapshot": (read_snapshot, recordings),
    "timeline": (read_timeline, timelines),
    "message": (read_log, lambda: MESSAGES),
}


@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_give_a_result_or_one_typed_error_within_bounds(kind):
    read, seeds_of = READERS[kind]
    seeds = seeds_of()
    seed = int(os.environ.get("BRIM_FUZZ_SEED", "0"))
    results: dict[str, int] = {"read": 0, "refused": 0}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        seed += 1
        data = mutated(seeds, random.Random(seed))
        tracemalloc.start()
        try:
            read(data)
            results["read"] += 1
        except BrimError:
            results["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak_bytes <= TIMES_THE_INPUT * len(data) + SPARE_BYTES, (kind, seed, len(data), peak_bytes)
    assert all(results.values()), results


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
