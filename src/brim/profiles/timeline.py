"""A recorded device, and the host's memory, as Timelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from brim.core import EventKind, Timeline
from brim.core.hardware import RAM, VRAM
from brim.profiles.activity import (
    D2H,
    H2D,
    H2H,
    MEMSET,
    Activity,
    Numbers,
)
from brim.profiles.figures import CAUSES
from brim.profiles.idle import Idle

HELD_BEFORE = "before the recording"
COLLECTIVE_CATEGORY = "collective"
_TIERS = (VRAM, RAM, "")  # as the indices below
_WAYS = {H2D: (1, 0), D2H: (0, 1), H2H: (1, 1), MEMSET: (2, 0)}  # source, tier; all others: within the device


class Rows(Protocol):
    """What one device did, in order."""

    start: Numbers
    duration: Numbers
    kind: Numbers
    stream: Numbers
    bytes: Numbers
    name: Numbers
    collective: Numbers
    memory: Numbers


@dataclass
class Table:
    """Columns of events that are put into order at the end. Texts are numbers of the activity's texts."""

    parts: list[dict[str, Numbers]] = field(default_factory=list)

    def add(self, count: int, **columns: Numbers | int) -> None:
        self.parts.append({name: np.broadcast_to(np.asarray(column), count) for name, column in columns.items()})

    def column(self, name: str, default: int | float) -> Numbers:
        sizes = [len(part["kind"]) for part in self.parts]
        columns = [part.get(name, np.full(size, default)) for part, size in zip(self.parts, sizes, strict=True)]
        return np.concatenate(columns) if columns else np.empty(0)

    def write(self, timeline: Timeline, texts: list[str]) -> None:
        order = np.argsort(self.column("time_s", 0.0), kind="stable")
        names = {"tier": _TIERS, "source": _TIERS, "label": texts, "category": _CATEGORIES}
        timeline.extend(
            _view(self.column("kind", 0)[order].astype(np.int8)),
            _Columns(_NUMBERS, lambda name: _view(self.column(name, _NUMBERS[name])[order].astype(_TYPES[name]))),
            _Columns(_TEXTS, lambda name: _used(self.column(name, _TEXTS[name])[order], names[name])),
        )


class _Columns(Mapping[str, Any]):
    """Columns that are made when they are asked for: all at once they would take as much as the Timeline."""

    def __init__(self, names: Mapping[str, Any], make: Callable[[str], Any]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _view(column: Numbers) -> memoryview:
    return np.ascontiguousarray(column).data


def _used(numbers: Numbers, texts: Sequence[str]) -> tuple[memoryview, list[str]]:
    """Texts that are used, and which of them where: there are far more texts than a device has events."""
    chosen = numbers.astype(np.int32)
    used = np.flatnonzero(np.bincount(chosen, minlength=1))
    place = np.zeros(used.max(initial=0) + 1, np.int32)
    place[used] = np.arange(len(used))
    return _view(place[chosen]), [texts[number] for number in used.tolist()]


_NUMBERS = {"time_s": 0.0, "duration_s": 0.0, "bytes": 0, "address": -1, "stream": 0}
_TYPES = {name: np.float64 if isinstance(default, float) else np.int64 for name, default in _NUMBERS.items()}
_TEXTS = {"tier": 2, "source": 2, "label": 0, "category": 0}
_CATEGORIES = ("", COLLECTIVE_CATEGORY, *CAUSES)


def device_table(activity: Activity, rows: Rows, idle: Idle, labels: Numbers, device: int) -> Table:
    """Kernels, copies, allocations and idle times of one device, in seconds since the recording began."""
    table = Table()
    kernels = ~rows.memory
    table.add(
        int(kernels.sum()),
        kind=EventKind.COMPUTE,
        tier=0,
        time_s=rows.start[kernels],
        duration_s=rows.duration[kernels],
        stream=rows.stream[kernels],
        label=rows.name[kernels],
        category=rows.collective[kernels].astype(np.int64),
    )
    ways = np.array([_WAYS.get(kind, (0, 0)) for kind in range(int(rows.kind.max(initial=0)) + 1)])
    copies = rows.memory
    table.add(
        int(copies.sum()),
        kind=EventKind.COPY,
        source=ways[rows.kind[copies], 0],
        tier=ways[rows.kind[copies], 1],
        bytes=rows.bytes[copies],
        time_s=rows.start[copies],
        duration_s=rows.duration[copies],
        stream=rows.stream[copies],
        label=rows.name[copies],
    )
    _add_idle(table, idle, labels)
    _add_memory(table, activity, device, tier=0)
    return table


def host_timeline(activity: Activity, source: str) -> Timeline:
    table, timeline = Table(), Timeline(f"{source}: host", measured=True)
    _add_memory(table, activity, -1, tier=1)
    table.write(timeline, activity.texts.all())
    return timeline


def _add_idle(table: Table, idle: Idle, labels: Numbers) -> None:
    """One event for each cause of each gap, one after the other in the order of causes: their sums are exact."""
    at = idle.spans.starts.copy()
    for number in range(len(CAUSES)):
        there = idle.parts[number] > 0
        table.add(
            int(there.sum()),
            kind=EventKind.IDLE,
            tier=0,
            time_s=at[there],
            duration_s=idle.parts[number][there],
            label=labels[there],
            category=2 + number,
        )
        at += idle.parts[number]


def _add_memory(table: Table, activity: Activity, device: int, *, tier: int) -> None:
    """What the allocator gave and took back; first of all, what it had given before and what is freed later.

    The reserve is taken from the totals that PyTorch writes beside every event.
    """
    memory, plain = activity.memory, activity.texts.number("")
    chosen = np.flatnonzero(memory["device"] == device)
    chosen = chosen[np.argsort(memory["time"][chosen], kind="stable")]
    if not len(chosen):
        return
    time, size = memory["time"][chosen], memory["bytes"][chosen]
    total, reserved = memory["total"][chosen], memory["reserved"][chosen]
    initial_bytes = int(total[0] - size[0]) if total[0] >= 0 else -int(min(0, np.cumsum(size).min()))
    if initial_bytes > 0:
        table.add(
            1,
            kind=EventKind.ALLOC,
            tier=tier,
            bytes=initial_bytes,
            time_s=time[:1],
            label=activity.texts.number(HELD_BEFORE),
        )
    table.add(
        len(chosen),
        kind=np.where(size >= 0, EventKind.ALLOC, EventKind.FREE),
        tier=tier,
        bytes=np.abs(size),
        time_s=time,
        address=memory["address"][chosen],
        label=plain,
    )
    known_rows = np.flatnonzero(reserved >= 0)
    steps = np.diff(reserved[known_rows], prepend=0)
    moved = np.flatnonzero(steps)
    table.add(
        len(moved),
        kind=np.where(steps[moved] > 0, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE),
        tier=tier,
        bytes=np.abs(steps[moved]),
        time_s=time[known_rows[moved]],
        label=plain,
    )
