"""Damaged and hostile files give a result or one typed error, within a few times their size in memory.

``BRIM_FUZZ_SECONDS`` sets how long each reader, and the command, is tried; the default is 200 inputs. Ten minutes,
with other examples than the last time:

    BRIM_FUZZ_SECONDS=600 BRIM_FUZZ_SEED=$RANDOM pytest tests/null/cli/explain/test_command_fuzz.py
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
from pathlib import Path
from typing import Any

import pytest

from brim.cli import main
from brim.core import EventKind, Timeline
from brim.errors import BrimError, FormatError
from brim.recordings import snapshot
from brim.recordings.timeline import recorded_run
from brim.report.explain import summary
from brim.report.oom.reader import read_oom
from brim.units import KIB, MIB
from support.simulated_recording import Recording

SECONDS = float(os.environ.get("BRIM_FUZZ_SECONDS", "0"))
INPUTS = 200  # at least, however long they take
SEED = int(os.environ.get("BRIM_FUZZ_SEED", "0"))
SPARE_BYTES = 64 * KIB  # buffers and small objects


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
    ("İ" * 100 + "\x1b[2J\x07\x9b31m\u202e CUDA out of memory. Tried to allocate 2.00 GiB").encode(),
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
    "İ".encode() * 60, "İ\x1b]0;x\x07\u202e\n".encode(), b"\x9b2J", b"Infinity", b"9" * 20,
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
    summary(Timeline.read(io.BytesIO(data), "fuzzed"))


def read_log(data: bytes) -> None:
    assert read_oom(io.BytesIO(data))


# What reads a kind, examples of it, the least there can be of it, and how many times its size it may take: Python's
# smallest numbers take 32 bytes of memory and 2 of a file, and of a line of a log a message with advice is made.
READERS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]], bytes, int]] = {
    "snapshot": (read_snapshot, recordings, pickle.dumps({"segments": [], "device_traces": []}), 16),
    "timeline": (read_timeline, timelines, json.dumps(Timeline("", measured=True).to_json()).encode(), 16),
    "message": (read_log, lambda: MESSAGES, b"MemoryError", 64),
}


def peak_bytes_of(read: Callable[[bytes], None], data: bytes) -> tuple[bool, int]:
    """Whether ``data`` was read, not refused, and the most memory that it took."""
    tracemalloc.start()
    try:
        read(data)
    except BrimError:
        return False, tracemalloc.get_traced_memory()[1]
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return True, peak_bytes


@pytest.mark.thorough
@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_give_a_result_or_one_typed_error_within_bounds(kind):
    read, seeds_of, least, times = READERS[kind]
    seeds = seeds_of()
    for example in (*seeds, least):  # what is imported and compiled once is not counted
        read(example)
    _, overhead_bytes = peak_bytes_of(read, least)
    seed, results = SEED, {True: 0, False: 0}
    end = time.monotonic() + SECONDS
    while seed - SEED < INPUTS or time.monotonic() < end:
        seed += 1
        data = mutated(seeds, random.Random(seed))
        try:
            accepted, peak_bytes = peak_bytes_of(read, data)
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error
        results[accepted] += 1
        most_bytes = overhead_bytes + times * len(data) + SPARE_BYTES
        if peak_bytes > most_bytes:  # again: memory is counted of all threads, and a reader takes the same each time
            peak_bytes = peak_bytes_of(read, data)[1]
        assert peak_bytes <= most_bytes, (kind, seed, len(data), peak_bytes)
    assert all(results.values()), results


def strict(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("kind", READERS)
def test_the_command_gives_valid_output_or_one_error(kind, tmp_path, capsys):
    """All outputs of one file: text that no terminal obeys, JSON as the standard has it, a page."""
    path, page = tmp_path / "given", tmp_path / "page.html"
    seeds = READERS[kind][1]()
    seed, results = SEED, {0: 0, 2: 0}
    end = time.monotonic() + SECONDS
    while seed - SEED < INPUTS // 8 or time.monotonic() < end:
        seed += 1
        path.write_bytes(mutated(seeds, random.Random(seed)) if seed > SEED + len(seeds) else seeds[seed - SEED - 1])
        page.unlink(missing_ok=True)
        try:
            code = main(["explain", str(path), "--html", str(page)])
            shown = capsys.readouterr()
            assert all(letter.isprintable() or letter == "\n" for letter in shown.out)
            assert main(["explain", str(path), "--json"]) == code
            document = capsys.readouterr().out
            assert (code == 0) is bool(shown.out) is page.exists() is bool(document)
            if code == 0:
                json.loads(document, parse_constant=strict)
            else:
                assert shown.err.startswith("Error: ")
            results[code] += 1
        except BaseException as error:
            Path(tmp_path / "failed").write_bytes(path.read_bytes())
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error
    assert all(results.values()), results


def bomb(levels: int, width: int, make: Callable[[Any], Any]) -> bytes:
    """Containers that hold the one before several times: references, so small in the file."""
    made: Any = ["ha"]
    for _ in range(levels):
        made = make([made] * width)
    return pickle.dumps({"segments": made, "device_traces": []})


PLAIN = "does not build plain"
HOSTILE = {
    "laughing lists": (bomb(40, 10, list), "A segment is a list"),
    "laughing tuples": (bomb(40, 10, tuple), "It holds a dictionary with"),
    "laughing dictionaries": (bomb(40, 10, lambda parts: dict(enumerate(parts))), "It holds a dictionary with"),
    "dup": (b"\x80\x04]" + b"2" * 300_000 + b".", PLAIN),
    "memo of one value": (b"\x80\x04]" + b"\x94" * 300_000 + b".", "far larger than the file"),
    "gets": (b"\x80\x04]\x94(" + b"h\x00" * 300_000 + b"e.", "in no container"),
    "frames": (b"\x80\x04" + (b"\x95" + struct.pack("<Q", 2**63)) * 30_000 + b"N.", "It holds a NoneType"),
    "an unterminated frame": (b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.", "It holds a dictionary with"),
    "persistent": (b"\x80\x04P0\n.", PLAIN),
    "persistent by value": (b"\x80\x04NQ.", PLAIN),
    "extension": (b"\x80\x04\x82\x01.", PLAIN),
    "extension of 4 bytes": (b"\x80\x04\x84\x01\x00\x00\x00.", PLAIN),
    "a global": (b"\x80\x04cos\nsystem\n.", "would run code"),
    "a new object": (b"\x80\x04cos\nsystem\n)\x81.", "would run code"),
    "an out-of-band buffer": (b"\x80\x05\x97.", PLAIN),
    "bytes of 4 GB": (b"\x80\x04B" + struct.pack("<I", 2**32 - 1), PLAIN),
    "a text of 4 GB": (b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b"x.", "announces a text of 4294967295 bytes"),
    "a byte array of 2**60": (b"\x80\x05\x96" + struct.pack("<Q", 2**60), PLAIN),
    "one list for all": (b"\x80\x04]\x94" + b"h\x00a" * 100_000 + b".", "A segment is a list"),
}


@pytest.mark.parametrize(("data", "told"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_are_refused_within_bounds(data, told):
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(FormatError, match=told):
            snapshot.parse(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 4 * len(data) + SPARE_BYTES
    assert time.process_time() - started < 20
