"""A snapshot without events: what was held at the one moment that it tells of, without an allocator to replay it.

Its blocks are gone through one segment at a time, so that no object is kept for a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from brim.core.hardware import VRAM
from brim.core.timeline import EventKind, Timeline
from brim.recordings import categories
from brim.recordings.history import BlockRecord, History, SegmentRecord
from brim.recordings.labels import label_of, stack_text
from brim.recordings.occupancy import (
    MOST_PINS,
    Moment,
    Pin,
    Segments,
    SegmentUse,
)
from brim.recordings.replay import Replay


class _Piece(NamedTuple):
    """A block in use, or all that lies free between two of them (``used`` None)."""

    address: int
    bytes: int
    used: BlockRecord | None


def write(history: History, timeline: Timeline, stacks: Sequence[Sequence[str]]) -> None:
    """Write what is held to ``timeline``: segments first, then blocks, each by address."""
    labels, texts = [label_of(frames) for frames in stacks], [stack_text(frames) for frames in stacks]
    of_stack = [categories.of_the_start(phase) for phase in categories.phases_of(stacks)]
    segments = sorted(history.segments, key=lambda segment: segment.address)
    for segment in segments:
        timeline.add(EventKind.SEGMENT_ALLOC, VRAM, segment.size, address=segment.address, stream=segment.stream)
    storage = -1
    for segment in segments:
        for block in segment.blocks:
            storage += block.state != "inactive"
            if block.state == "active_allocated":
                has_stack = 0 <= block.stack < len(labels)
                timeline.add(
                    EventKind.ALLOC,
                    VRAM,
                    block.size,
                    address=block.address,
                    stream=segment.stream,
                    storage=storage,
                    label=labels[block.stack] if has_stack else "",
                    stack=texts[block.stack] if has_stack else "",
                    category=of_stack[block.stack] if has_stack else "",
                )


def moment(history: History, what: str) -> Moment:
    """The one moment, called ``what``."""
    segments = Segments()
    for segment in history.segments:
        segments.add(_use(segment), [piece.bytes for piece in _pieces(segment) if piece.used is None])
    return segments.moment(what=what, event=0)


def result(history: History) -> Replay:
    """That nothing was replayed, and nothing differs."""
    reserved = sum(segment.size for segment in history.segments)
    used = sum(
        block.size for record in history.segments for block in record.blocks if block.state == "active_allocated"
    )
    blocks = sum(1 for segment in history.segments for _ in _pieces(segment))
    return Replay(
        device=history.device,
        allocations=0,
        addresses_matched=0,
        segments=0,
        segments_matched=0,
        final_blocks=blocks,
        final_blocks_matched=blocks,
        ooms=0,
        ooms_matched=0,
        peak_reserved_measured_bytes=reserved,
        peak_reserved_replayed_bytes=reserved,
        peak_allocated_replayed_bytes=used,
        inconsistent_events=0,
    )


def _pieces(segment: SegmentRecord) -> Iterator[_Piece]:
    """What it consists of. Free neighbours are one."""
    at, end = segment.address, segment.address + segment.size
    for block in segment.blocks:
        if block.state == "inactive":
            continue
        if block.address > at:
            yield _Piece(at, block.address - at, None)
        yield _Piece(block.address, block.size, block)
        at = block.address + block.size
    if at < end:
        yield _Piece(at, end - at, None)


def _use(segment: SegmentRecord) -> SegmentUse:
    used = free = largest = count = 0
    largest_used: list[_Piece] = []
    for piece in _pieces(segment):
        if piece.used is None:
            free, largest = free + piece.bytes, max(largest, piece.bytes)
            continue
        used, count = used + piece.bytes, count + 1
        largest_used = sorted([*largest_used, piece], key=lambda one: (-one.bytes, one.address))[:MOST_PINS]
    pins = (
        Pin(
            address=one.address,
            bytes=one.bytes,
            event=-1,
            stack=one.used.stack if one.used is not None else -1,
        )
        for one in largest_used
    )
    return SegmentUse(
        address=segment.address,
        bytes=used + free,
        stream=segment.stream,
        small=segment.small,
        expandable=segment.expandable,
        allocated_bytes=used,
        free_bytes=free,
        largest_free_bytes=largest,
        blocks_in_use=count,
        pins=tuple(pins),
    )
