"""A recorded run as a Timeline: what was held when it began, then what happened; and its telling moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from brim.core.hardware import VRAM
from brim.core.timeline import EventKind, Timeline
from brim.memory import categories, still
from brim.memory.allocator_config import AllocatorConfig
from brim.memory.blocks import Block
from brim.memory.history import History, contradictions
from brim.memory.labels import label_of, stack_text
from brim.memory.moments import Moment, moment
from brim.memory.recorded_device import RELEASES
from brim.memory.replay import Replay, Run, settled_start
from brim.memory.starting_state import State
from brim.memory.what_if import capacity_bytes

INFERRED = "categories_inferred"  # the fact that says that categories were inferred from stacks, not recorded
MOST_OOMS = 8  # moments of failures that are kept
_SEGMENTS = {
    "segment_alloc": EventKind.SEGMENT_ALLOC,
    "segment_map": EventKind.SEGMENT_ALLOC,
    "segment_free": EventKind.SEGMENT_FREE,
    "segment_unmap": EventKind.SEGMENT_FREE,
}


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A device's recording, replayed: as a Timeline, how far the replay agrees, and the moments that tell most.

    ``moments``: the peak of what was reserved, the failures, and the end. ``capacity_bytes`` is what the device could
    give at the first failure, None if nothing failed.
    """

    timeline: Timeline
    replay: Replay
    moments: tuple[Moment, ...]
    capacity_bytes: int | None


def recorded_timeline(history: History, name: str, *, stacks: Sequence[Sequence[str]] = ()) -> Timeline:
    """The events of ``history`` with the bytes that blocks took, as ``torch.cuda.memory_allocated`` counts them.

    Leading events at 0 s hold what was there at the start, which the history does not tell and its undoing does.
    ``stacks`` are the frames that ``history.stacks`` numbers, the innermost first: they give stacks, labels and
    inferred categories. Seconds count from the first event.
    Raises FormatError for events that no allocator can have written.
    """
    return recorded_run(history, name, stacks=stacks).timeline


def recorded_run(history: History, name: str, *, stacks: Sequence[Sequence[str]] = ()) -> RecordedRun:
    """``recorded_timeline``, the replay that it is made of, and the moments of that replay."""
    config = AllocatorConfig.from_snapshot(history.settings)
    facts = {"device": float(history.device)} | ({INFERRED: 1.0} if stacks else {})
    made = Timeline(name, measured=True, facts=facts)
    if not history.actions:
        still.write(history, made, stacks)
        peak = still.moment(history, "peak")
        moments = peak, replace(peak, what="end")
        return RecordedRun(timeline=made, replay=still.result(history), moments=moments, capacity_bytes=None)
    with contradictions(history):
        start = settled_start(history, config)
        run = _Writing(history, config, start)
        run.prepare(made, stacks)
        run.all_events()
        run.keep_moment("end", max(len(history.actions) - 1, 0))
        return RecordedRun(
            timeline=made,
            replay=run.result(),
            moments=tuple(run.moments),
            capacity_bytes=capacity_bytes(history, start),
        )


class _Writing(Run):
    """Writes every event that changes what is held, and keeps the telling moments."""

    def prepare(self, timeline: Timeline, stacks: Sequence[Sequence[str]]) -> None:
        history, start = self.history, self.start
        self.timeline = timeline
        self.labels = [label_of(frames) for frames in stacks]
        self.stacks = [stack_text(frames) for frames in stacks]
        self.phases = categories.phases_of(stacks)
        self.categories = categories.infer(history, self.phases)
        kept = {block.address: block for segment in history.segments for block in segment.blocks}
        self.born: dict[int, tuple[int, int]] = {}  # address -> event and stack
        for address, live in start.live.items():
            stays = live.freed_at < 0 and address in kept
            self.born[address] = (-1, kept[address].stack if stays else -1)
        self.storages = {address: number for number, address in enumerate(sorted(start.live))}
        self.next = len(self.storages)  # storages are numbered in order of appearance
        self.moments: list[Moment] = []
        self.peak = _peak_event(history, start)
        self._write_start(start)
        if self.peak < 0:
            self.keep_moment("peak", 0)

    def _write_start(self, start: State) -> None:
        for address in sorted(start.ranges):
            found = start.ranges[address]
            self.timeline.add(EventKind.SEGMENT_ALLOC, VRAM, found.size, address=address, stream=found.group[0])
        for address, number in self.storages.items():
            live, (_, stack) = start.live[address], self.born[address]
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

    def note(self, index: int, block: Block | None) -> None:
        history = self.history
        action, address, size = history.actions[index], history.addresses[index], history.sizes[index]
        if action in _SEGMENTS:
            self._add(_SEGMENTS[action], size, index, address)
        elif action == "oom":
            self._add(EventKind.OOM, size, index)
        elif action == "alloc" and block is not None:
            self.born[block.address] = (index, history.stacks[index])
            self.storages[address] = self.next
            self._add(EventKind.ALLOC, block.size, index, address, self.next)
            self.next += 1
            if index == self.peak:
                self.keep_moment("peak", index)
        elif block is not None:
            if block.allocated:
                self._add(EventKind.FREE, block.size, index, address, self.storages.pop(address, -1))
            if action == "free_completed":
                self.born.pop(block.address, None)

    def _oom(self, index: int, size: int, stream: int, pending: list[tuple[str, int, int]]) -> None:
        super()._oom(index, size, stream, pending)
        if sum(one.what == "oom" for one in self.moments) < MOST_OOMS:
            self.keep_moment("oom", index, requested_bytes=size)

    def keep_moment(self, what: str, index: int, *, requested_bytes: int = 0) -> None:
        times = self.history.times_us
        found = moment(
            self.allocator,
            self.handles.values(),
            self.born,
            what=what,
            event=index,
            time_s=(times[index] - times[0]) / 1e6 if times else 0.0,
            requested_bytes=requested_bytes,
        )
        self.moments.append(found)

    def _add(self, kind: EventKind, size: int, index: int, address: int = -1, storage: int = -1) -> None:
        history = self.history
        stack = history.stacks[index]
        known = 0 <= stack < len(self.labels)
        self.timeline.add(
            kind,
            VRAM,
            size,
            time_s=(history.times_us[index] - history.times_us[0]) / 1e6,
            address=address,
            storage=storage,
            stream=history.streams[index],
            label=self.labels[stack] if known else "",
            stack=self.stacks[stack] if known else "",
            category=self.categories[index],
        )


def _peak_event(history: History, start: State) -> int:
    """The allocation for which most was reserved, the busiest of those; -1: before the first event."""
    held = peak = start.reserved_bytes
    used = most = 0
    found, wanted = -1, False
    for index, (action, size) in enumerate(zip(history.actions, history.sizes, strict=True)):
        if action in ("segment_alloc", "segment_map"):
            held += size
            if held > peak:
                peak, wanted = held, True
        elif action in RELEASES:
            held -= size
        elif action == "alloc":
            used += size
            if wanted or (held == peak and used > most):
                found, most, wanted = index, used, False
        elif action == "free_completed":
            used -= size
    return found
