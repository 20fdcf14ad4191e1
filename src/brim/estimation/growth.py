"""How memory grows with batch and sequence, solved from a few traces instead of tried.

The size of nearly every tensor of a step is a constant times powers of the batch and of the sequence length. One more
trace, with three times the batch and another length, tells the powers apart (``sizes``). Where a size is of another
form, the batch's straight line and the length's parabola are drawn through more traces. The simulated allocator does
the rest. Of a deep model, one shallow trace tells the sizes of all layers (``layer_extrapolation.Template``).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

from brim.core import Trace
from brim.errors import BrimError
from brim.estimation.layer_extrapolation import Template
from brim.estimation.models import Source
from brim.estimation.simulation import Place, Replay
from brim.estimation.sizes import Powers, Sizes, Through, WithWorkspaces, numbers, powers, structure
from brim.estimation.workload import Workload

_LARGEST_BATCH = 1 << 20
_MORE = 3  # times the batch: no power of two, which lengths are multiplied by
_COARSEST_LENGTH = 64  # sequence lengths to trace are multiples of this: kernels pad to 8 or 16 elements
_MANY_TOKENS = 4096  # PyTorch's embeddings sort their gradients from 3,073 on (EmbeddingBackwardKernel.cu)
_MOST_OPS = 100_000  # of a step that is traced whole: a loop over tokens, minutes for each size
_BATCHES = (1, 2, 4, 8)
_UPWARDS, _DOWNWARDS = (1, 2, 4, 8, 16), (8, 4, 2, 1)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Peaks at one batch and sequence length: on this GPU, or where they do not fit, in memory without end."""

    batch: int
    seq: int
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    fits: bool = True


@dataclass(frozen=True, kw_only=True)
class Growth:
    """``largest_batch``: the last that fits (0: not even one; None: no GPU was named, or there is no limit)."""

    batches: tuple[Point, ...]
    lengths: tuple[Point, ...]
    largest_batch: int | None
    why_not: str = ""  # why no other batches are estimated


NOT_ALIKE = "the step does other things at other sizes"

NOTHING = Growth(batches=(), lengths=(), largest_batch=None)


@dataclass(frozen=True, kw_only=True)
class Known:
    """One size that was traced. ``template``: the shallow trace that a deep one was made from."""

    workload: Workload
    trace: Trace
    template: Template | None
    most_tokens: int | None  # where the model's positions end


