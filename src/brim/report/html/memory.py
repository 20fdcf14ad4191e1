"""The memory events of a tier as numpy columns, each free joined to its allocation, and the blocks at some moments.

Five million events are never made into objects: a column is 40 MB, and there are eight of them.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core import EventKind, Timeline
from brim.report.html.packing import integers

Numbers = NDArray[np.int64]
NO_OWNER = -1
MOST_GROUPS = 10
OTHERS = "others"
UNKNOWN = "not known"

# In a stacked picture, lasting memory is at the bottom and short-lived memory at the top.
_CATEGORY_ORDER = (
    "parameter", "buffer", "gradient", "optimizer_state", "kv_cache", "input", "activation", "workspace", "temporary",
    "optimizer_temporary",
)  # fmt: skip
_LONGEST_S = 4e9  # in nanoseconds it fits 64 bits
_NUMBER = re.compile(r"(?<=[. ])\d+(?=\.|$)")  # of a layer or a ring's slot
_MEMORY = (EventKind.ALLOC, EventKind.FREE, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE, EventKind.OOM)
_SEGMENT_KINDS = (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The distinct owners of memory, as columns of texts. ``group`` are indices of ``groups``."""

    category: list[str]
    label: list[str]
    stack: list[str]
    group: Numbers
    groups: list[str]
    grouped_by: str  # "category" or "module"


@dataclass(frozen=True, kw_only=True)
class TierEvents:
    """The memory events of a tier, in order; all arrays have the same length.

    ``delta`` is added to allocated bytes, ``reserved_delta`` to reserved ones. ``freed_at`` is the position of an
    allocation's free (the number of events: never). ``owner`` is an allocation's, also at its free.
    """

    tier: str
    event: Numbers  # index in the timeline
    time_ns: Numbers  # never falls; zeros where no time is known
    kind: NDArray[np.int8]
    delta: Numbers
    reserved_delta: Numbers
    address: Numbers
    stream: Numbers
    owner: Numbers
    freed_at: Numbers
    owners: Owners

    def __len__(self) -> int:
        return len(self.event)

    def live_at(self, position: int) -> Numbers:
        """Return the positions of the allocations live after event ``position``; -1: before the first."""
        allocations = np.flatnonzero(self.kind[: position + 1] == EventKind.ALLOC)
        return allocations[self.freed_at[allocations] > position]


def module_of(label: str, stack: str) -> str:
    """Return the module path of a prediction; of a measured run the label, or the innermost frame."""
    if is_module_path(stack):
        return stack
    return label or stack.partition("\n")[0]


def is_module_path(stack: str) -> bool:
    return bool(stack) and not any(character in stack for character in " \n\t:/")


def frames_of(stack: str) -> list[str]:
    """Return stack frames, the innermost first; of a module path, the path and its parents."""
    if not is_module_path(stack):
        return [line for line in stack.split("\n") if line.strip()]
    parts = stack.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def times_ns(timeline: Timeline) -> Numbers | None:
    """Return each event's begin in nanoseconds from the first; None for a timeline without times."""
    seconds = np.asarray(timeline.column("time_s"))
    if not len(seconds) or not np.isfinite(seconds).all() or seconds.max() == seconds.min():
        return None
    first = seconds.min()
    return _nanoseconds(np.minimum(seconds, first + _LONGEST_S) - first)


def durations_ns(timeline: Timeline) -> Numbers:
    """Return each event's duration; 0 for values that are no durations."""
    seconds = np.asarray(timeline.column("duration_s"))
    return _nanoseconds(np.where(np.isfinite(seconds), seconds, 0.0))


def _nanoseconds(seconds: NDArray[np.float64]) -> Numbers:
    return np.asarray(np.rint(np.clip(seconds, 0.0, _LONGEST_S) * 1e9), np.int64)


def tiers_of(timeline: Timeline) -> list[str]:
    """Return the tiers with allocations, the compute tier first."""
    kinds = np.asarray(timeline.column("kind"))
    indices, names = timeline.texts("tier")
    events = np.isin(kinds, [EventKind.ALLOC, EventKind.SEGMENT_ALLOC, EventKind.OOM])
    tiers = [names[index] for index in np.unique(np.asarray(indices)[events])]
    return sorted(tiers, key=lambda tier: (tier != timeline.peak_bytes.tier, tier))


def tier_events(timeline: Timeline, tier: str) -> TierEvents:
    """Return the memory events of ``tier``. Contradictory ones are counted as written, not raised."""
    kinds, indices = np.asarray(timeline.column("kind")), np.asarray(timeline.texts("tier")[0])
    tier_index = timeline.texts("tier")[1].index(tier)
    event = np.flatnonzero((indices == tier_index) & np.isin(kinds, _MEMORY))
    kind, size = kinds[event], np.asarray(timeline.column("bytes"))[event]
    address = np.asarray(timeline.column("address"))[event]
    allocated_by, freed_at = _joined(kind, np.asarray(timeline.column("storage"))[event], address)
    owner, owners = _owners(timeline, event, kind, size, allocated_by)
    times = times_ns(timeline)
    return TierEvents(
        tier=tier,
        event=event,
        time_ns=np.zeros(len(event), np.int64) if times is None else np.maximum.accumulate(times[event]),
        kind=kind,
        delta=_signed(kind, size, EventKind.ALLOC, EventKind.FREE),
        reserved_delta=_signed(kind, size, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE),
        address=address,
        stream=np.asarray(timeline.column("stream"))[event],
        owner=owner,
        freed_at=freed_at,
        owners=owners,
    )


