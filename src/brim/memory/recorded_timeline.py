"""A recorded run as a Timeline: what was held when it began, then what happened."""

from __future__ import annotations

from collections.abc import Sequence

from brim.core.hardware import VRAM
from brim.core.timeline import EventKind, Timeline
from brim.memory.allocator_config import AllocatorConfig
from brim.memory.blocks import Block
from brim.memory.history import History, contradictions
from brim.memory.replay import Run, settled_start
from brim.memory.starting_state import State

_SEGMENTS = {
    "segment_alloc": EventKind.SEGMENT_ALLOC,
    "segment_map": EventKind.SEGMENT_ALLOC,
    "segment_free": EventKind.SEGMENT_FREE,
    "segment_unmap": EventKind.SEGMENT_FREE,
}


def recorded_timeline(history: History, name: str, *, labels: Sequence[str] = ()) -> Timeline:
    """The events of ``history`` with the bytes that blocks took, as ``torch.cuda.memory_allocated`` counts them.

    Leading events at 0 s hold what was there at the start, which the history does not tell and its undoing does.
    ``labels`` names the stacks of ``history.stacks``. Seconds count from the first event.
    Raises FormatError for events that no allocator can have written.
    """
    config = AllocatorConfig.from_snapshot(history.settings)
    made = Timeline(name, measured=True, facts={"device": float(history.device)})
    with contradictions(history):
        start = settled_start(history, config)
        _write_start(made, start)
        run = _Writing(history, config, start)
        run.timeline, run.labels = made, labels
        run.number(start)
        run.all_events()
    return made


def _write_start(made: Timeline, start: State) -> None:
    for address in sorted(start.ranges):
        found = start.ranges[address]
        made.add(EventKind.SEGMENT_ALLOC, VRAM, found.size, address=address, stream=found.group[0])
    for number, address in enumerate(sorted(start.live)):
        live = start.live[address]
        if not live.pending:
            made.add(EventKind.ALLOC, VRAM, live.size, address=address, stream=live.stream, storage=number)


class _Writing(Run):
    """Writes every event that changes what is held."""

    timeline: Timeline
    labels: Sequence[str]

    def number(self, start: State) -> None:
        """Storages are numbered in order of appearance; ``storages`` holds those in use by address."""
        self.storages = {address: number for number, address in enumerate(sorted(start.live))}
        self.next = len(self.storages)

    def note(self, index: int, block: Block | None) -> None:
        history = self.history
        action, address, size = history.actions[index], history.addresses[index], history.sizes[index]
        if action in _SEGMENTS:
            self._add(_SEGMENTS[action], size, index, address)
        elif action == "oom":
            self._add(EventKind.OOM, size, index)
        elif action == "alloc" and block is not None:
            self.storages[address] = self.next
            self._add(EventKind.ALLOC, block.size, index, address, self.next)
            self.next += 1
        elif block is not None and block.allocated:
            self._add(EventKind.FREE, block.size, index, address, self.storages.pop(address, -1))

    def _add(self, kind: EventKind, size: int, index: int, address: int = -1, storage: int = -1) -> None:
        history = self.history
        stack = history.stacks[index]
        self.timeline.add(
            kind,
            VRAM,
            size,
            time_s=(history.times_us[index] - history.times_us[0]) / 1e6,
            address=address,
            storage=storage,
            stream=history.streams[index],
            label=self.labels[stack] if 0 <= stack < len(self.labels) else "",
        )
