"""A caching allocator put into a given state."""

from __future__ import annotations

from bisect import bisect_left

from brim.allocator.blocks import AddressRange, Block
from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.expandable import UNBOUNDED_BYTES
from brim.recordings.starting_state import Group, Live, Range, State


def restore(allocator: CachingAllocator, state: State) -> dict[int, Block]:
    """Give an empty allocator the segments and blocks of ``state``, and reset its peaks.

    Returns the blocks in use or waiting for another stream, by address.
    """
    handles: dict[int, Block] = {}
    addresses = sorted(state.live)
    by_group: dict[Group, list[Range]] = {}
    for address in sorted(state.ranges):
        span = state.ranges[address]
        if span.expandable:
            by_group.setdefault(span.group, []).append(span)
        else:
            _chain(allocator, pieces(span, state, addresses), span.group, None, handles)
    bases = sorted(state.lowest.values())
    for group, ranges in by_group.items():
        _restore_expandable(allocator, group, ranges, bases, state, addresses, handles)
    allocator.stats.reset_peaks()
    return handles


Piece = tuple[int, int, Live | None, bool]  # address, bytes, the block in use, whether memory is mapped


def pieces(span: Range, state: State, addresses: list[int]) -> list[Piece]:
    """Return the live blocks of a range and the free blocks between them."""
    pieces_of_range: list[Piece] = []
    at, end = span.address, span.address + span.size
    for index in range(bisect_left(addresses, at), bisect_left(addresses, end)):
        live = state.live[addresses[index]]
        if live.address > at:
            pieces_of_range.append((at, live.address - at, None, True))
        pieces_of_range.append((live.address, live.size, live, True))
        at = live.address + live.size
    if at < end:
        pieces_of_range.append((at, end - at, None, True))
    return pieces_of_range


def _restore_expandable(
    allocator: CachingAllocator,
    group: Group,
    ranges: list[Range],
    bases: list[int],
    state: State,
    addresses: list[int],
    handles: dict[int, Block],
) -> None:
    """Build a group's address space, with holes where nothing is mapped, up to the next group's."""
    base = min(state.lowest.get(group, ranges[0].address), ranges[0].address)
    after = bisect_left(bases, ranges[-1].address + 1)
    end = bases[after] if after < len(bases) else base + UNBOUNDED_BYTES
    segment = AddressRange(base, end - base, allocator.expandable.page_bytes(group[1]))
    pieces_of_group: list[Piece] = []
    at = base
    for span in ranges:
        if span.address > at:
            pieces_of_group.append((at, span.address - at, None, False))
        pieces_of_group += pieces(span, state, addresses)
        at = span.address + span.size
    if at < end:
        pieces_of_group.append((at, end - at, None, False))
    _chain(allocator, pieces_of_group, group, segment, handles)


def _chain(
    allocator: CachingAllocator,
    parts: list[Piece],
    group: Group,
    segment: AddressRange | None,
    handles: dict[int, Block],
) -> None:
    """Build the linked blocks of adjacent pieces, in use or in their pool."""
    stream, small, pool_id = group
    pool = allocator.block_pool(pool_id, small)
    before: Block | None = None
    for address, size, live, mapped in parts:
        block = Block(address, size, stream, pool, segment)
        block.mapped = mapped
        block.splice(before, None)
        before = block
        if not mapped:
            pool.insert_hole(block)
            continue
        allocator.stats.add_reserved(size)
        if live is None:
            pool.insert(block)
            continue
        allocator.mark_live(block, live.requested)
        handles[address] = block
        if live.pending:
            allocator.request_free(block)
            block.event_count = 1