def _signed(kind: NDArray[np.int8], size: Numbers, up: EventKind, down: EventKind) -> Numbers:
    return np.asarray(size * ((kind == up).astype(np.int8) - (kind == down).astype(np.int8)), np.int64)


def _joined(kind: NDArray[np.int8], storage: Numbers, address: Numbers) -> tuple[Numbers, Numbers]:
    """Return the positions of each event's allocation (its own; -1: not known) and free (length: never).

    A free belongs to the allocation before it of the same storage, or else address.
    """
    count = len(kind)
    allocated_by, freed_at = np.full(count, -1, np.int64), np.full(count, count, np.int64)
    block = np.flatnonzero((kind == EventKind.ALLOC) | (kind == EventKind.FREE))
    key = np.where(storage[block] >= 0, storage[block] * 2, address[block] * 2 + 1)
    identified = (storage[block] >= 0) | (address[block] >= 0)
    allocations = block[kind[block] == EventKind.ALLOC]
    allocated_by[allocations] = allocations
    order = np.argsort(key[identified], kind="stable")
    sorted_block, sorted_key = block[identified][order], key[identified][order]
    before, after = sorted_block[:-1], sorted_block[1:]
    pair = (sorted_key[:-1] == sorted_key[1:]) & (kind[before] == EventKind.ALLOC) & (kind[after] == EventKind.FREE)
    allocated_by[after[pair]] = before[pair]
    freed_at[before[pair]] = after[pair]
    return allocated_by, freed_at


def _owners(
    timeline: Timeline, event: Numbers, kind: NDArray[np.int8], size: Numbers, allocated_by: Numbers
) -> tuple[Numbers, Owners]:
    """Return each event's owner, and the owners: distinct (category, label, stack) of allocations and lone frees."""
    texts = timeline.texts("label")[1]
    columns = [np.asarray(timeline.texts(name)[0])[event].astype(np.int64) for name in ("category", "label", "stack")]
    owner = np.full(len(event), NO_OWNER, np.int64)
    own = np.flatnonzero((allocated_by == np.arange(len(event))) | ((kind == EventKind.FREE) & (allocated_by < 0)))
    _, pairs = np.unique(columns[0][own] * (len(texts) + 1) + columns[1][own], return_inverse=True)
    _, first, number = np.unique(pairs * (len(texts) + 1) + columns[2][own], return_index=True, return_inverse=True)
    owner[own] = number
    freed = np.flatnonzero((kind == EventKind.FREE) & (allocated_by >= 0))
    owner[freed] = owner[allocated_by[freed]]
    category, label, stack = ([texts[index] for index in column[own[first]]] for column in columns)
    sizes = np.bincount(number, weights=size[own], minlength=len(first))
    group, groups, grouped_by = _groups(
        category, [module_of(*pair) for pair in zip(label, stack, strict=True)], sizes
    )
    owners = Owners(category=category, label=label, stack=stack, group=group, groups=groups, grouped_by=grouped_by)
    return owner, owners


def _groups(categories: list[str], modules: list[str], sizes: NDArray[Any]) -> tuple[Numbers, list[str], str]:
    """Group owners by category, or by module where no category is known."""
    grouped_by = "category" if any(categories) else "module"
    names = [name or UNKNOWN for name in (categories if any(categories) else modules)]
    if grouped_by == "module" and len(set(names)) > MOST_GROUPS:
        names = [_NUMBER.sub("*", name) for name in names]  # join all layers rather than cut most of them
    total: dict[str, float] = {}
    for name, size in zip(names, sizes, strict=True):
        total[name] = total.get(name, 0.0) + float(size)
    largest = sorted(total, key=lambda name: -total[name])
    shown = largest if len(largest) <= MOST_GROUPS else largest[: MOST_GROUPS - 1]
    if grouped_by == "category":
        shown.sort(key=lambda name: _CATEGORY_ORDER.index(name) if name in _CATEGORY_ORDER else len(_CATEGORY_ORDER))
    if len(shown) < len(largest):
        shown.append(OTHERS)
    number = {name: index for index, name in enumerate(shown)}
    return np.array([number.get(name, len(shown) - 1) for name in names], np.int64), shown, grouped_by


