"""A recorded run as a Timeline: what was held when it began, then what happened; and its telling moments."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.allocator.blocks import Block
from brim.allocator.config import AllocatorConfig
from brim.core.hardware import VRAM
from brim.core.timeline import EventKind, Timeline
from brim.processes import copied
from brim.recordings import categories, halves, static_snapshot
from brim.recordings.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Columns,
    History,
    contradictions,
)
from brim.recordings.labels import label_of, stack_text
from brim.recordings.occupancy import Moment, moment
from brim.recordings.replay import Replay, Run, recorded_start
from brim.recordings.starting_state import State
from brim.recordings.what_if import capacity_bytes

INFERRED = "categories_inferred"  # the fact that says that categories were inferred from stacks, not recorded
MOST_OOMS = 8  # moments of failures that are kept
_KINDS = {
    ALLOC: EventKind.ALLOC,
    FREE_REQUESTED: EventKind.FREE,
    FREE_COMPLETED: EventKind.FREE,
    SEGMENT_ALLOC: EventKind.SEGMENT_ALLOC,
    SEGMENT_MAP: EventKind.SEGMENT_ALLOC,
    SEGMENT_FREE: EventKind.SEGMENT_FREE,
    SEGMENT_UNMAP: EventKind.SEGMENT_FREE,
    OOM: EventKind.OOM,
}
_TIMELINE_KINDS = np.array([_KINDS[action] for action in range(OOM + 1)], np.int8)
_ROWS = 1 << 14  # that are written at once


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A device's recording, replayed: as a Timeline, how far the replay agrees, and the moments that tell most.

    ``moments``: the peak of what was reserved, the failures, and the end. ``capacity_bytes`` is what the device could
    give at the first failure, None if nothing failed; ``config``: the settings of then.
    """

    timeline: Timeline
    config: AllocatorConfig
    replay: Replay
    moments: tuple[Moment, ...]
    capacity_bytes: int | None


def recorded_run(history: History, name: str, *, stacks: Sequence[Sequence[str]] = ()) -> RecordedRun:
    """The events of ``history`` with the bytes that blocks took, as ``torch.cuda.memory_allocated`` counts them; the
    replay that they are made of, and its moments.

    Leading events at 0 s hold what was there at the start, which the history does not tell and its undoing does.
    ``stacks`` are the frames that ``history.stacks`` numbers, the innermost first: they give stacks, labels and
    inferred categories. Seconds count from the first event.
    Raises FormatError for events that no allocator can have written.
    """
    facts = {"device": float(history.device)} | ({INFERRED: 1.0} if stacks else {})
    made = Timeline(name, measured=True, facts=facts)
    if not history.actions:
        static_snapshot.write(history, made, stacks)
        peak = static_snapshot.moment(history, "peak")
        moments = peak, replace(peak, what="end")
        return RecordedRun(
            timeline=made,
            config=AllocatorConfig.from_snapshot(history.settings),
            replay=static_snapshot.result(history),
            moments=moments,
            capacity_bytes=None,
        )
    with contradictions(history):
        columns = Columns(history)
        config, start = recorded_start(history, columns)
        run = _Writing(columns, config, start)
        run.prepare(made, stacks)
        run.all_events()
        run.write_events()
        return RecordedRun(
            timeline=made,
            config=config,
            replay=run.result(),
            moments=tuple(run.moments),
            capacity_bytes=capacity_bytes(history, start),
        )


