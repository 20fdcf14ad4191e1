"""Simulate when the tasks of a step run on parallel lanes.

A lane (compute, a link in one direction, the disk, the CPU) does one task at a time, in the order given, and a task
waits for its predecessors. Two busy lanes may slow each other (both directions of a link, the disk and the processor
that drives it): each has a factor on its speed for as long as both are busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brim.core import EventKind, Timeline

COMPUTE = "compute"
# A processor's optimizer alternates with its other compute but has a lane of its own, as a drive slows it otherwise:
# updates are bound by memory, products of many rows by arithmetic.
UPDATE = "update"
_DONE = 1e-12  # of a task's seconds: the rounding error

# (lane, another lane) -> the share of its speed that the first keeps while the second is busy.
Contention = Mapping[tuple[str, str], float]


def lane_of(source: str, target: str) -> str:
    """Return the name of the lane that copies from one tier to another."""
    return f"{source} -> {target}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task of ``seconds`` on an undisturbed ``lane``; it begins when the tasks ``after`` (by index) have ended, and
    copies ``bytes``."""

    name: str
    lane: str
    seconds: float
    after: Sequence[int] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Schedule:
    """The begin and end of each of ``tasks``, in seconds from the start."""

    tasks: Sequence[Task]
    begin_s: Sequence[float]
    end_s: Sequence[float]

    def busy_s(self) -> dict[str, float]:
        """Return each lane's busy seconds, slowed by others or not."""
        seconds: dict[str, float] = {}
        for task, begin, end in zip(self.tasks, self.begin_s, self.end_s, strict=True):
            seconds[task.lane] = seconds.get(task.lane, 0.0) + end - begin
        return seconds

    def limited_by(self) -> str:
        """Return the busiest lane. Compute and update share a processor: they count together under the larger one."""
        busy = self.busy_s()
        together = [lane for lane in (COMPUTE, UPDATE) if lane in busy]
        all_s = sum(busy[lane] for lane in together)
        return max(busy, key=lambda lane: (all_s if lane in together else busy[lane], busy[lane]))

    def timeline(self, name: str, compute: str) -> Timeline:
        """Return the schedule as events: compute and idle time of the tier ``compute``, and copies."""
        rows: list[tuple[float, float, EventKind, str, int, str, str]] = []
        for task, begin, end in zip(self.tasks, self.begin_s, self.end_s, strict=True):
            source, _, target = task.lane.rpartition(" -> ")
            kind = EventKind.COPY if source else EventKind.COMPUTE
            rows.append((begin, end - begin, kind, target if source else compute, task.bytes, source, task.name))
        rows += [(b, e - b, EventKind.IDLE, compute, 0, "", cause) for b, e, cause in self._waits()]
        rows.sort(key=lambda row: row[0])
        timeline = Timeline(name, measured=False)
        for begin, took, kind, tier, count, source, label in rows:
            timeline.add(kind, tier, count, time_s=begin, duration_s=took, source=source, label=label)
        return timeline

    def _waits(self) -> list[tuple[float, float, str]]:
        """Return the idle times of compute, and the lane that each waited for."""
        waits, free_s = [], 0.0
        for task, begin, end in zip(self.tasks, self.begin_s, self.end_s, strict=True):
            if task.lane not in (COMPUTE, UPDATE):
                continue
            if begin > free_s:
                last = max(task.after, key=lambda index: self.end_s[index])
                waits.append((free_s, begin, self.tasks[last].lane))
            free_s = end
        return waits


class TaskList:
    """Tasks of a runtime that loads blocks into a ring of ``slots``, through ``staging`` buffers."""

    def __init__(self, slots: int, staging: int) -> None:
        self.tasks: list[Task] = []
        # Each free slot of the ring: the block that it still holds, and the tasks that release it.
        self._free: deque[tuple[str, list[int]]] = deque([("", [])] * slots)
        self._staging: deque[list[int]] = deque([[]] * staging)

    def _task(self, name: str, lane: str, seconds: float, after: Sequence[int], bytes: int = 0) -> int:
        self.tasks.append(Task(name=name, lane=lane, seconds=seconds, after=tuple(after), bytes=bytes))
        return len(self.tasks) - 1

    def _ready(self, block: str) -> list[int] | None:
        """Take the slot that still holds the block, and return the tasks to wait for; None if there is none."""
        slot = next((slot for slot in self._free if slot[0] == block), None)
        if slot is not None:
            self._free.remove(slot)
        return slot and slot[1][:]


def simulate(tasks: Sequence[Task], contention: Contention | None = None) -> Schedule:
    """Simulate ``tasks``. Raises ValueError where a task waits for itself or a later one, as that could deadlock."""
    return _Simulation(tasks, {} if contention is None else contention).run()


class _Simulation:
    def __init__(self, tasks: Sequence[Task], contention: Contention) -> None:
        self._tasks, self._contention = tasks, contention
        self._begin_s, self._end_s = [0.0] * len(tasks), [0.0] * len(tasks)
        self._missing = [len(task.after) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        self._queues: dict[str, deque[int]] = {}
        self._left: dict[str, tuple[int, float]] = {}  # lane -> the task on it and its seconds to go
        self._speeds: dict[tuple[str, ...], dict[str, float]] = {}  # busy lanes -> how fast each of them is
        self._now_s = 0.0
        for index, task in enumerate(tasks):
            if any(earlier >= index for earlier in task.after):
                raise ValueError(f"task {index} ({task.name}) comes after a later one")
            for earlier in task.after:
                self._followers[earlier].append(index)
            self._queues.setdefault(task.lane, deque()).append(index)

    def run(self) -> Schedule:
        for lane in self._queues:
            self._start(lane)
        while self._left:
            self._advance()
        return Schedule(self._tasks, self._begin_s, self._end_s)

    def _start(self, lane: str) -> None:
        queue = self._queues[lane]
        if lane not in self._left and queue and not self._missing[queue[0]]:
            index = queue.popleft()
            self._begin_s[index] = self._now_s
            self._left[lane] = (index, self._tasks[index].seconds)

    def _advance(self) -> None:
        """Move on to the moment at which the next task ends."""
        speeds = self._speeds_of(tuple(self._left))
        step_s = min(left / speeds[lane] for lane, (_, left) in self._left.items())
        self._now_s += step_s
        ended = []
        for lane, (index, left) in self._left.items():
            left -= step_s * speeds[lane]
            self._left[lane] = (index, left)
            if left <= _DONE * max(1.0, self._tasks[index].seconds):
                ended.append((lane, index))
        free = [lane for lane, _ in ended]
        for lane, index in ended:
            del self._left[lane]
            self._end_s[index] = self._now_s
            for follower in self._followers[index]:
                self._missing[follower] -= 1
                if not self._missing[follower]:
                    free.append(self._tasks[follower].lane)
        for lane in free:
            self._start(lane)

    def _speeds_of(self, busy: tuple[str, ...]) -> dict[str, float]:
        """Return each busy lane's speed, cached per set of lanes: a step has thousands of moments, and few sets.

        The slowdowns by the other lanes add up: three lanes take turns if any two of them do.
        """
        if busy not in self._speeds:
            self._speeds[busy] = {
                lane: 1
                / (1 + sum(1 / self._contention.get((lane, other), 1.0) - 1 for other in busy if other != lane))
                for lane in busy
            }
        return self._speeds[busy]
