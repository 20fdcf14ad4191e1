"""How memory grows with batch and sequence, solved from a few traces instead of one for each size.

The bytes of nearly every tensor of a step are a constant times powers of the batch and of the sequence length. One
more trace, with three times the batch and another length, tells the powers apart. Sizes of another form are a line in
the batch and a parabola in the length, through more traces. The simulated allocator does the rest. For a deep model,
one shallow trace has the sizes of all layers (``extrapolation.Template``).
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from brim.core import Storage, Trace
from brim.errors import BrimError
from brim.estimation.extrapolation import Template
from brim.estimation.simulation import Place, Replay, births_and_deaths
from brim.estimation.steps import Job
from brim.estimation.workload import Workload
from brim.predict.lowering.cuda.reductions import workspace_bytes

Row = TypeVar("Row", bound=tuple[object, ...])

_LARGEST_BATCH = 1 << 20
_MORE = 3  # times the batch: no power of two, which lengths are multiplied by
_COARSEST_LENGTH = 64  # sequence lengths to trace are multiples of this: kernels pad to 8 or 16 elements
_MANY_TOKENS = 4096  # PyTorch's embeddings sort their gradients from 3,073 on (EmbeddingBackwardKernel.cu)
_MOST_OPS = 100_000  # of a step that is traced whole: a loop over tokens, minutes for each size
_MOST_LINES = 0.01  # of all bytes: kernels' temporaries, a part that grows with the tokens and one that does not
_BATCHES = (1, 2, 4, 8)
_UPWARDS, _DOWNWARDS = (1, 2, 4, 8, 16), (8, 4, 2, 1)
_NOT_ALIKE = "the step runs other operations at other sizes"


@dataclass(frozen=True, kw_only=True)
class Point:
    """Peaks at one batch and sequence length: on this GPU, or in unlimited memory if they do not fit."""

    batch: int
    seq: int
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    fits: bool = True


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Peaks at other batches and other lengths.

    ``largest_batch``: the largest that fits (0: none; None: no GPU was given, or there is no limit).
    """

    batches: tuple[Point, ...]
    lengths: tuple[Point, ...]
    largest_batch: int | None
    why_not: str = ""  # why no other batches are estimated


NOTHING = Growth(batches=(), lengths=(), largest_batch=None)


@dataclass(frozen=True, kw_only=True)
class Tracer:
    """The GPU, and how a model is traced at other sizes: ``sample`` traces the shallow model if there is a template,
    and ``again`` is an independent copy of the job."""

    place: Place
    alloc_conf: str
    sample: Callable[[Workload, Template | None], Trace]
    again: Callable[[Workload], tuple[Job, Trace]]


