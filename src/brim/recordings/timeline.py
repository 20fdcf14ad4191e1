"""A recorded run as a Timeline, with its replay and its moments of interest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.allocator.blocks import Block
from brim.allocator.config import AllocatorConfig
from brim.core.hardware import VRAM
from brim.core.timeline import EventKind, Timeline
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
    DeviceHistory,
    contradictions,
)
from brim.recordings.moments import Moment, final_moment, moment, pieces_of
from brim.recordings.replay import Replay, Run, recorded_start
from brim.recordings.stacks import CATEGORY_NAMES, StackTexts, infer
from brim.recordings.starting_state import State
from brim.recordings.what_if import capacity_bytes

INFERRED = "categories_inferred"  # the fact that marks categories as inferred from stacks, not recorded
MOST_OOMS = 8  # failures that are described as moments
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
_ROWS = 1 << 12  # written at once


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A device's recording as a Timeline, the replay's agreement with it, and its moments of interest.

    ``moments``: the peak of reserved memory, the failures, and the end. ``capacity_bytes`` is the memory available
    to the process at the first failure, None if nothing failed; ``config``: the recorded settings.
    """

    timeline: Timeline
    config: AllocatorConfig
    replay: Replay
    moments: tuple[Moment, ...]
    capacity_bytes: int | None


def recorded_run(history: DeviceHistory, name: str, *, stacks: Sequence[Sequence[str]] = ()) -> RecordedRun:
    """Replay ``history`` into a Timeline with the sizes of blocks, as ``torch.cuda.memory_allocated`` counts them.

    Leading events at 0 s stand for the blocks and segments from before the first event. ``stacks`` are the frames
    that ``history.stacks`` numbers, the innermost first: they give stacks, labels and inferred categories. Seconds
    count from the first event. Raises FormatError for events that no allocator can have written.
    """
    facts = {"device": float(history.device)} | ({INFERRED: 1.0} if stacks else {})
    timeline = Timeline(name, measured=True, facts=facts)
    if not history.actions:
        return _run_without_events(history, timeline, StackTexts(stacks))
    with contradictions(history):
        columns = Columns(history)
        config, start = recorded_start(columns)
        run = _Writing(columns, config, start)
        run.prepare(timeline, StackTexts(stacks))
        run.all_events()
        run.write_events()
        return RecordedRun(
            timeline=timeline,
            config=config,
            replay=run.result(),
            moments=tuple(run.moments),
            capacity_bytes=capacity_bytes(columns, start),
        )


def _run_without_events(history: DeviceHistory, timeline: Timeline, texts: StackTexts) -> RecordedRun:
    """Write the snapshot's segments, then its blocks, each by address. No object is kept per block."""
    segments = sorted(history.segments, key=lambda segment: segment.address)
    for segment in segments:
        timeline.add(EventKind.SEGMENT_ALLOC, VRAM, segment.size, address=segment.address, stream=segment.stream)
    storage, used_bytes = -1, 0
    for segment in segments:
        for block in segment.blocks:
            storage += block.state != "inactive"
            if block.state == "active_allocated":
                used_bytes += block.size
                _add_block(
                    timeline, block.size, block.address, segment.stream, storage, texts.before_events(block.stack)
                )
    reserved_bytes = sum(segment.size for segment in segments)
    blocks = sum(1 for segment in segments for _ in pieces_of(segment))
    counts = dict.fromkeys(("allocations", "segments", "ooms"), 0)
    replay = Replay(
        device=history.device,
        **counts,
        **{f"{name}_matched": 0 for name in ("addresses", "segments", "ooms")},
        final_blocks=blocks,
        final_blocks_matched=blocks,
        peak_reserved_measured_bytes=reserved_bytes,
        peak_reserved_replayed_bytes=reserved_bytes,
        peak_allocated_replayed_bytes=used_bytes,
        inconsistent_events=0,
    )
    peak = final_moment(history)
    return RecordedRun(
        timeline=timeline,
        config=AllocatorConfig.from_snapshot(history.settings),
        replay=replay,
        moments=(peak, replace(peak, what="end")),
        capacity_bytes=None,
    )


def _add_block(
    timeline: Timeline, size: int, address: int, stream: int, storage: int, names: tuple[str, str, str]
) -> None:
    label, stack, category = names
    timeline.add(
        EventKind.ALLOC,
        VRAM,
        size,
        address=address,
        stream=stream,
        storage=storage,
        label=label,
        stack=stack,
        category=category,
    )


