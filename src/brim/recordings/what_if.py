"""The replay of a recorded run under other allocator settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from brim.allocator.blocks import Block
from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import LARGE_SEGMENT_BYTES, AllocatorConfig
from brim.allocator.device_memory import SimulatedDevice
from brim.allocator.out_of_memory import OutOfMemory
from brim.recordings.device import RELEASES
from brim.recordings.history import ALLOC, OOM, Columns, DeviceHistory, contradictions
from brim.recordings.restore import restore
from brim.recordings.starting_state import State, starting_state
from brim.units import MIB

# Often advised. `best` replays each, then settings derived from the run's sizes and from the best of these.
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
MOST_SEARCHED_EVENTS = 200_000  # up to here the search has no time limit: it gives the same on any machine
SEARCH_S = 60.0  # for derived settings of a longer run; the candidates are always replayed
MOST_LIMITS = 3  # of splitting, tried at sizes of the run


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A run replayed under ``settings``.

    ``serves_failure``: None if the recorded run did not run out of memory; else True if every request up to and
    including the failed one is served within the device's memory. Requests after it are not recorded, so it does not
    follow that the run would have fitted. ``failed_bytes`` is the first request that is not served.
    """

    settings: str
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    serves_failure: bool | None
    failed_bytes: int = 0


def what_if(history: DeviceHistory, config: AllocatorConfig, *, recorded: AllocatorConfig) -> WhatIf:
    """Replay ``history`` under ``config`` from its first event on.

    The segments from before the first event stay, so that the run's own settings give the measured peak. If
    ``config`` wants the other kind of segment, blocks in use are allocated anew by their requests, without the cache:
    their sizes may include remainders of up to 1 MiB that only native segments leave (120 of 53,098 MiB in a recorded
    training step). Cached memory is released when the record does so. ``recorded`` are the run's own settings;
    ``config`` chooses among blocks of one size as they do.
    Raises FormatError for events that no allocator can have written.
    """
    config = replace(config, oldest_segment_first=recorded.oldest_segment_first)
    with contradictions(history):
        columns = Columns(history)
        start = starting_state(columns, recorded)
        capacity = capacity_bytes(columns, start)
        device = SimulatedDevice()
        allocator = CachingAllocator(config, device=device)
        if config.expandable_segments == recorded.expandable_segments:
            device.used_bytes = start.reserved_bytes
            handles = restore(allocator, start)
        else:
            handles = _lay_out(allocator, start)
        device.capacity_bytes = capacity  # after the blocks in use, which did fit
        failed = _run(history, allocator, handles)
    return WhatIf(
        settings=config.describe(),
        peak_reserved_bytes=allocator.stats.reserved_peak_bytes,
        peak_allocated_bytes=allocator.stats.allocated_peak_bytes,
        serves_failure=None if capacity is None else not failed,
        failed_bytes=failed,
    )


def _lay_out(allocator: CachingAllocator, start: State) -> dict[int, Block]:
    """Allocate all blocks in use anew, by address."""
    in_order = (start.live[address] for address in sorted(start.live))
    return {live.address: allocator.malloc(live.requested or live.size, live.stream) for live in in_order}


@dataclass(frozen=True, kw_only=True)
class Search:
    """Replayed settings, the best first, and derived settings for which there was no time."""

    replayed: tuple[WhatIf, ...]
    untried: tuple[str, ...] = ()


def best(history: DeviceHistory, *, recorded: AllocatorConfig) -> Search:
    """Search for the best settings: those that serve the failed request first, then by the peak of reserved memory.

    The candidates are replayed, then limits of splitting at the run's large sizes, then the best with rounding
    together with the best without. For more than ``MOST_SEARCHED_EVENTS`` events, these derived settings are replayed
    only while ``SEARCH_S`` allows one more that takes as long as the last.
    """
    results: dict[str, WhatIf] = {}
    untried: list[str] = []
    took_s = 0.0
    for text in CANDIDATES:
        began_s = time.monotonic()
        results[text] = what_if(history, AllocatorConfig.parse(text), recorded=recorded)
        took_s = time.monotonic() - began_s
    end_s = time.monotonic() + SEARCH_S
    for text in _derived(history, results):
        began_s = time.monotonic()
        if len(history.actions) > MOST_SEARCHED_EVENTS and began_s + took_s > end_s:
            untried.append(text)
            continue
        results[text] = what_if(history, AllocatorConfig.parse(text), recorded=recorded)
        took_s = time.monotonic() - began_s
    return Search(replayed=tuple(sorted(results.values(), key=_rank)), untried=tuple(untried))


def _derived(history: DeviceHistory, results: dict[str, WhatIf]) -> Iterator[str]:
    """Yield settings derived from the run's sizes, then from all ``results`` until then."""
    yield from (text for text in _limits(history) if text not in results)
    ranked = sorted(results, key=lambda text: _rank(results[text]))
    rounding = next((text for text in ranked if text.startswith("roundup")), "")
    other = next((text for text in ranked if not text.startswith("roundup")), "")
    both = ",".join(text for text in (other, rounding) if text)
    if both and both not in results:
        yield both


def _rank(result: WhatIf) -> tuple[bool, int, int]:
    return result.serves_failure is False, result.peak_reserved_bytes, len(result.settings)


def _limits(history: DeviceHistory) -> list[str]:
    """Return ``max_split_size_mb`` just below the sizes with the most requested bytes."""
    requested: dict[int, int] = {}
    columns = Columns(history)
    for size in columns.sizes[(columns.actions == ALLOC) & (columns.sizes > LARGE_SEGMENT_BYTES)].tolist():
        requested[size // MIB] = requested.get(size // MIB, 0) + size
    most = sorted(requested, key=lambda mib: -requested[mib])[:MOST_LIMITS]
    return [f"max_split_size_mb:{mib}" for mib in sorted(most)]


def capacity_bytes(columns: Columns, start: State) -> int | None:
    """Return the memory available to this process at the first failure: reserved plus free; None without one."""
    failures = np.flatnonzero(columns.actions == OOM)
    if not len(failures):
        return None
    first = int(failures[0])
    return start.reserved_bytes + int(columns.reserved_changes[:first].sum()) + columns.history.addresses[first]


def _run(history: DeviceHistory, allocator: CachingAllocator, handles: dict[int, Block]) -> int:
    """Replay the events up to the recorded failure or the end. Return the bytes of a request that fails, or 0."""
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
