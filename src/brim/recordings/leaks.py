"""Leaks in a recording: blocks that outlive the steps in which the same lines allocated them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from brim.allocator.config import MIN_BLOCK_BYTES
from brim.core.leak import LEAST_STEPS, SETTLING_STEPS, Allocation, Leak, find_leak, full_step
from brim.recordings.history import ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM, OTHER, Columns, DeviceHistory
from brim.recordings.stacks import label_of

# Frames of packages, of PyTorch, and of its compiler's output (named by a hash).
_OF_A_PACKAGE = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|/torch/|<frozen |/c[a-z2-7]{40,}\.py:")
_BACKWARD = re.compile(r"^_make_grads at \S*torch/autograd/__init__\.py")  # once a backward pass, before its kernels
BACKWARD_PASS = "backward pass"


def recorded_leak(
    history: DeviceHistory,
    stacks: Sequence[Sequence[str]],
    *,
    events_after_steps: Sequence[int] | None = None,
    available_bytes: int | None = None,
) -> Leak | None:
    """Return the leak of a recording; None without one, or if steps cannot be distinguished.

    Args:
        history: The recording of one device.
        stacks: The frames that its events number, the innermost first.
        events_after_steps: Number of allocations and requests to free after each step's end. None: a step is a
            backward pass.
        available_bytes: The card's memory available to the allocator. None: not known.
    """
    columns = Columns(history)
    if events_after_steps is None:
        ends = _ends_of_backward_passes(columns, stacks)
    else:
        ends = _ends(columns, events_after_steps)
    if len(ends) < LEAST_STEPS:
        return None
    block_bytes = -(-columns.sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    in_use = _in_use_bytes(columns, block_bytes)
    leak = find_leak(_lasting_blocks(columns, block_bytes, ends, stacks), in_use[ends - 1].tolist())
    if leak is None:
        return None
    if events_after_steps is None:
        leak = replace(leak, unit=BACKWARD_PASS)
    if columns.actions[-1] == OOM:
        return replace(leak, full_step=leak.steps + 1)
    if available_bytes is None:
        return leak
    reserved = np.cumsum(columns.reserved_changes)[ends - 1].tolist()
    return replace(leak, full_step=full_step(leak, available_bytes, int(in_use[ends[-2] :].max()), reserved))


def _ends(columns: Columns, events_after_steps: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of events until each step's end; none if the recording misses the first step."""
    counted = np.flatnonzero((columns.actions == ALLOC) | (columns.actions == FREE_REQUESTED))
    places = len(counted) - np.asarray(events_after_steps, np.int64)
    if not len(places) or places[0] < 0 or (np.diff(places) < 0).any() or places[-1] > len(counted):
        return np.zeros(0, np.int64)
    ends: NDArray[np.int64] = np.append(counted, len(columns.actions))[places]
    return ends  # frees after the last allocation belong to it


def _ends_of_backward_passes(columns: Columns, stacks: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return the number of events until each backward pass, of the line that starts most of them."""
    lines: dict[Sequence[str], int] = {}  # equal stacks may have several numbers
    line_of = np.array(
        [
            lines.setdefault(tuple(frames), len(lines)) if any(map(_BACKWARD.search, frames)) else -1
            for frames in stacks
        ]
        + [-1]
    )
    known = (columns.stacks >= 0) & (columns.stacks < len(stacks))
    begun_by = np.where(columns.actions == ALLOC, line_of[np.where(known, columns.stacks, -1)], -1)
    events = np.flatnonzero(begun_by >= 0)
    if not len(events):
        return events
    most = np.argmax(np.bincount(begun_by[events]))
    return np.flatnonzero(begun_by == most)


def _lasting_blocks(
    columns: Columns, block_bytes: NDArray[np.int64], ends: NDArray[np.int64], stacks: Sequence[Sequence[str]]
) -> list[Allocation]:
    """Return the blocks that outlive the steps after their own."""
    never = len(columns.actions)
    allocations, following = columns.lifetimes()
    is_freed = np.append(columns.actions, OTHER)[following] == FREE_COMPLETED
    freed_at = np.where(is_freed, following, never)
    born = np.searchsorted(ends, allocations, side="right") + 1
    died = np.searchsorted(ends, freed_at, side="right") + 1
    lasting = (died > born + SETTLING_STEPS) & (block_bytes[allocations] > 0)
    lines: dict[int, tuple[str, tuple[str, ...]]] = {}
    blocks = []
    for event, step, end in zip(
        allocations[lasting].tolist(), born[lasting].tolist(), died[lasting].tolist(), strict=True
    ):
        stack = int(columns.stacks[event])
        if stack not in lines:
            frames = stacks[stack] if 0 <= stack < len(stacks) else ()
            lines[stack] = program_line(frames), tuple(filter(_is_of_the_program, frames))
        line, places = lines[stack]
        size, freed_in = int(block_bytes[event]), None if end > len(ends) else end
        blocks.append(Allocation(bytes=size, line=line, born=step, died=freed_in, places=places))
    return blocks


def _in_use_bytes(columns: Columns, block_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes in use after each event, of the recorded allocations."""
    changes = (columns.actions == ALLOC).astype(np.int8) - (columns.actions == FREE_COMPLETED).astype(np.int8)
    return np.asarray(np.cumsum(block_bytes * changes), np.int64)


def program_line(frames: Sequence[str]) -> str:
    """Return the innermost frame of the program itself, not of a package; else the stack's label."""
    return next(filter(_is_of_the_program, frames), "") or label_of(frames)


def _is_of_the_program(frame: str) -> bool:
    return ".py:" in frame and not _OF_A_PACKAGE.search(frame)