class _Writing(Run):
    """Writes every event that changes what is held, and keeps the telling moments."""

    second_half: Replay | None = None

    def prepare(self, timeline: Timeline, stacks: Sequence[Sequence[str]]) -> None:
        history, start = self.history, self.start
        self.timeline = timeline
        self.labels = [label_of(frames) for frames in stacks]
        self.stacks = [stack_text(frames) for frames in stacks]
        self.phases = categories.phases_of(stacks)
        kept = {block.address: block for segment in history.segments for block in segment.blocks}
        self.start_stacks: dict[int, int] = {}  # of what was there before the first event, by address
        for address, live in start.live.items():
            stays = live.freed_at < 0 and address in kept
            self.start_stacks[address] = kept[address].stack if stays else -1
        self.moments: list[Moment] = []
        self.peak = _peak_event(self.columns, start)
        self._write_start(start)
        if self.peak < 0:
            self.keep_moment("peak", 0)

    def _write_start(self, start: State) -> None:
        for address in sorted(start.ranges):
            found = start.ranges[address]
            self.timeline.add(EventKind.SEGMENT_ALLOC, VRAM, found.size, address=address, stream=found.group[0])
        for number, address in enumerate(sorted(start.live)):  # storages are numbered in order of appearance
            live, stack = start.live[address], self.start_stacks[address]
            if not live.pending:
                known = 0 <= stack < len(self.labels)
                self.timeline.add(
                    EventKind.ALLOC,
                    VRAM,
                    live.size,
                    address=address,
                    stream=live.stream,
                    storage=number,
                    label=self.labels[stack] if known else "",
                    stack=self.stacks[stack] if known else "",
                    category=categories.of_the_start(self.phases[stack]) if known else "",
                )

    def all_events(self) -> None:
        """All events; the second half of many in another process, where that can be."""
        count = len(self.history.actions)
        middle = halves.border(self.columns)
        if middle is None:
            self._up_to(0, count)
        else:
            with copied(lambda: self._second_half(middle)) as second:
                _ = self._inferred  # which takes as long as the replay of some of the second half
                self._up_to(0, middle)
                told = second()
            if told is not None and self._joins(middle, told):
                return
            self._up_to(middle, count)
        self._finish()

    @cached_property
    def _inferred(self) -> NDArray[np.int8]:
        return categories.infer(self.columns, self.phases)

    def _up_to(self, begin: int, end: int) -> None:
        if begin <= self.peak < end:
            self.events(begin, self.peak + 1)
            self.keep_moment("peak", self.peak)
            begin = self.peak + 1
        self.events(begin, end)

    def _finish(self) -> None:
        self.pending = self._give_back(self.pending)
        self.keep_moment("end", len(self.history.actions) - 1)

    def _second_half(self, middle: int) -> bytes:
        """What ``_joins`` needs to know of the events from ``middle`` on."""
        halves.begin(self, middle)
        self.moments = []
        began = halves.standing(self)
        self._up_to(middle, len(self.history.actions))
        self._finish()
        return pickle.dumps((began, self.result(), self.moments, self.changed_bytes[middle:]))

    def _joins(self, middle: int, told: bytes) -> bool:
        """Take in the second half if it began where the first has ended."""
        began, result, moments, changed_bytes = pickle.loads(told)
        if began != halves.standing(self):
            return False
        self.second_half = result
        self.changed_bytes[middle:] = changed_bytes
        left = MOST_OOMS - sum(one.what == "oom" for one in self.moments)
        failures = [one for one in moments if one.what == "oom"]
        self.moments += [one for one in moments if one not in failures[left:]]
        return True

    def result(self) -> Replay:
        first = super().result()
        return first if self.second_half is None else halves.joined(first, self.second_half)

    def _oom(self, index: int, size: int, stream: int, pending: list[tuple[str, int, int]]) -> None:
        super()._oom(index, size, stream, pending)
        if sum(one.what == "oom" for one in self.moments) < MOST_OOMS:
            self.keep_moment("oom", index, requested_bytes=size)

    def keep_moment(self, what: str, index: int, *, requested_bytes: int = 0) -> None:
        times = self.history.times_us
        found = moment(
            self.allocator,
            self.handles.values(),
            self._stack_of,
            what=what,
            event=index,
            time_s=(times[index] - times[0]) / 1e6 if times else 0.0,
            requested_bytes=requested_bytes,
        )
        self.moments.append(found)

    def _stack_of(self, block: Block) -> int:
        return self.start_stacks.get(block.address, -1) if block.event < 0 else self.history.stacks[block.event]

    def write_events(self) -> None:
        """Write all events, once they are over."""
        columns, changed = self.columns, np.asarray(self.changed_bytes)
        actions, sizes = columns.actions, columns.sizes
        device = (actions >= SEGMENT_ALLOC) & ((actions < OOM) | (actions == OOM) & (sizes > 0))
        rows = np.flatnonzero(device | (changed > 0))
        if not len(rows):
            return
        storages, found = self._storages(rows, actions[rows]), self._inferred
        texts = {
            "tier": [VRAM],
            "label": [*self.labels, ""],
            "category": categories.NAMES,
            "stack": [*self.stacks, ""],
        }
        numbers = {name: np.array(self.timeline.numbered(known), np.int32) for name, known in texts.items()}
        for start in range(0, len(rows), _ROWS):  # what is worked out for some rows is little beside the Timeline
            part = slice(start, start + _ROWS)
            self._write(rows[part], storages[part], changed, found, numbers)

    def _write(
        self,
        rows: NDArray[np.int64],
        storages: NDArray[np.int64],
        changed: NDArray[np.int64],
        found: NDArray[Any],
        texts: dict[str, NDArray[np.int32]],
    ) -> None:
        """Write some rows. ``texts``: by column, the Timeline's number of each text."""
        columns = self.columns
        actions, stacks = columns.actions[rows], columns.stacks[rows]
        stacks[(stacks < 0) | (stacks >= len(self.labels))] = len(self.labels)  # the last text is that of no stack
        numbers: dict[str, NDArray[Any]] = {
            "bytes": np.where(actions >= SEGMENT_ALLOC, columns.sizes[rows], changed[rows]),
            "time_s": _seconds(columns.times_us[rows], int(columns.times_us[0])),
            "address": np.where(actions == OOM, -1, columns.addresses[rows]),
            "storage": storages,
            "stream": columns.streams[rows],
        }
        which: dict[str, NDArray[Any]] = {
            "tier": np.zeros(len(rows), np.int8),
            "label": stacks,
            "category": found[rows],
            "stack": stacks,
        }
        self.timeline.extend(
            _TIMELINE_KINDS[actions].data,
            {name: column.data for name, column in numbers.items()},
            {name: texts[name][index].data for name, index in which.items()},
        )

    def _storages(self, rows: NDArray[np.int64], actions: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The storage of what each row allocates or frees: a free is of the allocation before it at its address."""
        found = np.full(len(rows), -1, np.int64)
        allocations = np.flatnonzero(actions == ALLOC)
        found[allocations] = np.arange(len(allocations)) + len(self.start.live)
        place = np.full(len(self.columns.actions), -1, np.int64)  # of each event among the rows
        place[rows] = np.arange(len(rows))
        blocks = place[self.columns.by_address]
        blocks = blocks[blocks >= 0]
        addresses, frees = self.columns.addresses[rows[blocks]], actions[blocks] != ALLOC
        first = np.append(True, addresses[1:] != addresses[:-1])[: len(blocks)]  # at its address
        freed = np.flatnonzero(frees & ~first & np.append(True, ~frees[:-1])[: len(blocks)])
        found[blocks[freed]] = found[blocks[freed - 1]]
        at_start = {address: number for number, address in enumerate(sorted(self.start.live))}
        freed = np.flatnonzero(frees & first)
        found[blocks[freed]] = [at_start.get(address, -1) for address in addresses[freed].tolist()]
        return found


def _seconds(times_us: NDArray[np.int64], first_us: int) -> NDArray[np.float64]:
    """Seconds since the first event."""
    if abs(first_us) < 1 << 62 and np.abs(times_us).max() < 1 << 62:
        return (times_us - first_us) / 1e6
    return np.array([(time_us - first_us) / 1e6 for time_us in times_us.tolist()])  # differences of more than 64 bits


def _peak_event(columns: Columns, start: State) -> int:
    """The allocation for which most was reserved, the busiest of those; -1: before the first event."""
    allocations = np.flatnonzero((columns.actions == ALLOC) & (columns.sizes > 0))  # others are not replayed
    if not len(allocations):
        return -1
    held = start.reserved_bytes + np.cumsum(columns.reserved_changes[: allocations[-1] + 1])
    changes = (columns.actions == ALLOC).astype(np.int8) - (columns.actions == FREE_COMPLETED).astype(np.int8)
    used = np.cumsum(columns.sizes * changes)[allocations]
    peak = max(int(held.max()), start.reserved_bytes)
    found, most = -1, 0
    if peak > start.reserved_bytes:  # of what came after the memory for it was taken, the first has to do
        first = int(np.searchsorted(allocations, np.argmax(held)))
        allocations, used, found, most = allocations[first:], used[first:], int(allocations[first]), int(used[first])
    busy = np.flatnonzero((held[allocations] == peak) & (used > most))
    return int(allocations[busy[np.argmax(used[busy])]]) if len(busy) else found
