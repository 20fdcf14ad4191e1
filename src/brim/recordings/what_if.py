"""A recorded run under other allocator settings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from brim.allocator.blocks import Block
from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import LARGE_SEGMENT_BYTES, AllocatorConfig
from brim.allocator.device_memory import SimulatedDevice
from brim.allocator.out_of_memory import OutOfMemory
from brim.recordings.device import RELEASES
from brim.recordings.history import (
    ALLOC,
    OOM,
    Columns,
    History,
    contradictions,
)
from brim.recordings.replay import recorded_config
from brim.recordings.restore import restore
from brim.recordings.starting_state import State, starting_state
from brim.units import MIB

# What people are advised to try. `best` replays each, then what the run's own sizes and the best of these suggest.
CANDIDATES = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
)
MOST_SEARCHED_EVENTS = 200_000  # of a run in which the search looks at no clock: it gives the same on any machine
SEARCH_S = 60.0  # for what a longer run's own sizes suggest; the candidates are always replayed
MOST_LIMITS = 3  # sizes of the run that are tried as a limit of splitting


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A run replayed under ``settings``.

    ``would_fit``: None if the recorded run did not run out of memory; else whether every request up to and including
    the one that failed is served within what the device had. ``failed_bytes`` is the first request that is not.
    """

    settings: str
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    peak_inactive_split_bytes: int
    would_fit: bool | None
    failed_bytes: int = 0


def what_if(history: History, config: AllocatorConfig, *, recorded: AllocatorConfig | None = None) -> WhatIf:
    """Replay ``history`` under ``config`` from its first event on.

    The segments of then are kept, so that the run's own settings give exactly what was measured. If ``config`` wants
    the other kind of segment, what was in use is laid out anew by its requests, without what was cached: laid out by
    its blocks it would keep the rests of up to 1 MiB that only native segments leave (120 of 53,098 MiB in a recorded
    training step). Cached memory is given back where the record did so. ``recorded``: the run's own,
    None: as ``recorded_config`` finds them; ``config`` chooses among blocks of one size as they do.
    Raises FormatError for events that no allocator can have written.
    """
    recorded = recorded_config(history) if recorded is None else recorded
    config = replace(config, oldest_segment_first=recorded.oldest_segment_first)
    with contradictions(history):
        start = starting_state(history, recorded)
        capacity = capacity_bytes(history, start)
        device = SimulatedDevice()
        allocator = CachingAllocator(config, device=device)
        if config.expandable_segments == recorded.expandable_segments:
            device.used_bytes = start.reserved_bytes
            handles = restore(allocator, start)
        else:
            handles = _lay_out(allocator, start)
        device.capacity_bytes = capacity  # only now: what was in use did fit
        failed = _run(history, allocator, handles)
    return WhatIf(
        settings=config.describe(),
        peak_reserved_bytes=allocator.stats.reserved_peak_bytes,
        peak_allocated_bytes=allocator.stats.allocated_peak_bytes,
        peak_inactive_split_bytes=allocator.stats.inactive_split_peak_bytes,
        would_fit=None if capacity is None else not failed,
        failed_bytes=failed,
    )


def _lay_out(allocator: CachingAllocator, start: State) -> dict[int, Block]:
    """Request everything that was in use, in the order of its addresses."""
    in_order = (start.live[address] for address in sorted(start.live))
    return {live.address: allocator.malloc(live.requested or live.size, live.stream) for live in in_order}


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings that were replayed, the best first, and those that the run suggests and that time did not allow."""

    found: tuple[WhatIf, ...]
    untried: tuple[str, ...] = ()


def best(
    history: History,
    candidates: Iterable[str] = CANDIDATES,
    *,
    recorded: AllocatorConfig | None = None,
    limit_s: float | None = None,
) -> Search:
    """A search over settings: those that fit first, then by the least reserved at the peak, the simpler first.

    The candidates are replayed, then limits of splitting at the run's own large sizes, then the best with rounding
    together with the best without. Of a run of more than ``MOST_SEARCHED_EVENTS`` these further ones are replayed as
    long as ``limit_s`` (None: ``SEARCH_S``) after the candidates allow one more, if it takes as long as the last.
    """
    recorded = recorded_config(history) if recorded is None else recorded
    results: dict[str, WhatIf] = {}
    untried: list[str] = []
    took_s = 0.0
    for text in candidates:
        began_s = time.monotonic()
        results[text] = what_if(history, AllocatorConfig.parse(text), recorded=recorded)
        took_s = time.monotonic() - began_s
    end_s = time.monotonic() + (SEARCH_S if limit_s is None else limit_s)
    for text in _suggested(history, results):
        began_s = time.monotonic()
        if len(history.actions) > MOST_SEARCHED_EVENTS and began_s + took_s > end_s:
            untried.append(text)
            continue
        results[text] = what_if(history, AllocatorConfig.parse(text), recorded=recorded)
        took_s = time.monotonic() - began_s
    return Search(found=tuple(sorted(results.values(), key=_rank)), untried=tuple(untried))


def _suggested(history: History, found: dict[str, WhatIf]) -> Iterator[str]:
    """What the run's sizes suggest, then what all that was ``found`` by then suggests."""
    yield from (text for text in _limits(history) if text not in found)
    ranked = sorted(found, key=lambda text: _rank(found[text]))
    rounding = next((text for text in ranked if text.startswith("roundup")), "")
    other = next((text for text in ranked if not text.startswith("roundup")), "")
    both = ",".join(text for text in (other, rounding) if text)
    if both and both not in found:
        yield both


def _rank(one: WhatIf) -> tuple[bool, int, int]:
    return one.would_fit is False, one.peak_reserved_bytes, len(one.settings)


def _limits(history: History) -> list[str]:
    """``max_split_size_mb`` just below sizes that the run requested most bytes with."""
    requested: dict[int, int] = {}
    columns = Columns(history)
    for size in columns.sizes[(columns.actions == ALLOC) & (columns.sizes > LARGE_SEGMENT_BYTES)].tolist():
        requested[size // MIB] = requested.get(size // MIB, 0) + size
    most = sorted(requested, key=lambda mib: -requested[mib])[:MOST_LIMITS]
    return [f"max_split_size_mb:{mib}" for mib in sorted(most)]


def capacity_bytes(history: History, start: State) -> int | None:
    """What the device could give to this process: reserved plus free at the first failure. None if nothing failed."""
    columns = Columns(history)
    failures = np.flatnonzero(columns.actions == OOM)
    if not len(failures):
        return None
    first = int(failures[0])
    return start.reserved_bytes + int(columns.reserved_changes[:first].sum()) + history.addresses[first]


def _run(history: History, allocator: CachingAllocator, handles: dict[int, Block]) -> int:
    """All events up to the recorded failure, or to the end. Returns the bytes of a request that fails, or 0."""
    released = False
    rows = zip(history.actions, history.addresses, history.sizes, history.streams, strict=True)
    for action, address, size, stream in rows:
        if action in RELEASES:
            if not released:
                allocator.empty_cache()
            released = True
            continue
        released = False
        if action in ("alloc", "oom"):
            if size <= 0:
                continue
            try:
                handles[address] = allocator.malloc(size, stream)
            except OutOfMemory:
                return size
            if action == "oom":
                return 0
        elif action == "free_completed" and address in handles:
            block = handles.pop(address)
            if block.allocated:
                allocator.free(block)
            else:
                block.event_count = 0
                allocator.complete_free(block)
    return 0
