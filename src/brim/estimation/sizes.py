"""Every storage's bytes as a function of batch and sequence length, from a few traces of one structure."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from brim.core import Storage, Trace
from brim.core.trace import Reduction
from brim.predict.lowering.cuda.reductions import workspace_bytes

Sizes = Callable[[int, int], list[int]]  # (batch, sequence length) -> bytes of every storage
Power = tuple[int, int, int]  # of the batch, of the length, and what is added to the length first
# Labels are shifted by one: sizes of one token more or less than the sequence are met with.
_POWERS: tuple[Power, ...] = tuple((i, j, more) for more in (1, -1, 0) for j in (2, 1, 0) for i in (1, 0))
_MOST_LINES = 0.01  # of all bytes: kernels' temporaries, a part that grows with the tokens and one that does not


@dataclass(frozen=True)
class Powers:
    """``bytes`` at one batch and length, and by which powers of the two they grow; a line in their product for None,
    through ``bytes`` and ``others`` at ``to``."""

    bytes: Sequence[int]
    others: Sequence[int]
    powers: Sequence[Power | None]
    at: tuple[int, int]
    to: tuple[int, int]

    def __call__(self, batch: int, seq: int) -> list[int]:
        ratios = {power: _ratio(power, (batch, seq or 1), self.at) for power in set(self.powers) if power is not None}
        here, there = self.at[0] * self.at[1], self.to[0] * self.to[1]
        share = Fraction(batch * (seq or 1) - here, there - here)
        return [
            -(-size * ratios[power].numerator // ratios[power].denominator) if power is not None
            else max(math.ceil(size + (other - size) * share), 0)
            for size, other, power in zip(self.bytes, self.others, self.powers, strict=True)
        ]  # fmt: skip


def powers(
    here: Sequence[int], there: Sequence[int], at: tuple[int, int | None], to: tuple[int, int | None]
) -> Powers | None:
    """The powers that explain two samples, at (batch, length) ``at`` and ``to``; None where too many have none.

    If both batch and length differ, their ratios must not be powers of one number.
    """
    start, end = (at[0], at[1] or 1), (to[0], to[1] or 1)
    ratios = {_ratio(power, end, start): power for power in _POWERS if start[1] > 1 or power[2] >= 0}
    exponents = [ratios.get(Fraction(b, a)) if a else (0, 0, 0) for a, b in zip(here, there, strict=True)]
    lines = sum(size for size, power in zip(here, exponents, strict=True) if power is None)
    if lines > _MOST_LINES * sum(here) or any(b and not a for a, b in zip(here, there, strict=True)):
        return None
    return Powers(here, there, exponents, start, end)


def _ratio(power: Power, to: tuple[int, int], at: tuple[int, int]) -> Fraction:
    i, j, more = power
    return Fraction(to[0], at[0]) ** i * Fraction(to[1] + more, at[1] + more) ** j


@dataclass(frozen=True)
class Through:
    """The polynomial through samples at several batches or several lengths (Lagrange), without rounding errors."""

    samples: Sequence[tuple[int, Sequence[int]]]

    def by_batch(self, batch: int, seq: int) -> list[int]:
        return self._at(batch)

    def by_seq(self, batch: int, seq: int) -> list[int]:
        return self._at(seq)

    def _at(self, value: int) -> list[int]:
        xs = [x for x, _ in self.samples]
        weights = [_weight(xs, index, value) for index in range(len(xs))]
        divisor = math.lcm(*(weight.denominator for weight in weights))
        factors = [int(weight * divisor) for weight in weights]
        columns = zip(*(bytes for _, bytes in self.samples), strict=True)
        return [max(-(-sum(map(operator.mul, factors, sizes)) // divisor), 0) for sizes in columns]


def _weight(xs: Sequence[int], index: int, value: int) -> Fraction:
    weight = Fraction(1)
    for other, x in enumerate(xs):
        if other != index:
            weight *= Fraction(value - x, xs[index] - x)
    return weight


def numbers(storages: Sequence[Storage]) -> list[int]:
    """What grows by powers: every storage's bytes, and behind them the shapes that reductions' workspaces follow."""
    sizes = [0 if storage.reduction is not None else storage.bytes for storage in storages]
    for storage in storages:
        if storage.reduction is not None:
            sizes += itertools.chain(*storage.reduction.reduced, *storage.reduction.kept)
    return sizes


@dataclass(frozen=True)
class WithWorkspaces:
    """Bytes of every storage, from what ``sizes`` says of their ``numbers``."""

    sizes: Sizes
    count: int
    reductions: Sequence[tuple[int, Reduction]]  # by the storage's position

    @classmethod
    def of(cls, sizes: Sizes, storages: Sequence[Storage]) -> WithWorkspaces:
        reductions = [(index, s.reduction) for index, s in enumerate(storages) if s.reduction is not None]
        return cls(sizes, len(storages), reductions)

    def __call__(self, batch: int, seq: int) -> list[int]:
        numbers = self.sizes(batch, seq)
        bytes, shapes = numbers[: self.count], iter(numbers[self.count :])
        pairs = zip(shapes, shapes, strict=True)
        for index, reduction in self.reductions:
            reduced, kept = (tuple(itertools.islice(pairs, len(o))) for o in (reduction.reduced, reduction.kept))
            bytes[index] = workspace_bytes(replace(reduction, reduced=reduced, kept=kept))
        return bytes


def structure(trace: Trace) -> tuple[list[tuple[int, bool]], list[tuple[int, int, int]]]:
    """Births and deaths by the storage's number, without the clock and the order of deaths in a row; and by that
    number how many dimensions reductions have."""
    changes = [(storage.born, index, True) for index, storage in enumerate(trace.storages)]
    changes += [(s.died, index, False) for index, s in enumerate(trace.storages) if s.died is not None]
    changes.sort()
    lifetimes: list[tuple[int, bool]] = []
    for born, group in itertools.groupby(changes, key=lambda change: change[2]):
        indices = [index for _, index, _ in group]
        lifetimes += [(index, born) for index in (indices if born else sorted(indices))]
    shapes = ((index, s.reduction) for index, s in enumerate(trace.storages))
    return lifetimes, [
        (index, len(reduction.reduced), len(reduction.kept)) for index, reduction in shapes if reduction is not None
    ]
