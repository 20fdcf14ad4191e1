"""How memory grows with batch and sequence, solved from a few traces instead of tried.

The size of every tensor of a step is linear in the batch and at most quadratic in the sequence length. So two traces
(three, for the sequence) of one structure give every storage's size at any other batch or length, and the simulated
allocator does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from brim.core import Trace
from brim.estimation.models import Source
from brim.estimation.simulation import Place, simulate
from brim.estimation.steps import Job
from brim.estimation.workload import Workload

Traced = Callable[[Job, tuple[int, int]], Trace]

_LARGEST_BATCH = 1 << 20
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

    @property
    def of_one_structure(self) -> bool:
        first = self.traces[0][1]
        return all(_structure(trace) == _structure(first) for _, trace in self.traces[1:])

    def at(self, value: int) -> Trace:
        """Every storage's size by the polynomial through the traced sizes (Lagrange), in exact fractions."""
        xs = [x for x, _ in self.traces]
        weights = [_weight(xs, index, value) for index in range(len(xs))]
        first = self.traces[0][1]
        columns = zip(*(trace.storages for _, trace in self.traces), strict=True)
        storages = []
        for same in columns:
            if all(storage.bytes == same[0].bytes for storage in same):
                storages.append(same[0])
                continue
            size = sum((weight * storage.bytes for weight, storage in zip(weights, same, strict=True)), Fraction(0))
            storages.append(replace(same[0], bytes=max(-(-size.numerator // size.denominator), 0)))
        return replace(first, storages=tuple(storages))


def _weight(xs: Sequence[int], index: int, value: int) -> Fraction:
    weight = Fraction(1)
    for other, x in enumerate(xs):
        if other != index:
            weight *= Fraction(value - x, xs[index] - x)
    return weight


def _structure(trace: Trace) -> list[tuple[int, int | None]]:
    return [(storage.born, storage.died) for storage in trace.storages]


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
        unit = max(seq // (4 * _COARSEST_LENGTH), 1) * _COARSEST_LENGTH
        if 4 * unit > max(seq, 4 * _COARSEST_LENGTH):
            return ()
        lengths = [length for length in (unit, 2 * unit, 4 * unit) if length <= seq]
        if len(lengths) < 3:
            return ()  # too short a sequence to tell a square from a line
        solved = Solved([(length, self._trace(seq=length)) for length in lengths])
        if not solved.of_one_structure:
            return ()
        return tuple(self._point(solved.at(length), seq=length) for length in (*lengths, 8 * unit, 16 * unit))

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
        """Solved by halving between what fits and what does not; the answer is traced itself before it is given."""
        if self.place.total_bytes is None:
            return None
        fits, fails = 1, 2
        if not self._fits(batches.at(2)) and not self._fits(self._trace(batch=1)):
            return 0
        while self._fits(batches.at(fails)):
            fits, fails = fails, 2 * fails
            if fails > _LARGEST_BATCH:
                return None
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._fits(batches.at(middle)):
                fits = middle
            else:
                fails = middle
        while fits > 1 and not self._fits(self._trace(batch=fits)):
            fits -= 1
        return fits
