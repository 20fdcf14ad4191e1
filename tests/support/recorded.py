"""What a run recorded, in a form in which a prediction of it can be compared."""

from __future__ import annotations

from brim.core import EventKind, Timeline
from brim.memory.tiers import Memory

Events = dict[str, list[tuple[str, str, int, str]]]


def lanes(timeline: Timeline) -> Events:
    """Events by lane: allocations of each tier in order, copies of each way in order.

    Lanes run beside one another, so there is no order between them. The bounce buffer is made by the lane that reads.
    """
    found: Events = {}
    for e in timeline:
        if e.kind is EventKind.IDLE:
            continue  # how long compute waited differs from run to run
        lane = f"{e.source} -> {e.tier}" if e.kind is EventKind.COPY else f"{e.tier} pool"
        if e.label == "bounce buffer":
            lane += ", bounce"
        if e.label.endswith(", activations"):  # they go beside the queue of blocks
            lane += ", activations"
        found.setdefault(lane, []).append((e.kind.name, e.tier, e.bytes, e.label))
    return found


def settled(memory: Memory) -> None:
    """Wait for everything that was asked of the lanes."""
    for lane in (memory.engine._disk, memory.engine._copy):  # type: ignore[attr-defined]
        lane.submit(lambda: None).wait()


def peaks(memory: Memory) -> dict[str, int]:
    for pool in (memory.compute, memory.ram):
        assert pool.peak_bytes <= pool.limit_bytes
    return {pool.tier: pool.peak_bytes for pool in (memory.compute, memory.ram)}
