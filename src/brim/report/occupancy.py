"""What was held at chosen moments: blocks with their addresses and owners, and the segments under them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from brim.core import EventKind
from brim.report.held import NO_OWNER, Held, Numbers
from brim.report.html.packing import integers

_SEGMENT_KINDS = (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)


class Segments:
    """Address ranges that the allocator holds. A free may take any part of what was taken (expandable segments)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._found: dict[int, tuple[int, int]] = {}  # start -> bytes, stream

    def take(self, address: int, size: int, stream: int) -> None:
        if address not in self._found:
            insort(self._starts, address)
        self._found[address] = (size, stream)

    def give_back(self, address: int, size: int) -> None:
        end = address + size
        at = max(bisect_right(self._starts, address) - 1, 0)
        hit = []
        while at < len(self._starts) and self._starts[at] < end:
            hit.append(self._starts[at])
            at += 1
        for start in hit:
            length, stream = self._found[start]
            if start + length <= address:
                continue
            del self._found[start]
            del self._starts[bisect_right(self._starts, start) - 1]
            if start < address:
                self.take(start, address - start, stream)
            if start + length > end:
                self.take(end, start + length - end, stream)

    def rows(self) -> list[tuple[int, int, int]]:
        """(address, bytes, stream), by address."""
        return [(start, *self._found[start]) for start in self._starts]


def moments(held: Held, positions: Sequence[int], most_blocks: int, rank: Numbers) -> list[dict[str, Any]]:
    """What is held after each of ``positions`` (ascending; -1: before the first event).

    The ``most_blocks`` largest blocks are kept apart, the others are added up by owner. ``rank`` renumbers owners.
    """
    segments = _segments_at(held, positions)
    unexplained = _unexplained_frees(held)
    return [
        _moment(held, position, rows, unexplained[unexplained <= position], most_blocks, rank)
        for position, rows in zip(positions, segments, strict=True)
    ]


def _segments_at(held: Held, positions: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    events = np.flatnonzero(np.isin(held.kind, _SEGMENT_KINDS) & (held.address >= 0))
    sizes = np.abs(held.reserved_delta[events])
    columns = (held.kind[events], held.address[events], sizes, held.stream[events])
    kinds, addresses, lengths, streams = (column.tolist() for column in columns)
    segments, at = Segments(), 0
    for upto in np.searchsorted(events, positions, side="right").tolist():
        for index in range(at, upto):
            if kinds[index] == EventKind.SEGMENT_ALLOC:
                segments.take(addresses[index], lengths[index], streams[index])
            else:
                segments.give_back(addresses[index], lengths[index])
        at = upto
        yield segments.rows()


def _moment(
    held: Held, position: int, segments: list[tuple[int, int, int]], frees: Numbers, most_blocks: int, rank: Numbers
) -> dict[str, Any]:
    live = held.live_at(position)
    apart = live[held.address[live] >= 0]
    if len(apart) > most_blocks:
        apart = apart[np.argsort(-held.delta[apart], kind="stable")[:most_blocks]]
    apart = apart[np.argsort(held.address[apart], kind="stable")]
    loose = np.setdiff1d(live, apart)
    owners, loose_bytes, counts = _added_up(held, np.concatenate([loose, frees]), rank)
    columns = list(zip(*segments, strict=True)) or [(), (), ()]
    return {
        "position": position,
        "event": int(held.event[position]) if position >= 0 else -1,
        "blocks": {
            "address": integers(held.address[apart]),
            "bytes": integers(held.delta[apart]),
            "owner": integers(rank[held.owner[apart]]),
        },
        "loose": {"owner": integers(owners), "bytes": integers(loose_bytes), "count": integers(counts)},
        "segments": dict(zip(("address", "bytes", "stream"), map(integers, columns), strict=True)),
    }


def _unexplained_frees(held: Held) -> Numbers:
    """Frees of what nobody was seen to take: they count, or the sum would not be what was allocated."""
    free = held.kind == EventKind.FREE
    free[held.freed_at[held.freed_at < len(held)]] = False
    return np.flatnonzero(free)


def _added_up(held: Held, events: Numbers, rank: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Owners of ``events``, the bytes and the number of blocks of each."""
    owner = rank[held.owner[events]]
    owners, number = np.unique(owner, return_inverse=True)
    sums = np.zeros(len(owners), np.int64)
    np.add.at(sums, number, held.delta[events])
    sign = np.sign(held.delta[events])
    counts = np.zeros(len(owners), np.int64)
    np.add.at(counts, number, sign)
    return owners, sums, counts


def ranked(held: Held, position: int, most_owners: int) -> tuple[Numbers, Numbers]:
    """The owners to name, and each owner's number among them; the last number is for all others of its group.

    Named are those that hold most after event ``position``, then those that took most in all.
    """
    count = len(held.owners.category)
    moved = np.zeros(count, np.int64)
    owned = held.owner != NO_OWNER
    np.add.at(moved, held.owner[owned], np.abs(held.delta[owned]))
    live = held.live_at(position)
    now = np.zeros(count, np.int64)
    np.add.at(now, held.owner[live], held.delta[live])
    named = np.lexsort((-moved, -now))[:most_owners]
    rank = np.empty(count, np.int64)
    rank[:] = min(count, most_owners) + held.owners.group  # one stand-in per group follows the named
    rank[named] = np.arange(len(named))
    return named, rank
