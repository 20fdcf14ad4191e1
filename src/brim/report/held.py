"""Who holds what, when: a tier's memory events as numpy columns, each free joined to its allocation.

Five million events are never made into objects: a column is 40 MB, and there are eight of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core import EventKind, Timeline

Numbers = NDArray[np.int64]
NO_OWNER = -1
MOST_GROUPS = 10
OTHERS = "others"
UNKNOWN = "not known"

# The bottom of a stacked picture is what stays, the top what comes and goes.
_CATEGORY_ORDER = (
    "parameter", "buffer", "gradient", "optimizer_state", "kv_cache", "input", "activation", "workspace", "temporary",
)  # fmt: skip
_LONGEST_S = 4e9  # in nanoseconds it is still a whole number of 64 bits
_NUMBER = re.compile(r"(?<=[. ])\d+(?=\.|$)")  # of a layer, a ring's slot
_MEMORY = (EventKind.ALLOC, EventKind.FREE, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE, EventKind.OOM)


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Distinct askers for memory, as texts; equal length. ``group`` points into ``groups``."""

    category: list[str]
    label: list[str]
    stack: list[str]
    group: Numbers
    groups: list[str]
    grouped_by: str  # "category" or "module"


@dataclass(frozen=True, kw_only=True)
class Held:
    """The memory events of one tier, in order; all arrays have one length.

    ``delta`` is what an event adds to allocated bytes, ``reserved_delta`` to reserved ones. ``freed_at`` is the
    position of an allocation's free (the number of events: never). ``owner`` is an allocation's, also at its free.
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
        """Positions of the allocations that are held after event ``position``; -1 is before the first."""
        allocations = np.flatnonzero(self.kind[: position + 1] == EventKind.ALLOC)
        return allocations[self.freed_at[allocations] > position]


def module_of(label: str, stack: str) -> str:
    """The module path of a prediction; of a measured run its label, or who asked."""
    if is_module_path(stack):
        return stack
    return label or stack.partition("\n")[0]


def is_module_path(stack: str) -> bool:
    return bool(stack) and not any(character in stack for character in " \n\t:/")


def frames_of(stack: str) -> list[str]:
    """Stack frames, the innermost first; of a module path, the path and all that it lies in."""
    if not is_module_path(stack):
        return [line for line in stack.split("\n") if line.strip()]
    parts = stack.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def times_ns(timeline: Timeline) -> Numbers | None:
    """Each event's begin in nanoseconds from the first; None where the timeline tells no times."""
    seconds = np.asarray(timeline.column("time_s"))
    if not len(seconds) or not np.isfinite(seconds).all() or seconds.max() == seconds.min():
        return None
    first = seconds.min()
    return _nanoseconds(np.minimum(seconds, first + _LONGEST_S) - first)


def durations_ns(timeline: Timeline) -> Numbers:
    """How long each event took; 0 for values that are not durations."""
    seconds = np.asarray(timeline.column("duration_s"))
    return _nanoseconds(np.where(np.isfinite(seconds), seconds, 0.0))


def _nanoseconds(seconds: NDArray[np.float64]) -> Numbers:
    return np.asarray(np.rint(np.clip(seconds, 0.0, _LONGEST_S) * 1e9), np.int64)


def tiers_of(timeline: Timeline) -> list[str]:
    """Tiers in which memory was taken: the compute tier first."""
    kinds = np.asarray(timeline.column("kind"))
    indices, names = timeline.texts("tier")
    events = np.isin(kinds, [EventKind.ALLOC, EventKind.SEGMENT_ALLOC, EventKind.OOM])
    tiers = [names[index] for index in np.unique(np.asarray(indices)[events])]
    return sorted(tiers, key=lambda tier: (tier != timeline.peak_bytes.tier, tier))


