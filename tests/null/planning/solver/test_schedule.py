"""Lanes, what they wait for, and what they take from each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core import EventKind
from brim.core.hardware import DISK, RAM
from brim.planning.solver.schedule import COMPUTE, UPDATE, Task, lane_of, simulate

LINK = lane_of(DISK, RAM)


def work(lane: str, seconds: float, *after: int, **more: object) -> Task:
    return Task(name=f"{lane} {seconds}", lane=lane, seconds=seconds, after=after, **more)  # type: ignore[arg-type]


def test_lanes_work_beside_each_other_and_in_order() -> None:
    made = simulate([work(LINK, 2.0), work(COMPUTE, 1.0, 0), work(LINK, 2.0), work(COMPUTE, 3.0, 2)])
    assert made.begin_s == [0.0, 2.0, 2.0, 4.0]
    assert max(made.end_s) == 7.0
    assert made.busy_s() == {LINK: 4.0, COMPUTE: 4.0}
    waits = [
        (event.label, event.duration_s) for event in made.timeline("a step", RAM) if event.kind is EventKind.IDLE
    ]
    assert waits == [(LINK, 2.0), (LINK, 1.0)]


@pytest.mark.parametrize(
    ("compute_s", "update_s", "read_s", "told"),
    [(4.0, 4.0, 5.0, COMPUTE), (3.0, 4.0, 5.0, UPDATE), (4.0, 4.0, 9.0, LINK), (6.0, 0.5, 5.0, COMPUTE)],
)
def test_an_update_and_the_rest_of_compute_are_the_one_processors_time(
    compute_s: float, update_s: float, read_s: float, told: str
) -> None:
    made = simulate([work(COMPUTE, compute_s), work(UPDATE, update_s, 0), work(LINK, read_s)])
    assert made.limited_by() == told


def test_two_ways_of_a_link_share_it_only_while_both_are_busy() -> None:
    tasks = [work("up", 2.0), work("down", 1.0)]
    halved = simulate(tasks, {("up", "down"): 0.5, ("down", "up"): 0.5})
    assert halved.end_s == [3.0, 2.0]  # one second of up is left when down is done
    assert simulate(tasks, {("up", "down"): 0.5}).end_s == [2.5, 1.0]


def test_what_lanes_take_from_each_other_adds_up() -> None:
    lanes = ("one", "two", "three")
    turns = {(a, b): 0.5 for a in lanes for b in lanes if a != b}
    made = simulate([work(lane, 1.0) for lane in lanes], turns)
    assert max(made.end_s) == pytest.approx(3.0)  # as one after the other


def test_as_a_timeline_it_has_compute_copies_and_idle_time() -> None:
    tasks = [work(LINK, 1.0, bytes=9), work(COMPUTE, 2.0, 0)]
    timeline = simulate(tasks).timeline("a step", RAM)
    found = [(e.kind, e.time_s, e.duration_s, e.bytes, e.label) for e in timeline]
    assert (EventKind.COPY, 0.0, 1.0, 9, f"{LINK} 1.0") in found
    assert (EventKind.IDLE, 0.0, 1.0, 0, LINK) in found
    assert (EventKind.COMPUTE, 1.0, 2.0, 0, f"{COMPUTE} 2.0") in found
    assert timeline.copied_bytes(DISK, RAM) == 9


def test_a_task_after_a_later_one_is_refused() -> None:
    with pytest.raises(ValueError, match="later"):
        simulate([work(COMPUTE, 1.0, 1), work(COMPUTE, 1.0)])


@st.composite
def steps(draw: st.DrawFn) -> list[Task]:
    made: list[Task] = []
    for index in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        lane = draw(st.sampled_from([COMPUTE, "a", "b"]))
        made.append(work(lane, draw(st.floats(0, 10)), *after))
    return made


@given(steps(), st.sampled_from([1.0, 0.5, 0.9]))
def test_nothing_begins_too_early_and_no_lane_does_two_things(tasks: list[Task], share: float) -> None:
    made = simulate(tasks, {(COMPUTE, "a"): share})
    free: dict[str, float] = {}
    for task, begin, end in zip(tasks, made.begin_s, made.end_s, strict=True):
        assert all(begin >= made.end_s[index] for index in task.after)
        assert begin >= free.get(task.lane, 0.0)
        free[task.lane] = end
        assert end - begin >= task.seconds * (1 - 1e-9) - 1e-9
    busy = {lane: sum(task.seconds for task in tasks if task.lane == lane) for lane in free}
    assert max(busy.values()) - 1e-6 <= max(made.end_s) <= sum(t.seconds for t in tasks) / share + 1e-6