class _Writing(Run):
    """A replay that writes every event that changes memory, and describes the moments of interest."""

    def prepare(self, timeline: Timeline, texts: StackTexts) -> None:
        history, start = self.history, self.start
        self.timeline, self.texts = timeline, texts
        final_blocks = {block.address: block for segment in history.segments for block in segment.blocks}
        self.start_stacks: dict[int, int] = {}  # of blocks from before the first event, by address
        for address, live in start.live.items():
            stays = live.freed_at < 0 and address in final_blocks
            self.start_stacks[address] = final_blocks[address].stack if stays else -1
        self.moments: list[Moment] = []
        self.peak = _peak_event(self.columns, start)
        self._write_start(start)
        if self.peak < 0:
            self.keep_moment("peak", 0)

    def _write_start(self, start: State) -> None:
        for address in sorted(start.ranges):
            span = start.ranges[address]
            self.timeline.add(EventKind.SEGMENT_ALLOC, VRAM, span.size, address=address, stream=span.group[0])
        for number, address in enumerate(sorted(start.live)):  # storages are numbered in order of appearance
            live = start.live[address]
            if not live.pending:
                names = self.texts.before_events(self.start_stacks[address])
                _add_block(self.timeline, live.size, address, live.stream, number, names)

    def all_events(self) -> None:
        self.events(0, self.peak + 1)
        if self.peak >= 0:
            self.keep_moment("peak", self.peak)
        self.events(self.peak + 1, len(self.history.actions))
        self.pending = self._release_cache(self.pending)
        self.keep_moment("end", len(self.history.actions) - 1)

    def _oom(self, index: int, size: int, stream: int, pending: list[tuple[str, int, int]]) -> None:
        super()._oom(index, size, stream, pending)
        if sum(moment.what == "oom" for moment in self.moments) < MOST_OOMS:
            self.keep_moment("oom", index, requested_bytes=size)

    def keep_moment(self, what: str, index: int, *, requested_bytes: int = 0) -> None:
        times = self.history.times_us
        self.moments.append(
            moment(
                self.allocator,
                self.handles.values(),
                self._stack_of,
                what=what,
                event=index,
                time_s=(times[index] - times[0]) / 1e6 if times else 0.0,
                requested_bytes=requested_bytes,
            )
        )

    def _stack_of(self, block: Block) -> int:
        return self.start_stacks.get(block.address, -1) if block.event < 0 else self.history.stacks[block.event]

    def write_events(self) -> None:
        """Write all events after the replay."""
        columns, changed = self.columns, np.asarray(self.changed_bytes)
        actions, sizes = columns.actions, columns.sizes
        device = (actions >= SEGMENT_ALLOC) & ((actions < OOM) | (actions == OOM) & (sizes > 0))
        rows = np.flatnonzero(device | (changed > 0))
        if not len(rows):
            return
        storages, categories = self._storages(rows, actions[rows]), infer(columns, self.texts.phases)
        texts = {
            "tier": [VRAM],
            "label": [*self.texts.labels, ""],
            "category": CATEGORY_NAMES,
            "stack": [*self.texts.texts, ""],
        }
        numbers = {name: np.array(self.timeline.numbered(known), np.int32) for name, known in texts.items()}
        for start in range(0, len(rows), _ROWS):  # so that temporaries are small beside the Timeline
            part = slice(start, start + _ROWS)
            self._write(rows[part], storages[part], changed, categories, numbers)

    def _write(
        self,
        rows: NDArray[np.int64],
        storages: NDArray[np.int64],
        changed: NDArray[np.int64],
        categories: NDArray[Any],
        texts: dict[str, NDArray[np.int32]],
    ) -> None:
        """Write some rows. ``texts``: the Timeline's number of each text, by column."""
        columns = self.columns
        actions, stacks = columns.actions[rows], columns.stacks[rows]
        none = len(self.texts.labels)  # the last text is that of no stack
        stacks[(stacks < 0) | (stacks >= none)] = none
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
            "category": categories[rows],
            "stack": stacks,
        }
        self.timeline.extend(
            _TIMELINE_KINDS[actions].data,
            {name: column.data for name, column in numbers.items()},
            {name: texts[name][index].data for name, index in which.items()},
        )

    def _storages(self, rows: NDArray[np.int64], actions: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return each row's storage. A free has the storage of the allocation before it at its address."""
        storages = np.full(len(rows), -1, np.int64)
        allocations = np.flatnonzero(actions == ALLOC)
        storages[allocations] = np.arange(len(allocations)) + len(self.start.live)
        place = np.full(len(self.columns.actions), -1, np.int64)  # of each event among the rows
        place[rows] = np.arange(len(rows))
        blocks = place[self.columns.by_address]
        blocks = blocks[blocks >= 0]
        addresses, frees = self.columns.addresses[rows[blocks]], actions[blocks] != ALLOC
        first = np.append(True, addresses[1:] != addresses[:-1])[: len(blocks)]  # at its address
        freed = np.flatnonzero(frees & ~first & np.append(True, ~frees[:-1])[: len(blocks)])
        storages[blocks[freed]] = storages[blocks[freed - 1]]
        at_start = {address: number for number, address in enumerate(sorted(self.start.live))}
        freed = np.flatnonzero(frees & first)
        storages[blocks[freed]] = [at_start.get(address, -1) for address in addresses[freed].tolist()]
        return storages


def _seconds(times_us: NDArray[np.int64], first_us: int) -> NDArray[np.float64]:
    """Return seconds since the first event."""
    if abs(first_us) < 1 << 62 and np.abs(times_us).max() < 1 << 62:
        return (times_us - first_us) / 1e6
    return np.array([(time_us - first_us) / 1e6 for time_us in times_us.tolist()])  # differences of more than 64 bits


def _peak_event(columns: Columns, start: State) -> int:
    """Return the allocation at the peak of reserved memory, the busiest of several; -1: before the first event."""
    allocations = np.flatnonzero((columns.actions == ALLOC) & (columns.sizes > 0))  # others are not replayed
    if not len(allocations):
        return -1
    reserved = start.reserved_bytes + np.cumsum(columns.reserved_changes[: allocations[-1] + 1])
    changes = (columns.actions == ALLOC).astype(np.int8) - (columns.actions == FREE_COMPLETED).astype(np.int8)
    used = np.cumsum(columns.sizes * changes)[allocations]
    peak = max(int(reserved.max()), start.reserved_bytes)
    event, most = -1, 0
    if peak > start.reserved_bytes:  # at least the first allocation after the peak's memory was taken
        first = int(np.searchsorted(allocations, np.argmax(reserved)))
        allocations, used, event, most = allocations[first:], used[first:], int(allocations[first]), int(used[first])
    busy = np.flatnonzero((reserved[allocations] == peak) & (used > most))
    return int(allocations[busy[np.argmax(used[busy])]]) if len(busy) else event