def solve(tracer: Tracer, job: Job, trace: Trace) -> Growth:
    """Trace at a few sizes, and solve for the rest. A user's own step has fixed sizes, so nothing is solved."""
    if job.source.library == "python":
        return NOTHING
    ops = len(trace.ops)
    if job.workload.task == "train" and job.template is None and ops > _MOST_OPS:
        why_not = f"one step has {ops:,} operations, and three more traces would take as long each"
        return replace(NOTHING, why_not=why_not)
    solver, batch, seq = _Solver(tracer, job, trace), job.workload.batch, job.workload.seq
    growth = solver.solve() if batch > 1 or not seq else replace(NOTHING, lengths=solver.lengths(None))

    def solver_of(batch: int) -> _Solver:
        return _Solver(tracer, *tracer.again(replace(job.workload, batch=batch)))

    base = batch
    if not growth.batches:
        # At batch 1 more tensors are contiguous, and with few tokens other kernels run: larger batches
        # are solved separately.
        base = max(2 * batch, -(-_MANY_TOKENS // seq) if seq else 2)
        try:
            larger = solver_of(base)
        except BrimError as error:
            return replace(growth, why_not=error.reason or error.request)
        by_batch = larger.by_batch()
        if by_batch is None:
            return replace(growth, why_not=larger.failure or _NOT_ALIKE)
        growth = larger.growth(by_batch, growth.lengths)
        growth = replace(growth, batches=(solver.point(None), *growth.batches[:-1]))
    if growth.largest_batch is None or growth.largest_batch >= base:
        return growth
    try:
        largest = bisect.bisect_left(
            range(1, base), True, key=lambda n: not solver_of(n).replay.fits(None, tracer.place)
        )
    except BrimError:  # not every model runs with every smaller batch
        largest = None
    return replace(growth, largest_batch=largest)


class _Solver:
    def __init__(self, tracer: Tracer, job: Job, trace: Trace) -> None:
        self.tracer, self.job, self.place = tracer, job, tracer.place
        self.batch, self.seq = job.workload.batch, job.workload.seq
        self.replay = Replay(trace, tracer.alloc_conf)
        self.failure = ""  # of a trace at another size
        self._trace = trace
        self._most_tokens = job.most_tokens or 1 << 62
        self._samples: dict[tuple[int, int | None], list[int] | None] = {
            (self.batch, self.seq): numbers(trace.storages)
        }

    def solve(self) -> Growth:
        """Leave out batches or lengths at which a step runs other operations."""
        other = self._other_length()
        both = None
        if other and self.job.workload.task == "train":  # a cache of prompt and new tokens is not a pure power
            both = self._powers(self.batch * _MORE, other)
        lengths = self.lengths(both)
        by_batch = both or self.by_batch()
        return replace(NOTHING, lengths=lengths) if by_batch is None else self.growth(by_batch, lengths)

    def growth(self, by_batch: Sizes, lengths: tuple[Point, ...]) -> Growth:
        return Growth(
            batches=tuple(self.point(by_batch, batch=self.batch * factor) for factor in _BATCHES),
            lengths=lengths,
            largest_batch=self._largest(by_batch),
        )

    # -- other sizes ---------------------------------------------------------------------------------------------

    def _sample(self, batch: int, seq: int | None) -> list[int] | None:
        """The ``numbers`` of every storage at other sizes; None if the step runs other operations there."""
        if (batch, seq) not in self._samples:
            self._samples[batch, seq] = self._traced(replace(self.job.workload, batch=batch, seq=seq))
        return self._samples[batch, seq]

    def _traced(self, workload: Workload) -> list[int] | None:
        template = self.job.template
        try:
            trace = self.tracer.sample(workload, template)
        except BrimError as error:  # the requested size is estimated nevertheless
            self.failure = error.reason or error.request
            return None
        if structure(trace) != structure(self._trace if template is None else template.trace):
            return None
        return numbers(trace.storages if template is None else template.extended(trace.storages))

    def _powers(self, batch: int, seq: int | None) -> Sizes | None:
        here, there = self._sample(self.batch, self.seq), self._sample(batch, seq)
        if here is None or there is None:
            return None
        return self._bytes(powers(here, there, (self.batch, self.seq), (batch, seq)))

    def _bytes(self, sizes: Sizes | None) -> Sizes | None:
        return None if sizes is None else with_workspaces(sizes, self._trace.storages)

    def by_batch(self) -> Sizes | None:
        """Return sizes as lines in the batch, from one more trace. None if the step runs other operations there."""
        batches = (self.batch, self.batch * _MORE)
        line = polynomial(batches, [self._sample(batch, self.seq) for batch in batches])
        return None if line is None else self._bytes(lambda batch, _: line(batch))

    def _other_length(self) -> int | None:
        """Return a second sequence length to trace: a longer one if positions allow, as short ones run other
        kernels."""
        seq = self.seq
        if not seq or seq % _COARSEST_LENGTH:
            return None
        if 2 * seq <= self._most_tokens:
            return 2 * seq
        return seq // 2 if seq // 2 % _COARSEST_LENGTH == 0 else None

    def lengths(self, both: Sizes | None) -> tuple[Point, ...]:
        """Peaks at other lengths; empty if there are none, or the padding of this length is unknown."""
        seq, other = self.seq, self._other_length()
        if not seq or other is None:
            return ()
        sizes = both or self._powers(self.batch, other) or self._parabola(seq, other)
        if sizes is None:
            return ()
        if other > seq:
            lengths = [seq * factor for factor in _UPWARDS if seq * factor <= self._most_tokens]
        else:
            lengths = [seq // factor for factor in _DOWNWARDS if seq % (factor * _COARSEST_LENGTH) == 0]
        return tuple(self.point(sizes, seq=length) for length in lengths)

    def _parabola(self, seq: int, other: int) -> Sizes | None:
        third = 2 * other if other > seq else other // 2
        if self._sample(self.batch, other) is None or third % _COARSEST_LENGTH or third > self._most_tokens:
            return None
        lengths = (seq, other, third)
        parabola = polynomial(lengths, [self._sample(self.batch, length) for length in lengths])
        return None if parabola is None else self._bytes(lambda _, length: parabola(length))

    # -- peaks ---------------------------------------------------------------------------------------------------

    def point(self, sizes: Sizes | None, *, batch: int | None = None, seq: int | None = None) -> Point:
        batch, seq = batch or self.batch, seq or self.seq or 0
        bytes = None if sizes is None else sizes(batch, seq)
        peaks = self.replay.peaks(bytes, self.place, ends=True)
        fits = not peaks.out_of_memory
        if not fits:
            peaks = self.replay.peaks(bytes, self.place)
        return Point(
            batch=batch, seq=seq, allocated_bytes=peaks.allocated_bytes, reserved_bytes=peaks.reserved_bytes,
            process_bytes=peaks.reserved_bytes + self.place.context.bytes, fits=fits,
        )  # fmt: skip

    def _largest(self, sizes: Sizes) -> int | None:
        """The largest batch that fits, by the allocator; batches whose allocated bytes are too many are ruled out."""
        available, seq = self.place.available_bytes, self.seq or 0
        if available is None:
            return None

        def least_bytes(batch: int) -> int:
            return self.replay.least_bytes(sizes(batch, seq))

        if least_bytes(_LARGEST_BATCH) <= available:
            return None
        most = bisect.bisect_right(range(1, _LARGEST_BATCH), available, key=least_bytes)
        return _below(most, lambda batch: self.replay.fits(sizes(batch, seq), self.place))


def _below(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``most`` that fits, or 0: search down in growing strides, then by bisection."""
    fails, stride, guess = most + 1, 1, most
    while guess > 0 and not fits(guess):
        fails, guess, stride = guess, max(guess - stride, 0), 2 * stride
    between = range(guess + 1, fails)
    return guess + bisect.bisect_left(between, True, key=lambda size: not fits(size))


# -- laws ----------------------------------------------------------------------------------------------------------

Sizes = Callable[[int, int], list[int]]  # (batch, sequence length) -> bytes of every storage
Power = tuple[int, int, int]  # of the batch, of the length, and what is added to the length first
# Labels are shifted by one, so sizes of one token more or less than the sequence occur.
_POWERS: tuple[Power, ...] = tuple((i, j, more) for more in (1, -1, 0) for j in (2, 1, 0) for i in (1, 0))


def powers(
    here: Sequence[int], there: Sequence[int], at: tuple[int, int | None], to: tuple[int, int | None]
) -> Sizes | None:
    """The powers that explain two samples, at (batch, length) ``at`` and ``to``; None if too many sizes have no
    power.

    Sizes without a power are a line in the product of both. If both batch and length differ, their ratios must not be
    powers of one number.
    """
    start, end = (at[0], at[1] or 1), (to[0], to[1] or 1)
    by_ratio = {_ratio(power, end, start): power for power in _POWERS if start[1] > 1 or power[2] >= 0}
    exponents = [by_ratio.get(Fraction(b, a)) if a else (0, 0, 0) for a, b in zip(here, there, strict=True)]
    lines = sum(size for size, power in zip(here, exponents, strict=True) if power is None)
    if lines > _MOST_LINES * sum(here) or any(b and not a for a, b in zip(here, there, strict=True)):
        return None
    tokens, more_tokens = math.prod(start), math.prod(end) - math.prod(start)
    rows = list(zip(here, there, exponents, strict=True))

    def sizes(batch: int, seq: int) -> list[int]:
        share = Fraction(batch * (seq or 1) - tokens, more_tokens)

        def size(row: tuple[int, int, Power | None]) -> int:
            here, there, power = row
            if power is None:
                return max(math.ceil(here + (there - here) * share), 0)
            return math.ceil(here * _ratio(power, (batch, seq or 1), start))

        return _of_each(rows, size)

    return sizes


def _of_each(rows: Sequence[Row], size: Callable[[Row], int]) -> list[int]:
    """Return the size of each row. Of many thousand rows, most are equal: layers and tokens are alike."""
    sizes = {row: size(row) for row in set(rows)}
    return [sizes[row] for row in rows]


def _ratio(power: Power, to: tuple[int, int], at: tuple[int, int]) -> Fraction:
    i, j, more = power
    return Fraction(to[0], at[0]) ** i * Fraction(to[1] + more, at[1] + more) ** j


def polynomial(values: Sequence[int], samples: Sequence[Sequence[int] | None]) -> Callable[[int], list[int]] | None:
    """The polynomial through samples at several batches or several lengths (Lagrange), without rounding errors.

    None if a sample is missing.
    """
    known = [sample for sample in samples if sample is not None]
    if len(known) < len(values):
        return None
    rows = list(zip(*known, strict=True))

    def at(value: int) -> list[int]:
        weights = [
            math.prod((Fraction(value - other, own - other) for other in values if other != own), start=Fraction(1))
            for own in values
        ]
        divisor = math.lcm(*(weight.denominator for weight in weights))
        factors = [int(weight * divisor) for weight in weights]
        return _of_each(rows, lambda sizes: max(-(-sum(map(operator.mul, factors, sizes)) // divisor), 0))

    return at


def numbers(storages: Sequence[Storage]) -> list[int]:
    """The numbers that follow laws: every storage's bytes, then the shapes that reductions' workspaces depend on."""
    sizes = [0 if storage.reduction is not None else storage.bytes for storage in storages]
    for storage in storages:
        if storage.reduction is not None:
            sizes += itertools.chain(*storage.reduction.reduced, *storage.reduction.outer)
    return sizes


def with_workspaces(sizes: Sizes, storages: Sequence[Storage]) -> Sizes:
    """Bytes of every storage, from the law of their ``numbers``."""
    reductions = [(index, s.reduction) for index, s in enumerate(storages) if s.reduction is not None]

    def bytes_at(batch: int, seq: int) -> list[int]:
        numbers = sizes(batch, seq)
        bytes, shapes = numbers[: len(storages)], iter(numbers[len(storages) :])
        pairs = zip(shapes, shapes, strict=True)
        for index, reduction in reductions:
            reduced, outer = (tuple(itertools.islice(pairs, len(o))) for o in (reduction.reduced, reduction.outer))
            bytes[index] = workspace_bytes(replace(reduction, reduced=reduced, outer=outer))
        return bytes

    return bytes_at


def structure(trace: Trace) -> tuple[list[tuple[int, bool]], list[tuple[int, int, int]]]:
    """Births and deaths by the storage's number, without the clock and the order of deaths in a row; and by that
    number how many dimensions reductions have."""
    lifetimes: list[tuple[int, bool]] = []
    for born, group in itertools.groupby(sorted(births_and_deaths(trace)), key=lambda change: change[2]):
        indices = [index for _, index, _ in group]
        lifetimes += [(index, born) for index in (indices if born else sorted(indices))]
    return lifetimes, [
        (index, len(storage.reduction.reduced), len(storage.reduction.outer))
        for index, storage in enumerate(trace.storages)
        if storage.reduction is not None
    ]
