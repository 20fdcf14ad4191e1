"""Idle time is given to the block, tensor or operation that was waited for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from brim.core import EventKind, Timeline
from brim.memory.recorder import Recorder
from brim.profiles import profiler as profile
from brim.report.idle import attribute
from brim.units import MIB
from support.profiles import called, copied, kernel


def timeline(*events: tuple[EventKind, float, float, str]) -> Timeline:
    made = Timeline("run", measured=True)
    for kind, start_s, took_s, label in events:
        source = "ram" if kind is EventKind.COPY else ""
        made.add(kind, "vram", MIB, time_s=start_s, duration_s=took_s, label=label, source=source)
    return made


def waits(made: Timeline) -> dict[tuple[str, str], float]:
    return {(wait.label, wait.cause): round(wait.seconds, 9) for wait in attribute(made).waits}


COMPUTE, COPY, ALLOC = EventKind.COMPUTE, EventKind.COPY, EventKind.ALLOC


def test_a_gap_belongs_to_the_block_whose_copy_ended_last_before_compute_went_on():
    made = timeline(
        (COMPUTE, 0, 1, "layers.0"), (COPY, 0, 3, "layers.1"), (COPY, 3, 2, "layers.2"), (COMPUTE, 5, 1, "layers.2")
    )
    assert waits(made) == {("layers.1", "copy"): 2, ("layers.2", "copy"): 2}


def test_a_copy_that_ends_later_was_not_waited_for():
    made = timeline((COMPUTE, 0, 1, "a"), (COPY, 0, 9, "layers.7"), (COMPUTE, 5, 1, "b"))
    assert waits(made) == {("", "unknown"): 4}


def test_what_no_copy_explains_is_an_allocations_or_unknown():
    made = timeline((COMPUTE, 0, 1, "a"), (ALLOC, 2, 0, "logits"), (COMPUTE, 3, 1, "b"), (COMPUTE, 6, 1, "c"))
    assert waits(made) == {("logits", "allocation"): 2, ("", "unknown"): 2}


def test_overlapping_compute_and_copies_leave_no_idle_time():
    made = timeline((COMPUTE, 0, 4, "a"), (COMPUTE, 2, 4, "b"), (COPY, 1, 3, "layers.1"))
    found = attribute(made)
    assert (found.idle_s, found.busy_s, found.waits) == (0, 6, ())


def test_waits_are_summed_by_what_they_waited_for_the_longest_first():
    made = Timeline("run", measured=True)
    for label, took_s in (("layers.1", 0.5), ("layers.2", 2.0), ("layers.1", 0.25)):
        made.add(EventKind.IDLE, "ram", 0, time_s=len(made), duration_s=took_s, label=label, category="copy")
    found = attribute(made)
    assert [(w.label, w.seconds, w.count) for w in found.waits] == [("layers.2", 2.0, 1), ("layers.1", 0.75, 2)]
    assert found.by_cause() == {"copy": 2.75}
    assert json.loads(json.dumps(found.to_json()))["idle_s"] == 2.75


def test_waiting_inside_of_a_span_is_not_computing_and_gaps_beside_it_are_explained_too():
    made = timeline((COMPUTE, 0, 4, "forward"), (COMPUTE, 1, 1, "layers.0"), (COMPUTE, 6, 2, "forward"))
    made.add(EventKind.IDLE, "vram", 0, time_s=2.5, duration_s=1.0, label="layers.1", category="copy")
    made.add(COPY, "vram", MIB, time_s=3.0, duration_s=2.0, source="ram", label="layers.2")
    found = attribute(made)
    assert waits(made) == {("layers.1", "copy"): 1, ("layers.2", "copy"): 1, ("", "unknown"): 1}
    assert (found.busy_s, found.idle_s, found.wall_s) == (5, 3, 8)


def test_a_timeline_without_compute_tells_nothing():
    found = attribute(timeline((COPY, 0, 1, "layers.0"), (ALLOC, 0, 0, "x")))
    assert not found.computed
    assert found.waits == ()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [ALLOC, COMPUTE, EventKind.IDLE], ids=lambda kind: kind.name)
def test_many_events_take_a_few_columns_of_memory(kind):
    made = Timeline("run", measured=True)
    for number in range(60_000):
        made.add(ALLOC, "vram", 512, time_s=number, label="block")
        made.add(kind, "vram", 512, time_s=number + 0.25, duration_s=0.25, label="mm", category="copy")
    tracemalloc.start()
    try:
        found = attribute(made)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.computed is (kind is not ALLOC)
    assert peak_bytes < 80 * len(made)


def test_where_only_waiting_was_recorded_nothing_is_said_to_compute():
    made = Timeline("run", measured=True)
    made.add(EventKind.IDLE, "ram", 0, time_s=0.0, duration_s=1.0, label="layers.1", category="copy")
    made.add(ALLOC, "ram", 8, time_s=4.0)
    found = attribute(made)
    assert (found.compute_recorded, found.idle_s, found.wall_s) == (False, 1.0, 4.0)
    assert attribute(timeline((COMPUTE, 0, 1, "a"))).compute_recorded


def test_a_profiled_device_gives_its_own_figures(tmp_path: Path):
    path = tmp_path / "trace.json"
    events = [kernel(0, 10), copied(12, 20, MIB), called("cudaLaunchKernel", 40, 2, key=5), kernel(45, 5, key=5)]
    path.write_text(json.dumps(events))
    (device,) = profile.read(path).devices
    found = attribute(device.timeline)
    assert found.busy_s == pytest.approx(device.busy_s)
    assert found.by_cause() == pytest.approx(device.idle_by_cause)
    assert found.waits[0].label == "Memcpy HtoD (Pinned -> Device)"


def test_a_recorder_keeps_waits_that_matter_and_no_others():
    recorder = Recorder(Timeline("run", measured=True))
    recorder.waited("ram", recorder.now_s(), "nothing")
    recorder.waited("ram", recorder.now_s() - 0.5, "layers.4")
    (event,) = recorder.timeline
    assert (event.kind, event.label, event.category) == (EventKind.IDLE, "layers.4", "copy")
    assert event.duration_s == pytest.approx(0.5, abs=0.1)
