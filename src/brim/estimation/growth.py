"""How memory grows with batch and sequence, solved from a few traces instead of tried.

The size of every tensor of a step is linear in the batch and at most quadratic in the sequence length. So two traces
(three, for the sequence) of one structure give every storage's size at any other batch or length, and the simulated
allocator does the rest.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from brim.core import Trace
from brim.errors import UsageError
from brim.estimation.models import Source
from brim.estimation.simulation import Place, simulate
from brim.estimation.steps import Job
from brim.estimation.workload import Workload

Traced = Callable[[Job, tuple[int, int]], Trace]

_LARGEST_BATCH = 1 << 20
_BLOCK_BYTES = 512  # every block is a multiple of it
_COARSEST_LENGTH = 64  # sequence lengths to trace are multiples of this: kernels pad to 8 or 16 elements


@dataclass(frozen=True, kw_only=True)
class Point:
    """Peaks at one batch and sequence length."""

    batch: int
    seq: int
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """``largest_batch``: the last that fits (0: not even one; None: no GPU was named, or there is no end to it)."""

    batches: tuple[Point, ...]
    lengths: tuple[Point, ...]
    largest_batch: int | None


class Solved:
    """Traces of one structure at several values of one setting; ``at`` gives the trace at any other value."""

    def __init__(self, traces: Sequence[tuple[int, Trace]]) -> None:
        self.traces = traces

    @functools.cached_property
    def of_one_structure(self) -> bool:
        first = _structure(self.traces[0][1])
        return all(_structure(trace) == first for _, trace in self.traces[1:])

    def at(self, value: int) -> Trace:
        first = self.traces[0][1]
        sizes = zip(first.storages, self._bytes(value), strict=True)
        return replace(
            first, storages=tuple(s if s.bytes == bytes else replace(s, bytes=bytes) for s, bytes in sizes)
        )

    def least_bytes(self, value: int) -> int:
        """What is allocated at the peak, in blocks of the allocator's smallest size: no setting takes less."""
        order, signs = self._changes
        blocks = -(-np.array(self._bytes(value), dtype=np.int64) // _BLOCK_BYTES) * _BLOCK_BYTES
        return int(np.cumsum(blocks[order] * signs).max(initial=0))

    def _bytes(self, value: int) -> list[int]:
        """Every storage's size by the polynomial through the traced sizes (Lagrange), without rounding errors."""
        xs = [x for x, _ in self.traces]
        weights = [_weight(xs, index, value) for index in range(len(xs))]
        divisor = math.lcm(*(weight.denominator for weight in weights))
        factors = [int(weight * divisor) for weight in weights]
        return [
            max(-(-sum(map(operator.mul, factors, sizes)) // divisor), 0)
            for sizes in zip(*self._traced_bytes, strict=True)
        ]

    @functools.cached_property
    def _traced_bytes(self) -> list[list[int]]:
        return [[storage.bytes for storage in trace.storages] for _, trace in self.traces]

    @functools.cached_property
    def _changes(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Which storage each allocation and free is of, in order, and its sign."""
        changes = [(s.born, index, 1) for index, s in enumerate(self.traces[0][1].storages)]
        changes += [(s.died, index, -1) for index, s in enumerate(self.traces[0][1].storages) if s.died is not None]
        changes.sort()
        return np.array([index for _, index, _ in changes], dtype=np.int64), np.array([sign for *_, sign in changes])


def _weight(xs: Sequence[int], index: int, value: int) -> Fraction:
    weight = Fraction(1)
    for other, x in enumerate(xs):
        if other != index:
            weight *= Fraction(value - x, xs[index] - x)
    return weight


def _structure(trace: Trace) -> list[tuple[int, bool]]:
    """Births and deaths by the storage's number, without the clock and the order of deaths in a row."""
    changes = [(storage.born, index, True) for index, storage in enumerate(trace.storages)]
    changes += [(s.died, index, False) for index, s in enumerate(trace.storages) if s.died is not None]
    changes.sort()
    found: list[tuple[int, bool]] = []
    for born, group in itertools.groupby(changes, key=lambda change: change[2]):
        numbers = [index for _, index, _ in group]
        found += [(index, born) for index in (numbers if born else sorted(numbers))]
    return found


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how the workload runs; ``known`` is its trace."""

    source: Source
    workload: Workload
    place: Place
    capability: tuple[int, int]
    alloc_conf: str
    known: Trace


def solve(setting: Setting, traced: Traced) -> Growth:
    """Trace at a few sizes, and solve for the rest. A user's own step has its sizes inside: nothing to vary."""
    if setting.source.library == "python":
        return Growth(batches=(), lengths=(), largest_batch=None)
    return _Solver(setting, traced).solve()


class _Solver:
    def __init__(self, setting: Setting, traced: Traced) -> None:
        self.setting, self.workload, self.place = setting, setting.workload, setting.place
        self.traced = traced

    def solve(self) -> Growth:
        batch, seq = self.workload.batch, self.workload.seq
        first = max(batch, 2)  # at 1, tensors are contiguous that are not otherwise
        batches = Solved([(size, self._trace(batch=size)) for size in (first, first + 1)])
        points, largest = [], None
        if batches.of_one_structure:
            sizes = sorted({first * factor for factor in (1, 2, 4, 8)})
            points = [self._point(batches.at(size), batch=size) for size in sizes]
            largest = self._largest(batches)
        return Growth(batches=tuple(points), lengths=self._lengths(seq) if seq else (), largest_batch=largest)

    def _lengths(self, seq: int) -> tuple[Point, ...]:
        """From the length that was asked for upwards: kernels change their ways at lengths below. Where positions
        end before that, downwards."""
        if seq % _COARSEST_LENGTH == 0:
            with suppress(UsageError):  # longer than the model's table of positions
                return self._points_at((seq, 2 * seq, 4 * seq))
        unit = max(seq // (4 * _COARSEST_LENGTH), 1) * _COARSEST_LENGTH
        if 4 * unit > seq:
            return ()  # too short a sequence to tell a square from a line
        return self._points_at((unit, 2 * unit, 4 * unit))

    def _points_at(self, lengths: Sequence[int]) -> tuple[Point, ...]:
        solved = Solved([(length, self._trace(seq=length)) for length in lengths])
        if not solved.of_one_structure:
            return ()
        last = lengths[-1]
        return tuple(self._point(solved.at(length), seq=length) for length in (*lengths, 2 * last, 4 * last))

    def _trace(self, **sizes: int) -> Trace:
        workload = replace(self.workload, **sizes)  # type: ignore[arg-type]
        if workload == self.workload:
            return self.setting.known
        return self.traced(Job(self.setting.source, workload), self.setting.capability)

    def _point(self, trace: Trace, *, batch: int | None = None, seq: int | None = None) -> Point:
        peaks = simulate(trace, replace(self.place, total_bytes=None), self.setting.alloc_conf).peak_bytes
        return Point(
            batch=batch or self.workload.batch,
            seq=seq or self.workload.seq or 0,
            allocated_bytes=peaks.allocated,
            reserved_bytes=peaks.reserved,
            process_bytes=peaks.process,
        )

    def _fits(self, trace: Trace) -> bool:
        return simulate(trace, self.place, self.setting.alloc_conf).out_of_memory is None

    def _largest(self, batches: Solved) -> int | None:
        """Where allocated bytes alone no longer fit is solved; below it the allocator decides.

        The answer is traced itself before it is given.
        """
        available = self.place.available_bytes
        if available is None:
            return None
        if batches.least_bytes(_LARGEST_BATCH) <= available:
            return None
        most = bisect.bisect_right(range(2, _LARGEST_BATCH), available, key=batches.least_bytes) + 1
        fits = self._below(batches, most)
        while fits > 1 and not self._fits(self._trace(batch=fits)):
            fits -= 1
        return fits if fits > 1 else int(self._fits(self._trace(batch=1)))

    def _below(self, batches: Solved, most: int) -> int:
        """The largest batch up to ``most`` that fits, or 1: down in growing strides, then by halves."""
        fails, stride = most + 1, 1
        fits = most
        while fits > 1 and not self._fits(batches.at(fits)):
            fails, fits, stride = fits, max(fits - stride, 1), 2 * stride
        while fits > 1 and fails - fits > 1:
            middle = (fits + fails) // 2
            if self._fits(batches.at(middle)):
                fits = middle
            else:
                fails = middle
        return fits
