"""Memory snapshots are read whole, old and new; what is no snapshot, or would do harm, is refused."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.errors import FormatError
from brim.recordings import pickled_rows, plain_pickle, snapshot
from brim.units import MIB


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    key = "device_free" if action == "oom" else "addr"
    return {"action": action, key: address, "size": size, "stream": 0, "time_us": 5} | more


def segment(address: int, *blocks: tuple[int, str], **more: Any) -> dict[str, Any]:
    made, at = [], address
    for size, state in blocks:
        made.append({"address": at, "size": size, "requested_size": size, "state": state, "frames": []})
        at += size
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": made,
    } | more


FRAMES = [
    {"filename": "train.py", "line": 7, "name": "step"},
    {"filename": "??", "line": 0, "name": "cudaMalloc"},
]


def document() -> dict[str, Any]:
    return {
        "segments": [
            segment(40 * MIB, (2 * MIB, "active_allocated"), (18 * MIB, "inactive")),
            segment(80 * MIB, (2 * MIB, "active_pending_free"), segment_type="small", device=1),
        ],
        "device_traces": [
            [
                event("segment_alloc", 40 * MIB, 20 * MIB, frames=FRAMES),
                event("alloc", 40 * MIB, 2 * MIB, frames=FRAMES),
                event("oom", 123, 5 * MIB),
            ],
            [event("alloc", 80 * MIB, MIB, frames=FRAMES[:1], stream=9)],
        ],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [{"stage": "START", "name": "Optimizer.step", "device": 0, "time_us": 4}],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_events_and_segments_are_read_by_device(protocol):
    found = snapshot.parse(pickle.dumps(document(), protocol=protocol))
    first, second = found.devices
    assert (first.device, second.device) == (0, 1)
    assert list(first.actions) == ["segment_alloc", "alloc", "oom"]
    assert list(first.addresses) == [40 * MIB, 40 * MIB, 123]
    assert list(first.sizes) == [20 * MIB, 2 * MIB, 5 * MIB]
    assert list(second.streams) == [9]
    assert found.stacks[first.stacks[0]] == ("step at train.py:7", "cudaMalloc")
    assert first.stacks[0] == first.stacks[1] != second.stacks[0]
    assert first.stacks[2] == -1
    (large,) = first.segments
    assert [block.state for block in large.blocks] == ["active_allocated", "inactive"]
    assert second.segments[0].small
    assert first.settings == {"expandable_segments": False}


def test_a_file_is_read_and_a_missing_one_is_an_error(tmp_path):
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(document()))
    assert len(snapshot.read(path).devices) == 2
    with pytest.raises(FormatError, match=r"gone\.pickle"):
        snapshot.read(tmp_path / "gone.pickle")


def test_snapshots_from_before_torch_2_are_read():
    block = {"size": 2 * MIB, "state": "active_allocated", "history": [{"addr": 0, "real_size": 5, "frames": FRAMES}]}
    rest = {"size": 18 * MIB, "state": "inactive"}
    old = {"device": 0, "address": 0, "total_size": 20 * MIB, "stream": 0, "segment_type": "large"}
    found = snapshot.parse(pickle.dumps([old | {"blocks": [block, rest]}]))
    (record,) = found.devices[0].segments
    assert [(b.address, b.size, b.requested) for b in record.blocks] == [
        (0, 2 * MIB, 5),
        (2 * MIB, 18 * MIB, 18 * MIB),
    ]
    assert found.stacks[next(iter(record.blocks)).stack][0] == "step at train.py:7"
    assert not record.expandable
    assert record.pool == (0, 0)


def test_events_of_more_bytes_than_are_summed_are_refused():
    body = document()
    body["device_traces"] = [[{"action": "alloc", "addr": n, "size": 1 << 61, "stream": 0} for n in range(4)]]
    with pytest.raises(FormatError, match="64-bit"):
        snapshot.parse(pickle.dumps(body))


def test_events_may_name_their_pool():
    body = document()
    for trace in body["device_traces"]:
        for item in trace:
            item["pool_id"] = (0, 3)
    assert list(snapshot.parse(pickle.dumps(body)).devices[0].pools) == [(0, 3)] * 3


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo harm",)


def laughs() -> bytes:
    """Ten lists, each holding the one before ten times."""
    made: Any = ["ha"]
    for _ in range(30):
        made = [made] * 10
    return pickle.dumps({"segments": made, "device_traces": []})


def shared_events() -> bytes:
    trace = [event("alloc", 0, 512)] * 100_000
    return pickle.dumps({"segments": [], "device_traces": [trace] * 100})


HOSTILE = {
    "runs a command": pickle.dumps({"segments": [], "device_traces": [], "x": Harmful()}),
    "imports": b"cos\nsystem\n(S'echo harm'\ntR.",
    "imports by stack": pickle.dumps(os.path.join, protocol=4),
    "billion laughs": laughs(),
    "one event a million times": shared_events(),
    "nested lists": b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".",
    "nested marks": b"\x80\x04" + b"(" * 500_000,
    "nested tuples": b"\x80\x04)" + b"\x85" * 500_000 + b".",
    "text of 4 GB": b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b"abc",
    "text of 2**60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"abc",
    "bytes": pickle.dumps(b"abc", protocol=4),
    "number of 1 GB": b"\x80\x04\x8b" + struct.pack("<I", 2**30) + b"\x01.",
    "memo at 2**31": b"\x80\x04]r" + struct.pack("<I", 2**31) + b".",
    "many empty lists": b"\x80\x04](" + b"]" * 500_000 + b"e.",
    "many nones": b"\x80\x04](" + b"N" * 500_000 + b"e.",
    "not a pickle": b"PK\x03\x04 something",
    "empty": b"",
    "only a header": b"\x80\x04",
    "a number": pickle.dumps(5),
    "a text": pickle.dumps("abc"),
    "no segments": pickle.dumps({"device_traces": []}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_hostile_or_no_snapshot_is_refused_within_bounds(data, capfd):
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            snapshot.parse(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(data) + 4 * MIB
    assert "harm" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda d: d["segments"][0].update(total_size=5), "do not fill it"),
        (lambda d: d["segments"][0]["blocks"][1].update(address=1), "side by side"),
        (lambda d: d["segments"][0]["blocks"][1].update(state="odd"), "block is"),
        (lambda d: d["segments"][0]["blocks"][1].update(size="5"), "block is"),
        (lambda d: d["segments"].append(d["segments"][0] | {"blocks": "x"}), "segment is"),
        (lambda d: d["segments"].append(segment(41 * MIB, (MIB, "inactive"))), "overlap"),
        (lambda d: d["segments"][0].update(segment_pool_id=7), "pool's id"),
        (lambda d: d["device_traces"][0][0].pop("size"), "Event 0"),
        (lambda d: d["device_traces"][0][1].update(addr=1 << 70), "Event 1"),
        (lambda d: d["device_traces"][0][1].update(size=-1), "Event 1"),
        (lambda d: d["device_traces"][0][1].update(action=5), "Event 1"),
        (lambda d: d["device_traces"][0].append(7), "device 0"),
        (lambda d: d.update(device_traces=5), "device traces"),
        (lambda d: d.update(allocator_settings=[5]), "settings"),
        (lambda d: d.update(extra=[event("alloc", 0, 5)]), "outside"),
        (lambda d: d["device_traces"][0][0].update(pool_id=(0, 0)), "name a pool"),
        (lambda d: d["device_traces"][0][0].update(frames=[5]), "frame"),
        (lambda d: d["device_traces"][0][0].update(frames="abc"), "stack"),
    ],
)
def test_a_damaged_snapshot_is_refused_and_the_damage_named(damage, told):
    body = pickle.loads(pickle.dumps(document()))
    damage(body)
    with pytest.raises(FormatError, match=told):
        snapshot.parse(pickle.dumps(body))


def test_every_cut_is_refused():
    data = pickle.dumps(document())
    for length in range(len(data)):
        with pytest.raises(FormatError):
            snapshot.parse(data[:length])


@settings(max_examples=150, deadline=None)
@given(where=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_changed_bytes_give_a_result_or_one_kind_of_error(where):
    data = bytearray(pickle.dumps(document()))
    for index, value in where:
        data[index % len(data)] = value
    with suppress(FormatError):
        assert snapshot.parse(bytes(data)).devices is not None


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_result_or_one_kind_of_error(data):
    with suppress(FormatError):
        assert snapshot.parse(b"\x80\x04" + data) is not None


def test_memory_stays_in_proportion_to_the_file():
    frames = [{"filename": f"/a/long/path/to/file_{i}.py", "line": i, "name": f"function_{i}"} for i in range(300)]
    traces = [
        event("alloc", 512 * i, 512, frames=frames[i % 200 : i % 200 + 25], compile_context="N/A", user_metadata="")
        for i in range(5_000)
    ]
    data = pickle.dumps({"segments": [], "device_traces": [traces]})
    assert len(list(pickletools.genops(io.BytesIO(data)))) > 100_000
    tracemalloc.start()
    try:
        found = snapshot.parse(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.devices[0].actions) == 5_000
    assert peak_bytes < 3 * len(data)  # and the file itself


def many_events(count: int) -> bytes:
    """A pickle of events in all forms that PyTorch writes them in: each text, pair and list an object of its own."""
    stacks = [[{"filename": f"file_{i}.py", "line": i, "name": f"call_{j}"} for j in range(i % 7)] for i in range(40)]
    trace = []
    for number in range(count):
        one = event("alloc" if number % 3 else "free_completed", 512 * number << (number % 41), number % 70_000)
        if number % 5 < 3:
            one |= {"compile_context": str(b"N/A" * (number % 4), "ascii"), "pool_id": (0, number % 3)}
        else:
            one |= {"pool_id": (number % 2, 300 if number % 500 == 4 else 200)}
        if number % 97 == 0:
            one = {"action": "oom", "device_free": 7, "size": 65_535, "stream": 1 << 40, "pool_id": (0, 0)}
        if number % 11:
            frames = stacks[number * 7 % len(stacks)]
            one["frames"] = frames if number % 13 == 0 else list(frames)
        trace.append(one)
    return pickle.dumps({"segments": [], "device_traces": [trace[: count // 2], trace[count // 2 :]]}, protocol=4)


def columns_of(data: bytes) -> Any:
    """All that is read of events, or None if it is refused."""
    try:
        found = snapshot.parse(data)
    except FormatError:
        return None
    return [
        [list(column) for column in (one.actions, one.addresses, one.sizes, one.streams, one.times_us, one.pools)]
        + [[found.stacks[number] if number >= 0 else () for number in one.stacks]]
        for one in found.devices
    ]


def test_many_events_at_once_are_what_they_are_one_by_one(monkeypatch):
    data = many_events(12_000)
    taken = []
    many = snapshot._Reader.replace_many
    monkeypatch.setattr(
        snapshot._Reader, "replace_many", lambda self, table: taken.append(table.count) or many(self, table)
    )
    monkeypatch.setattr(plain_pickle, "WINDOW_BYTES", 300_000)  # so that rows lie across the ends of windows
    together = columns_of(data)
    assert sum(taken) > 11_000
    monkeypatch.setattr(pickled_rows, "read", lambda *_: None)
    assert together == columns_of(data) is not None


@settings(max_examples=60, deadline=None)
@given(where=st.lists(st.tuples(st.integers(1_000, 1 << 20), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_among_many_events_are_read_as_they_are_one_by_one(where):
    data = bytearray(MANY)
    for index, value in where:
        data[index % len(data)] = value
    together = columns_of(bytes(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled_rows, "read", lambda *_: None)
        assert together == columns_of(bytes(data))


def test_a_row_is_read_only_where_one_begins():
    events = [event("alloc", 512 * number, 512) for number in range(40)]
    data = bytearray(pickle.dumps({"segments": [], "device_traces": [events]}, protocol=4))
    second = data.index(b"}\x94(", data.index(b"action"))  # the first behind which rows are looked for
    data[second + 1 : second + 2] = b"s"  # instead of remembering it, sets an item of what is no dictionary
    with pytest.raises(FormatError, match="sets items of something other than a dictionary"):
        snapshot.parse(bytes(data))


MANY = many_events(300)
