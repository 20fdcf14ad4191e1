"""Find memory leaks: growth per step, the lines that allocate it, and the step in which memory is full.

A leak consists of allocations that outlive their step, come from the same line step after step up to the last, and
are never freed. This distinguishes it from a warm-up, a bounded cache and inputs of varying length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SETTLING_STEPS = 2  # steps after which a loop has reassigned its variables: an allocation still in use then stays
LEAST_STEPS = 7  # with fewer steps, growth may still be a warm-up
LEAST_GROWTHS = 3  # steps of the later half that have to add memory
MOST_STEPS = 50  # steps to run or trace until growth ends
NEGLIGIBLE_BYTES = 16 << 10  # ignored growth per step: a logged loss takes 512 bytes
FORESEEN_STEPS = 100_000  # a leak that fills the GPU later than this is harmless
_MOST_FREED = 0.1  # share of the growth that other allocations may free meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """An allocation and the steps of its life, which count from 1.

    Attributes:
        bytes: Its size.
        line: The line of the program that allocated it; ``""``: not known.
        born: The step in which it was allocated; 0: before the first.
        died: The step in which it was freed; None: never.
        places: That line and its callers, with full paths, as far as known.
    """

    bytes: int
    line: str
    born: int
    died: int | None = None
    places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakingLine:
    """A line of a program, and the bytes that it adds with each step.

    Attributes:
        line: File and number; ``""``: not known, as in a backward pass.
        bytes_per_step: The bytes of its allocations that stay in use, per step.
        places: The line and its callers, innermost first, with full paths.
    """

    line: str
    bytes_per_step: int
    places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Memory that grows with every step until none is left.

    Attributes:
        bytes_per_step: The growth of memory in use per step.
        lines: The lines that allocate the growth, largest first.
        steps: The number of steps observed.
        since_step: The first step of the observed growth.
        full_step: The step in which memory is full at this rate; None if its size is not known.
        unit: The meaning of a step: ``"step"`` of an optimizer, or ``"backward pass"``.
    """

    bytes_per_step: int
    lines: tuple[LeakingLine, ...]
    steps: int
    since_step: int
    full_step: int | None = None
    unit: str = "step"

    @property
    def fills_memory(self) -> bool:
        """True if memory will be full within ``FORESEEN_STEPS``."""
        return self.full_step is None or self.full_step - self.steps <= FORESEEN_STEPS


def find_leak(allocations: Iterable[Allocation], in_use_bytes: Sequence[int]) -> Leak | None:
    """Return the leak that steps show; None if memory in use stops growing, or too few steps were observed.

    Args:
        allocations: The allocations. Those freed within ``SETTLING_STEPS`` of their step may be left out.
        in_use_bytes: The bytes in use at the end of each step, up to a constant.
    """
    steps = len(in_use_bytes)
    if steps < LEAST_STEPS:
        return None
    lasting = [
        allocation
        for allocation in allocations
        if allocation.born > 0 and (allocation.died is None or allocation.died > allocation.born + SETTLING_STEPS)
    ]
    first = max(steps // 2, LEAST_STEPS - LEAST_GROWTHS) + 1
    window = range(first, steps + 1)
    growth = dict.fromkeys(window, 0)
    freed_bytes = 0
    for allocation in lasting:
        if allocation.born + SETTLING_STEPS in growth:
            growth[allocation.born + SETTLING_STEPS] += allocation.bytes
        if allocation.died in growth:
            growth[allocation.died] -= allocation.bytes
            freed_bytes += allocation.bytes
    if not _goes_on(list(growth.values()), _quiet_steps(in_use_bytes)) or freed_bytes > _MOST_FREED * sum(
        growth.values()
    ):
        return None
    lines = _lines(lasting, window)
    bytes_per_step = sum(line.bytes_per_step for line in lines)
    if not bytes_per_step:
        return None
    return Leak(bytes_per_step=bytes_per_step, lines=lines, steps=steps, since_step=first - SETTLING_STEPS)


def _goes_on(growth: Sequence[int], quiet_steps: int) -> bool:
    """Return whether memory grows through all of these steps, in each or at regular intervals.

    ``quiet_steps``: the number of last steps without growth.
    """
    grown = [index for index, added in enumerate(growth) if added > 0]
    if len(grown) < LEAST_GROWTHS:
        return False
    longest = max(after - before for before, after in pairwise(grown))
    return grown[0] < longest and len(growth) - grown[-1] <= longest and quiet_steps < longest


def _quiet_steps(in_use_bytes: Sequence[int]) -> int:
    """Return the number of last steps that ended with the same bytes in use as the step before."""
    changes = (abs(after - before) for before, after in pairwise(reversed(in_use_bytes)))
    return next((index for index, change in enumerate(changes) if change > NEGLIGIBLE_BYTES), len(in_use_bytes))


def _lines(allocations: Iterable[Allocation], window: range) -> tuple[LeakingLine, ...]:
    """Return the lines whose allocations of several steps stay in use."""
    bytes_by_line: dict[str, int] = {}
    steps_by_line: dict[str, set[int]] = {}
    places_by_line: dict[str, tuple[str, ...]] = {}
    for allocation in allocations:
        if allocation.born + SETTLING_STEPS in window and (allocation.died is None or allocation.died > window[-1]):
            bytes_by_line[allocation.line] = bytes_by_line.get(allocation.line, 0) + allocation.bytes
            steps_by_line.setdefault(allocation.line, set()).add(allocation.born)
            places_by_line.setdefault(allocation.line, allocation.places)
    lines = [
        LeakingLine(line=line, bytes_per_step=size // len(window), places=places_by_line[line])
        for line, size in bytes_by_line.items()
        if len(steps_by_line[line]) >= LEAST_GROWTHS
    ]
    return tuple(sorted(lines, key=lambda line: (-line.bytes_per_step, line.line)))


def full_step(leak: Leak, available_bytes: int, allocated_bytes: int, reserved_bytes: Sequence[int]) -> int:
    """Return the step in which the allocator has taken all of ``available_bytes`` at the rate of ``leak``.

    Args:
        leak: The leak.
        available_bytes: The memory of the GPU that the allocator can take.
        allocated_bytes: The peak of bytes in use up to the last step.
        reserved_bytes: The reserved bytes at the end of each step.
    """
    before = reserved_bytes[leak.since_step + SETTLING_STEPS - 2]
    reserved_per_step = (reserved_bytes[-1] - before) / (leak.steps - leak.since_step - SETTLING_STEPS + 1)
    if reserved_per_step < leak.bytes_per_step / 2:  # the leak still fills cached memory of earlier peaks
        return leak.steps + 1 + max((available_bytes - allocated_bytes) // leak.bytes_per_step, 0)
    left = max(available_bytes - reserved_bytes[-1], 0)
    return leak.steps + 1 + math.floor(left / max(reserved_per_step, leak.bytes_per_step))


def settled(in_use_bytes: Sequence[int], *, steps: int = 1) -> bool | None:
    """Return whether memory in use at the end of each step has stopped growing; None if only allocations can tell.

    It has if the last ``steps`` ended with the same bytes, or ``LEAST_GROWTHS`` if an earlier step added some, which
    may happen every other step. Bytes that go up and down come from inputs of different lengths.
    """
    quiet = _quiet_steps(in_use_bytes)
    if quiet == len(in_use_bytes):
        return quiet > steps
    if quiet >= max(steps, LEAST_GROWTHS):
        return True
    is_new_peak = in_use_bytes[-1] > max(in_use_bytes[:-1])
    return False if quiet or is_new_peak or len(in_use_bytes) < LEAST_STEPS else None
