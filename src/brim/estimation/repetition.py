"""Token after token a model does the same with slightly larger tensors: trace a few, and repeat them exactly.

One *period* runs from one token's first operation to the next token's. When three periods in a row have the same
structure and sizes that grow evenly, those between are copies. Anything else is not repeated but traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from brim.core import Op, Storage, Trace

TRACED_TOKENS = 6  # the prompt, one token that still handles the prompt's tensors, three that are compared, the last
_TEMPLATE = 3  # index of the period that is copied: the fourth


@dataclass(frozen=True, kw_only=True)
class Periods:
    """Ticks at which the tokens of a trace begin; ``length`` is that of the steady ones."""

    starts: tuple[int, ...]
    length: int


def periods_of(trace: Trace, tokens: int) -> Periods | None:
    """Where each token begins: at the embedding of its input. None where that is not to be seen."""
    lookups = [op for op in trace.ops if op.name == "aten.embedding.default"]
    modules = [op.module for op in lookups]
    candidates = [module for module in dict.fromkeys(modules) if modules.count(module) in (tokens, tokens + 1)]
    if not candidates:
        return None
    starts = [op.at for op in lookups if op.module == candidates[0]][-tokens:]  # one more: an encoder's own
    lengths = {after - before for before, after in itertools.pairwise(starts[2:])}
    return Periods(starts=tuple(starts), length=lengths.pop()) if len(lengths) == 1 else None


def stretched(trace: Trace, tokens: int, far: Trace | None = None) -> Trace | None:
    """The trace of ``TRACED_TOKENS`` tokens made one of ``tokens``; None if its periods do not repeat.

    ``far`` is a trace of as many tokens after a prompt that is longer by what is left out: its last sizes must be
    those that are found here (a window of attention may have filled up in between).
    """
    periods = periods_of(trace, TRACED_TOKENS)
    if periods is None or tokens <= TRACED_TOKENS:
        return None
    growing = _Growing.of(trace, periods)
    if growing is None:
        return None
    copies = tokens - TRACED_TOKENS
    if far is not None and not _agrees(far, growing, copies):
        return None
    return _Stretch(trace, periods, growing, copies).trace()


@dataclass(frozen=True, kw_only=True)
class _Growing:
    """The template's storages and operations, and by how much each grows per token."""

    storages: dict[int, tuple[Storage, int]]  # tick within the period -> storage, bytes per token
    ops: dict[int, tuple[Op, Op]]  # tick within the period -> operation, the same of the next token
    start: int

    @classmethod
    def of(cls, trace: Trace, periods: Periods) -> _Growing | None:
        three = [_born_in(trace, periods, index) for index in (2, 3, 4)]
        if not three[0].keys() == three[1].keys() == three[2].keys():
            return None
        growing = {}
        for tick, storage in three[1].items():
            before, after = three[0][tick], three[2][tick]
            step = after.bytes - storage.bytes
            if storage.bytes - before.bytes != step or _life(before) != _life(storage):
                return None
            growing[tick] = (storage, step)
        ops = [_ops_in(trace, periods, index) for index in (3, 4)]
        if [op.name for op in ops[0].values()] != [op.name for op in ops[1].values()]:
            return None
        pairs = {tick: (op, ops[1][tick]) for tick, op in ops[0].items() if tick in ops[1]}
        return cls(storages=growing, ops=pairs, start=periods.starts[_TEMPLATE])


def _life(storage: Storage) -> int | None:
    return None if storage.died is None else storage.died - storage.born


def _born_in(trace: Trace, periods: Periods, index: int) -> dict[int, Storage]:
    begin = periods.starts[index]
    return {s.born - begin: s for s in trace.storages if begin <= s.born < begin + periods.length}


def _ops_in(trace: Trace, periods: Periods, index: int) -> dict[int, Op]:
    begin = periods.starts[index]
    return {op.at - begin: op for op in trace.ops if begin <= op.at < begin + periods.length}


def _agrees(far: Trace, growing: _Growing, copies: int) -> bool:
    periods = periods_of(far, TRACED_TOKENS)
    if periods is None:
        return False
    sizes_by_tick = {tick: storage.bytes for tick, storage in _born_in(far, periods, _TEMPLATE).items()}
    return sizes_by_tick == {
        tick: storage.bytes + copies * step for tick, (storage, step) in growing.storages.items()
    }


class _Stretch:
    """Puts ``copies`` of the template after it, and moves what comes later."""

    def __init__(self, trace: Trace, periods: Periods, growing: _Growing, copies: int) -> None:
        self.source, self.periods, self.growing, self.copies = trace, periods, growing, copies
        self.seam = growing.start + periods.length  # where the copies go in
        self.shift = copies * periods.length

    def trace(self) -> Trace:
        storages = sorted(self._storages(), key=lambda storage: storage.born)
        numbered = tuple(replace(storage, id=index) for index, storage in enumerate(storages))
        ops = sorted(self._ops(), key=lambda op: op.at)
        return replace(self.source, storages=numbered, ops=tuple(ops))

    def _storages(self) -> Iterator[Storage]:
        steady = self.periods.starts[2]
        for storage in self.source.storages:
            if storage.born >= self.seam:
                yield self._later(storage)
            elif storage.died is None or storage.died < self.seam:
                yield storage
            elif storage.born >= steady and storage.died < self.seam + self.periods.length:
                yield storage  # handed on to the next token, which is now a copy
            else:
                yield replace(storage, died=storage.died + self.shift)
        for copy in range(1, self.copies + 1):
            ahead = copy * self.periods.length
            for template, step in self.growing.storages.values():
                died = template.died
                if died is not None:
                    kept = died >= self.seam + self.periods.length  # to the end of the step
                    died += self.shift if kept else ahead
                yield replace(template, bytes=template.bytes + copy * step, born=template.born + ahead, died=died)

    def _later(self, storage: Storage) -> Storage:
        """A storage of the last tokens: later, and as much larger as its like is per token."""
        like = self.growing.storages.get((storage.born - self.seam) % self.periods.length)
        grown = self.copies * like[1] if like is not None else 0
        died = None if storage.died is None else storage.died + self.shift
        return replace(storage, bytes=storage.bytes + grown, born=storage.born + self.shift, died=died)

    def _ops(self) -> Iterator[Op]:
        pairs = self.growing.ops
        for op in self.source.ops:
            if op.at < self.seam:
                yield op
                continue
            pair = pairs.get((op.at - self.seam) % self.periods.length)
            yield _grown(op, pair, self.copies, self.shift) if pair else replace(op, at=op.at + self.shift)
        for copy in range(1, self.copies + 1):
            for pair in pairs.values():
                yield _grown(pair[0], pair, copy, copy * self.periods.length)


def _grown(op: Op, pair: Sequence[Op], tokens: int, shift: int) -> Op:
    first, second = pair
    return replace(
        op,
        at=op.at + shift,
        flops=op.flops + tokens * (second.flops - first.flops),
        read_bytes=op.read_bytes + tokens * (second.read_bytes - first.read_bytes),
        written_bytes=op.written_bytes + tokens * (second.written_bytes - first.written_bytes),
    )
