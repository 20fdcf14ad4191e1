"""Profiler traces as files: packed, in pieces, damaged, hostile, very long."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest
import torch

from brim.core import json_stream
from brim.errors import FormatError
from brim.profiles import profiler as profile
from brim.units import MIB
from support import synthetic_trace
from support.profiles import kernel


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.bin"])
def test_packed_or_not_an_array_or_an_object_it_is_read(name, tmp_path):
    path = tmp_path / name
    data = json.dumps([kernel(0, 10), kernel(20, 10)]).encode()
    path.write_bytes(data if name == "trace.json" else gzip.compress(data))
    assert profile.read(path).events == 2
    assert profile.is_trace(path.read_bytes()[:4096])


def test_documents_of_every_order_and_spacing_are_read(tmp_path):
    path = tmp_path / "trace.json"
    body = {"before": {"traceEvents": [1, {"}": "]"}], "x": '"{['}, "traceEvents": [kernel(0, 10)], "after": [[], {}]}
    for indent in (None, 2):
        path.write_text("\n  " + json.dumps(body, indent=indent) + "\n")
        assert profile.read(path).devices[0].kernels[0].count == 1


def test_events_across_pieces_of_the_file_are_whole(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"a": 12345, "traceEvents": [kernel(at, 1, name="κ" * at) for at in range(200)], "b": 6})
    )
    monkeypatch.setattr(json_stream, "CHUNK", 7)
    found = profile.read(path)
    assert found.events == 200
    assert sum(figures.count for figures in found.devices[0].kernels) == 20


def test_what_the_installed_pytorch_writes_is_read(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = torch.empty(1 << 20)
        torch.empty(1 << 18).add_(1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    found = profile.read(tmp_path / "trace.json.gz")
    before = next(iter(found.host))
    ours = 4 * (held.numel() + (1 << 18))  # and the number 1, in as many tensors as PyTorch likes
    assert 0 <= found.host.peak_bytes("ram") - (before.bytes if before.label else 0) - ours < 1024
    assert found.facts["recorded_s"] > 0
    assert found.devices == ()


ZEROS = b"0" * 30
REFUSED = {
    "empty": b"",
    "text": b"hello",
    "cut off": b'{"traceEvents": [{"ph": "X"',
    "cut off after an event": b'{"traceEvents": [{"ph": "X"}',
    "no events": b'{"schemaVersion": 1}',
    "events are no array": b'{"traceEvents": {}}',
    "an event is a number": b"[5]",
    "an event is null": b"[null]",
    "category is a list": b'[{"cat": []}]',
    "kernel without a time": b'[{"ph": "X", "cat": "kernel", "name": "a", "args": {"device": 0}}]',
    "time is a text": b'[{"cat": "kernel", "name": "a", "ts": "x", "args": {"device": 0}}]',
    "time is infinite": b'[{"cat": "kernel", "name": "a", "ts": 1, "dur": Infinity, "args": {"device": 0}}]',
    "time is 400 digits": b'[{"cat": "kernel", "name": "a", "ts": 1%s, "args": {"device": 0}}]' % (b"0" * 400),
    "number of 5000 digits": b"[1%s]" % (b"0" * 5000),
    "size is negative": b'[{"cat": "gpu_memcpy", "name": "a", "ts": 1, "args": {"device": 0, "bytes": -1}}]',
    "device is a text": b'[{"cat": "kernel", "name": "a", "ts": 1, "args": {"device": "0"}}]',
    "device beyond 64 bits": b'[{"cat": "kernel", "name": "a", "ts": 1, "args": {"device": 1%s}}]' % ZEROS,
    "process is a text": b'[{"cat": "kernel", "name": "a", "ts": 1, "pid": "GPU"}]',
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "something behind": b"[] []",
    "a value beyond the limit": b'[{"name": "' + b"a" * (3 << 20) + b'"}]',
    "a text beyond the limit in what is passed over": b'{"x": ["' + b"a" * (3 << 20) + b'"], "traceEvents": []}',
    "gzip cut off": gzip.compress(b"[" + b"{}," * 1000 + b"{}]")[:-20],
    "gzip damaged": gzip.compress(b"[]")[:4] + b"\xff" * 40,
    "gzip bomb": gzip.compress(b"[" + b" " * (64 << 20) + b"]"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_no_trace_is_refused_within_bounds(data, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"trace\.json"):
            profile.read(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(data) + 16 * MIB


@pytest.mark.parametrize(
    "text", ["a" * 900_000, "\\n" * 450_000, "a\\n" * 300_000], ids=["plain", "escapes", "mixed"]
)
def test_what_is_passed_over_takes_no_more_memory_than_its_text(text, tmp_path):
    path = tmp_path / "trace.json"
    values = f'["{text}", ' * 10 + "[]" + "]" * 10  # as a whole far beyond what one text may take
    path.write_text(f'{{"before": {values}, "traceEvents": [{json.dumps(kernel(0, 10))}]}}')
    assert path.stat().st_size > 8 * json_stream.LIMIT
    tracemalloc.start()
    try:
        assert profile.read(path).events == 1
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * MIB


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"gone\.json"):
        profile.read(tmp_path / "gone.json")


def test_many_devices_are_refused(tmp_path):
    events = [kernel(0, 1) for _ in range(1100)]
    for number, event in enumerate(events):
        event["args"]["device"] = number
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    with pytest.raises(FormatError, match="devices"):
        profile.read(path)


def test_numbers_that_are_no_json_and_lone_surrogates_do_no_harm(tmp_path):
    path = tmp_path / "trace.json"
    text = json.dumps([kernel(0, 10, name="\ud800 kernel")])[:-2] + ', "occupancy": NaN, "rate": Infinity}]'
    path.write_text(text)
    (one,) = profile.read(path).devices
    assert json.dumps(one.to_json()).isprintable()
    assert one.kernels[0].name.encode() == b"? kernel"


@pytest.mark.thorough
def test_memory_stays_in_proportion_to_the_file(tmp_path):
    path = tmp_path / "trace.json"
    synthetic_trace.write(path, 40_000)
    tracemalloc.start()
    try:
        found = profile.read(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.events == 40_000
    assert peak_bytes < 4 * path.stat().st_size