def held(timeline: Timeline, tier: str) -> Held:
    """The memory events of ``tier``. Raises nothing: what contradicts itself is counted as it is written."""
    kinds, indices = np.asarray(timeline.column("kind")), np.asarray(timeline.texts("tier")[0])
    tier_index = timeline.texts("tier")[1].index(tier)
    event = np.flatnonzero((indices == tier_index) & np.isin(kinds, _MEMORY))
    kind, size = kinds[event], np.asarray(timeline.column("bytes"))[event]
    address = np.asarray(timeline.column("address"))[event]
    made_by, freed_at = _joined(kind, np.asarray(timeline.column("storage"))[event], address)
    owner, owners = _owners(timeline, event, kind, size, made_by)
    times = times_ns(timeline)
    return Held(
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
    """For each event the position of its allocation (its own; -1: none known), and of its free (length: never).

    Events of one storage, or else of one address, follow each other; a free belongs to the allocation before it.
    """
    count = len(kind)
    made_by, freed_at = np.full(count, -1, np.int64), np.full(count, count, np.int64)
    block = np.flatnonzero((kind == EventKind.ALLOC) | (kind == EventKind.FREE))
    key = np.where(storage[block] >= 0, storage[block] * 2, address[block] * 2 + 1)
    identified = (storage[block] >= 0) | (address[block] >= 0)
    allocations = block[kind[block] == EventKind.ALLOC]
    made_by[allocations] = allocations
    order = np.argsort(key[identified], kind="stable")
    sorted_block, sorted_key = block[identified][order], key[identified][order]
    before, after = sorted_block[:-1], sorted_block[1:]
    pair = (sorted_key[:-1] == sorted_key[1:]) & (kind[before] == EventKind.ALLOC) & (kind[after] == EventKind.FREE)
    made_by[after[pair]] = before[pair]
    freed_at[before[pair]] = after[pair]
    return made_by, freed_at


def _owners(
    timeline: Timeline, event: Numbers, kind: NDArray[np.int8], size: Numbers, made_by: Numbers
) -> tuple[Numbers, Owners]:
    """Each event's owner, and the owners: distinct (category, label, stack) of allocations and unexplained frees."""
    texts = timeline.texts("label")[1]
    columns = [np.asarray(timeline.texts(name)[0])[event].astype(np.int64) for name in ("category", "label", "stack")]
    owner = np.full(len(event), NO_OWNER, np.int64)
    own = np.flatnonzero((made_by == np.arange(len(event))) | ((kind == EventKind.FREE) & (made_by < 0)))
    _, pairs = np.unique(columns[0][own] * (len(texts) + 1) + columns[1][own], return_inverse=True)
    _, first, number = np.unique(pairs * (len(texts) + 1) + columns[2][own], return_index=True, return_inverse=True)
    owner[own] = number
    freed = np.flatnonzero((kind == EventKind.FREE) & (made_by >= 0))
    owner[freed] = owner[made_by[freed]]
    category, label, stack = ([texts[index] for index in column[own[first]]] for column in columns)
    sizes = np.bincount(number, weights=size[own], minlength=len(first))
    group, groups, grouped_by = _groups(
        category, [module_of(*pair) for pair in zip(label, stack, strict=True)], sizes
    )
    owners = Owners(category=category, label=label, stack=stack, group=group, groups=groups, grouped_by=grouped_by)
    return owner, owners


def _groups(categories: list[str], modules: list[str], taken: NDArray[Any]) -> tuple[Numbers, list[str], str]:
    """What a picture is stacked by: categories, or modules where no category is known."""
    grouped_by = "category" if any(categories) else "module"
    names = [name or UNKNOWN for name in (categories if any(categories) else modules)]
    if grouped_by == "module" and len(set(names)) > MOST_GROUPS:
        names = [_NUMBER.sub("*", name) for name in names]  # all layers are one group before most of them are others
    total: dict[str, float] = {}
    for name, size in zip(names, taken, strict=True):
        total[name] = total.get(name, 0.0) + float(size)
    largest = sorted(total, key=lambda name: -total[name])
    kept = largest if len(largest) <= MOST_GROUPS else largest[: MOST_GROUPS - 1]
    if grouped_by == "category":
        kept.sort(key=lambda name: _CATEGORY_ORDER.index(name) if name in _CATEGORY_ORDER else len(_CATEGORY_ORDER))
    if len(kept) < len(largest):
        kept.append(OTHERS)
    number = {name: index for index, name in enumerate(kept)}
    return np.array([number.get(name, len(kept) - 1) for name in names], np.int64), kept, grouped_by