class Segments:
    """Reserved address ranges. A free may be of any part of them (expandable segments)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, int]] = {}  # start -> bytes, stream

    def add(self, address: int, size: int, stream: int) -> None:
        if address not in self._ranges:
            insort(self._starts, address)
        self._ranges[address] = (size, stream)

    def remove(self, address: int, size: int) -> None:
        end = address + size
        at = max(bisect_right(self._starts, address) - 1, 0)
        hit = []
        while at < len(self._starts) and self._starts[at] < end:
            hit.append(self._starts[at])
            at += 1
        for start in hit:
            length, stream = self._ranges[start]
            if start + length <= address:
                continue
            del self._ranges[start]
            del self._starts[bisect_right(self._starts, start) - 1]
            if start < address:
                self.add(start, address - start, stream)
            if start + length > end:
                self.add(end, start + length - end, stream)

    def rows(self) -> list[tuple[int, int, int]]:
        """Return (address, bytes, stream), by address."""
        return [(start, *self._ranges[start]) for start in self._starts]


def moments(events: TierEvents, positions: Sequence[int], most_blocks: int, rank: Numbers) -> list[dict[str, Any]]:
    """Describe the live blocks after each of ``positions`` (ascending; -1: before the first event).

    The ``most_blocks`` largest are listed, the others are added up by owner. ``rank`` renumbers owners.
    """
    segments = _segments_at(events, positions)
    unexplained = _unexplained_frees(events)
    return [
        _moment(events, position, rows, unexplained[unexplained <= position], most_blocks, rank)
        for position, rows in zip(positions, segments, strict=True)
    ]


def _segments_at(events: TierEvents, positions: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    rows = np.flatnonzero(np.isin(events.kind, _SEGMENT_KINDS) & (events.address >= 0))
    sizes = np.abs(events.reserved_delta[rows])
    columns = (events.kind[rows], events.address[rows], sizes, events.stream[rows])
    kinds, addresses, lengths, streams = (column.tolist() for column in columns)
    segments, at = Segments(), 0
    for upto in np.searchsorted(rows, positions, side="right").tolist():
        for index in range(at, upto):
            if kinds[index] == EventKind.SEGMENT_ALLOC:
                segments.add(addresses[index], lengths[index], streams[index])
            else:
                segments.remove(addresses[index], lengths[index])
        at = upto
        yield segments.rows()


def _moment(
    events: TierEvents,
    position: int,
    segments: list[tuple[int, int, int]],
    frees: Numbers,
    most_blocks: int,
    rank: Numbers,
) -> dict[str, Any]:
    live = events.live_at(position)
    apart = live[events.address[live] >= 0]
    if len(apart) > most_blocks:
        apart = apart[np.argsort(-events.delta[apart], kind="stable")[:most_blocks]]
    apart = apart[np.argsort(events.address[apart], kind="stable")]
    loose = np.setdiff1d(live, apart)
    owners, loose_bytes, counts = _added_up(events, np.concatenate([loose, frees]), rank)
    columns = list(zip(*segments, strict=True)) or [(), (), ()]
    return {
        "position": position,
        "event": int(events.event[position]) if position >= 0 else -1,
        "blocks": {
            "address": integers(events.address[apart]),
            "bytes": integers(events.delta[apart]),
            "owner": integers(rank[events.owner[apart]]),
        },
        "loose": {"owner": integers(owners), "bytes": integers(loose_bytes), "count": integers(counts)},
        "segments": dict(zip(("address", "bytes", "stream"), map(integers, columns), strict=True)),
    }


def _unexplained_frees(events: TierEvents) -> Numbers:
    """Return frees without an allocation: they count, or the sum would differ from allocated bytes."""
    free = events.kind == EventKind.FREE
    free[events.freed_at[events.freed_at < len(events)]] = False
    return np.flatnonzero(free)


def _added_up(events: TierEvents, rows: Numbers, rank: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the owners of ``rows``, and the bytes and the number of blocks of each."""
    owner = rank[events.owner[rows]]
    owners, number = np.unique(owner, return_inverse=True)
    sums = np.zeros(len(owners), np.int64)
    np.add.at(sums, number, events.delta[rows])
    sign = np.sign(events.delta[rows])
    counts = np.zeros(len(owners), np.int64)
    np.add.at(counts, number, sign)
    return owners, sums, counts


def ranked(events: TierEvents, position: int, most_owners: int) -> tuple[Numbers, Numbers]:
    """Return the owners to name, and each owner's number among them, or that of its group's others.

    Named are the owners of most bytes after event ``position``, then those that allocated most in all.
    """
    count = len(events.owners.category)
    moved = np.zeros(count, np.int64)
    owned = events.owner != NO_OWNER
    np.add.at(moved, events.owner[owned], np.abs(events.delta[owned]))
    live = events.live_at(position)
    now = np.zeros(count, np.int64)
    np.add.at(now, events.owner[live], events.delta[live])
    named = np.lexsort((-moved, -now))[:most_owners]
    rank = np.empty(count, np.int64)
    rank[:] = min(count, most_owners) + events.owners.group  # the others of each group follow the named
    rank[named] = np.arange(len(named))
    return named, rank
