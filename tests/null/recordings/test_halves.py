"""The second half of a long recording, replayed at the same time: the answer is that of one half after the other."""

from __future__ import annotations

import os
import pickle
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.allocator.blocks import Block
from brim.allocator.out_of_memory import OutOfMemory
from brim.recordings import halves, snapshot
from brim.recordings.timeline import RecordedRun, _Writing, recorded_run
from brim.units import KIB, MIB
from support.simulated_recording import Recording

SETTINGS = ("", "roundup_power2_divisions:8", "max_split_size_mb:64", "expandable_segments:True")
FRAMES = [{"filename": f"torch/optim/{number}.py", "line": number, "name": "step"} for number in range(9)]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be copied here")


def recorded(text: str, seed: int, *, by_age: bool = False, drop: int = 0, capacity_bytes: int = 300 * MIB) -> bytes:
    """A run with failures, several streams and stacks."""
    made, random_ = Recording(text, capacity_bytes, by_age=by_age), random.Random(seed)
    blocks: list[Block] = []
    for _ in range(300):
        what = random_.random()
        if what < 0.55:
            size = random_.choice([random_.randint(1, 600 * KIB), random_.randint(MIB, 24 * MIB)])
            try:
                blocks.append(made.malloc(size, random_.randrange(2)))
            except OutOfMemory:
                for block in blocks[::2]:
                    made.free(block)
                del blocks[::2]
        elif what < 0.93 and blocks:
            made.free(blocks.pop(random_.randrange(len(blocks))))
        elif what < 0.96 and blocks:
            made.record_stream(random_.choice(blocks), 99)
        elif what < 0.98:
            made.complete_events()
        elif what > 0.99:
            made.empty_cache()
    for event in made.events:
        event["frames"] = random_.sample(FRAMES, 2)
    return made.dump(drop)


def both(data: bytes) -> tuple[RecordedRun, RecordedRun, bool]:
    """The run replayed in one piece, then in halves, and whether the second half counted."""
    found = snapshot.parse(data)
    (history,) = found.devices
    counted = False

    class Watched(_Writing):
        def _joins(self, middle: int, told: bytes) -> bool:
            nonlocal counted
            counted = super()._joins(middle, told)
            return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "processors", lambda: 2)
        whole = recorded_run(history, "run", stacks=found.stacks)
        patch.setattr(halves, "LONG_EVENTS", 10)
        patch.setattr("brim.recordings.timeline._Writing", Watched)
        return whole, recorded_run(history, "run", stacks=found.stacks), counted


def same(one: RecordedRun, other: RecordedRun) -> bool:
    return one.timeline == other.timeline and (one.replay, one.moments) == (other.replay, other.moments)


@pytest.mark.thorough
@pytest.mark.parametrize("text", SETTINGS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 30), by_age=st.booleans(), drop=st.integers(0, 200))
def test_halves_are_what_the_whole_is(text: str, seed: int, by_age: bool, drop: int) -> None:
    whole, in_halves, _ = both(recorded(text, seed, by_age=by_age, drop=drop))
    assert same(whole, in_halves)


@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("text", SETTINGS)
def test_the_second_half_counts_where_the_replay_agrees_with_the_record(text: str, by_age: bool) -> None:
    whole, in_halves, counted = both(recorded(text, 3, by_age=by_age))
    assert whole.replay.exact and whole.replay.ooms
    assert counted
    assert same(whole, in_halves)


def test_it_counts_where_address_space_is_given_out_again() -> None:
    made = Recording("expandable_segments:True", 300 * MIB, reuses_space=True)
    for _ in range(4):
        made.free(made.malloc(30 * MIB))
        made.empty_cache()
    for event in made.events:
        event["frames"] = FRAMES[:2]
    whole, in_halves, counted = both(made.dump())
    assert whole.replay.exact
    assert counted
    assert same(whole, in_halves)


def test_it_does_not_count_behind_a_first_half_that_differs_from_the_record() -> None:
    document: dict[str, Any] = pickle.loads(recorded("", 3))
    events = document["device_traces"][0]
    early = [event["addr"] for event in events[:40] if event["action"] == "alloc"][-1]
    for event in events:  # what was there lies elsewhere
        if event.get("addr") == early:
            event["addr"] = early + 512
    whole, in_halves, counted = both(pickle.dumps(document))
    assert not whole.replay.exact
    assert not counted
    assert same(whole, in_halves)


def test_without_another_process_all_of_it_is_replayed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", none)
    whole, in_halves, counted = both(recorded("", 3))
    assert not counted
    assert same(whole, in_halves)


def test_a_process_that_is_alone_or_has_threads_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    (history,) = snapshot.parse(recorded("", 3)).devices
    columns = halves.Columns(history)
    monkeypatch.setattr(halves, "processors", lambda: 2)
    assert halves.border(columns) is None  # too short
    monkeypatch.setattr(halves, "LONG_EVENTS", 10)
    middle = halves.border(columns)
    assert middle is not None and history.actions[middle - 1] == "alloc"
    waits = threading.Event()
    thread = threading.Thread(target=waits.wait)
    thread.start()
    try:
        assert halves.border(columns) is None
    finally:
        waits.set()
        thread.join()
    monkeypatch.setattr(halves, "processors", lambda: 1)
    assert halves.border(columns) is None