Tracer = Callable[[Workload, Template | None], Trace]  # with a template, of the shallow model
Again = Callable[[Workload], Known]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how the workload runs, and how other sizes of it are traced."""

    source: Source
    place: Place
    alloc_conf: str
    sample: Tracer
    again: Again


def solve(setting: Setting, known: Known) -> Growth:
    """Trace at a few sizes, and solve for the rest. A user's own step has its sizes inside: nothing to vary."""
    if setting.source.library == "python":
        return NOTHING
    ops = len(known.trace.ops)
    if known.workload.task == "train" and known.template is None and ops > _MOST_OPS:
        return replace(
            NOTHING, why_not=f"one step has {ops:,} operations, and three more traces would take as long each"
        )
    solver, batch, seq = _Solver(setting, known), known.workload.batch, known.workload.seq
    if batch > 1 or not seq:
        growth = solver.solve()
        if growth.batches:
            return growth
    else:
        growth = replace(NOTHING, lengths=solver.lengths(None))
    # At 1, tensors are contiguous that are not otherwise, and with few tokens kernels have other ways: larger batches
    # are a family of their own.
    base = max(2 * batch, -(-_MANY_TOKENS // seq) if seq else 2)
    try:
        more = _Solver(setting, setting.again(replace(known.workload, batch=base)))
    except BrimError as error:
        return replace(growth, why_not=error.found or error.asked)
    by_batch = more.by_batch()
    if by_batch is None:
        return replace(growth, why_not=more.failure or NOT_ALIKE)
    larger = more.growth(by_batch, growth.lengths)
    if larger.largest_batch is not None and larger.largest_batch < base:
        larger = replace(larger, largest_batch=batch if solver.replay.fits(None, setting.place) else None)
        if larger.largest_batch is None and batch == 1:
            larger = replace(larger, largest_batch=0)
    return replace(larger, batches=(solver.point(None), *larger.batches[:-1]))


class _Solver:
    def __init__(self, setting: Setting, known: Known) -> None:
        self.setting, self.known, self.place = setting, known, setting.place
        self.workload = known.workload
        self.batch, self.seq = known.workload.batch, known.workload.seq
        self.replay = Replay(known.trace, setting.alloc_conf)
        self.numbers = numbers(known.trace.storages)
        self.failure = ""  # of a trace at another size

    def solve(self) -> Growth:
        """Where a step does other things at another batch, or at another length, that is left out."""
        other = self._other_length()
        both = None
        if other and self.workload.task == "train":  # a cache of prompt and new tokens is not a pure power
            both = self._powers(self.batch * _MORE, other)
        lengths = self.lengths(both)
        by_batch: Sizes | None = both or self.by_batch()
        return replace(NOTHING, lengths=lengths) if by_batch is None else self.growth(by_batch, lengths)

    def growth(self, by_batch: Sizes, lengths: tuple[Point, ...]) -> Growth:
        return Growth(
            batches=tuple(self.point(by_batch, batch=self.batch * factor) for factor in _BATCHES),
            lengths=lengths,
            largest_batch=self._largest(by_batch),
        )

    # -- other sizes ---------------------------------------------------------------------------------------------

    def _sample(self, batch: int, seq: int | None) -> list[int] | None:
        """The ``numbers`` of every storage at other sizes; None where the step does other things there."""
        template = self.known.template
        try:
            trace = self.setting.sample(replace(self.workload, batch=batch, seq=seq), template)
        except BrimError as error:  # the size that was asked for is estimated all the same
            self.failure = error.found or error.asked
            return None
        like = template.trace if template is not None else self.known.trace
        if structure(trace) != structure(like):
            return None
        if template is None:
            return numbers(trace.storages)
        return numbers([trace.storages[position] for position in template.storages])

    def _powers(self, batch: int, seq: int | None) -> Powers | None:
        sample = self._sample(batch, seq)
        return None if sample is None else powers(self.numbers, sample, (self.batch, self.seq), (batch, seq))

    def by_batch(self) -> Sizes | None:
        """From one more trace: every size is a straight line in the batch. None where the step does other things."""
        more = self.batch * _MORE
        sample = self._sample(more, self.seq)
        return None if sample is None else Through(((self.batch, self.numbers), (more, sample))).by_batch

    def _other_length(self) -> int | None:
        """A second sequence length to trace at: upwards, as kernels change their ways below, if positions allow."""
        seq = self.seq
        if not seq or seq % _COARSEST_LENGTH:
            return None
        if 2 * seq <= self._most:
            return 2 * seq
        return seq // 2 if seq // 2 % _COARSEST_LENGTH == 0 else None

    def lengths(self, both: Powers | None) -> tuple[Point, ...]:
        """Peaks at other lengths; empty where there are none, or too odd a one to tell what kernels pad."""
        seq, other = self.seq, self._other_length()
        if not seq or other is None:
            return ()
        sizes: Sizes | None = both or self._parabola(seq, other)
        if sizes is None:
            return ()
        if other > seq:
            lengths = [seq * factor for factor in _UPWARDS if seq * factor <= self._most]
        else:
            lengths = [seq // factor for factor in _DOWNWARDS if seq % (factor * _COARSEST_LENGTH) == 0]
        return tuple(self.point(sizes, seq=length) for length in lengths)

    def _parabola(self, seq: int, other: int) -> Sizes | None:
        second = self._sample(self.batch, other)
        if second is None:
            return None
        fitted = powers(self.numbers, second, (self.batch, seq), (self.batch, other))
        if fitted is not None:
            return fitted
        third = 2 * other if other > seq else other // 2
        if third % _COARSEST_LENGTH or third > self._most:
            return None
        last = self._sample(self.batch, third)
        return None if last is None else Through(((seq, self.numbers), (other, second), (third, last))).by_seq

    @property
    def _most(self) -> int:
        return self.known.most_tokens or 1 << 62

    # -- peaks ---------------------------------------------------------------------------------------------------

    def point(self, sizes: Sizes | None, *, batch: int | None = None, seq: int | None = None) -> Point:
        batch, seq = batch or self.batch, seq or self.seq or 0
        bytes = self._bytes(sizes)(batch, seq) if sizes is not None else None
        peaks = self.replay.peaks(bytes, self.place, ends=True)
        fits = not peaks.out_of_memory
        if not fits:
            peaks = self.replay.peaks(bytes, self.place)
        return Point(
            batch=batch, seq=seq, allocated_bytes=peaks.allocated_bytes, reserved_bytes=peaks.reserved_bytes,
            process_bytes=peaks.reserved_bytes + self.place.context.bytes, fits=fits,
        )  # fmt: skip

    def _bytes(self, sizes: Sizes) -> Sizes:
        return WithWorkspaces.of(sizes, self.known.trace.storages)

    def _largest(self, sizes: Sizes) -> int | None:
        """Where allocated bytes alone no longer fit is solved; below it the allocator decides."""
        available, seq = self.place.available_bytes, self.seq or 0
        if available is None:
            return None
        sizes = self._bytes(sizes)

        def least_bytes(batch: int) -> int:
            return self.replay.least_bytes(sizes(batch, seq))

        if least_bytes(_LARGEST_BATCH) <= available:
            return None
        most = bisect.bisect_right(range(1, _LARGEST_BATCH), available, key=least_bytes)
        return _below(most, lambda batch: self.replay.fits(sizes(batch, seq), self.place))


def _below(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` that fits, or 0: down in growing strides, then by halves."""
    fails, stride, guess = most + 1, 1, most
    while guess > 0 and not fits(guess):
        fails, guess, stride = guess, max(guess - stride, 0), 2 * stride
    between = range(guess + 1, fails)
    return guess + bisect.bisect_left(between, True, key=lambda size: not fits(size))


__all__ = ["NOTHING", "NOT_ALIKE", "Growth", "Known", "Point", "Setting", "solve"]
