"""A pipeline rank's step from one that did three micro-batches after one another: any number, in any order.

The first micro-batch is told apart because gradients are born in its backward pass, the last because what ZeRO puts
off is done in it; all others are like the second. A step of two or of one is traced as such. Every forward and
every backward is a stretch of the trace between marks, and is written again, as it was, at its turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from brim.core import Op, Storage, Trace
from brim.estimation.parallel_schedule import Turn

FORWARD, BACKWARD, OPTIMIZER = "brim.forward", "brim.backward", "brim.optimizer"
_MARKS = (FORWARD, BACKWARD, OPTIMIZER)
TRACED = 3  # micro-batches, where the step has as many


@dataclass(frozen=True)
class _Stretch:
    """Ticks ``[start, end)`` of the trace; ``micro_batch`` -1 for what is not a part of any."""

    start: int
    end: int
    micro_batch: int
    name: str


class Composer:
    """Reads a trace whose last step did three micro-batches (or fewer), each begun and turned back at a mark."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        marks = [op for op in trace.ops if op.name in _MARKS and op.at >= trace.step_starts[-1]]
        names = [op.name for op in marks]
        self.traced = len(names) // 2
        assert names == [FORWARD, BACKWARD] * self.traced + [OPTIMIZER], f"the last step's marks are {names}"
        end = 1 + max(op.at for op in trace.ops)
        end = max([end, *(1 + s.born for s in trace.storages), *(1 + (s.died or 0) for s in trace.storages)])
        bounds = [*(op.at for op in marks), end]
        self._before = _Stretch(0, bounds[0], -1, "before")
        self._parts = [
            _Stretch(bounds[index], bounds[index + 1], index // 2, names[index]) for index in range(2 * self.traced)
        ]
        self._after = _Stretch(bounds[-2], end, -1, "after")
        self._stretches = [self._before, *self._parts, self._after]

    def part(self, micro_batch: int, of: int, *, forward: bool) -> _Stretch:
        """What micro-batch ``micro_batch`` of ``of`` is like."""
        last = self.traced - 1
        like = last if micro_batch == of - 1 else min(micro_batch, max(last - 1, 0))
        return self._parts[2 * like + (not forward)]

    def ops_of(self, micro_batch: int) -> tuple[Op, ...]:
        """Operations of one traced micro-batch."""
        parts = self._parts[2 * micro_batch : 2 * micro_batch + 2]
        return tuple(op for op in self.trace.ops if any(p.start <= op.at < p.end for p in parts))

    def optimizer_ops(self) -> tuple[Op, ...]:
        return tuple(op for op in self.trace.ops if op.at >= self._after.start)

    def composed(self, order: Sequence[Turn]) -> Trace:
        """The trace of a step that takes these turns."""
        return _Composition(self, order).trace()

    def stretch_of(self, tick: int | None) -> _Stretch | None:
        if tick is None:
            return None
        return next(s for s in self._stretches if s.start <= tick < s.end)


class _Composition:
    def __init__(self, source: Composer, order: Sequence[Turn]) -> None:
        self.source = source
        self.placed: list[tuple[_Stretch, int]] = [(source._before, -1)]
        of = 1 + max(turn.micro_batch for turn in order)
        self.placed += [(source.part(turn.micro_batch, of, forward=turn.forward), turn.micro_batch) for turn in order]
        self.placed.append((source._after, -1))
        lengths = [part.end - part.start for part, _ in self.placed]
        self.starts = list(itertools.accumulate(lengths, initial=0))

    def trace(self) -> Trace:
        storages = sorted(self._storages(), key=lambda storage: storage.born)
        numbered = tuple(replace(storage, id=index) for index, storage in enumerate(storages))
        return replace(self.source.trace, storages=numbered, ops=tuple(self._ops()))

    def _ops(self) -> Iterator[Op]:
        ops = self.source.trace.ops
        for (part, _), start in zip(self.placed, self.starts, strict=False):
            for op in ops:
                if part.start <= op.at < part.end:
                    yield replace(op, at=start + op.at - part.start)

    def _storages(self) -> Iterator[Storage]:
        by_stretch: dict[_Stretch, list[Storage]] = {}
        for storage in self.source.trace.storages:
            made_in = self.source.stretch_of(storage.born)
            assert made_in is not None
            by_stretch.setdefault(made_in, []).append(storage)
        for index, (part, key) in enumerate(self.placed):
            for storage in by_stretch.get(part, ()):
                born = self.starts[index] + storage.born - part.start
                yield replace(storage, born=born, died=self._death(storage, part, key, index))

    def _death(self, storage: Storage, part: _Stretch, key: int, index: int) -> int | None:
        end = self.source.stretch_of(storage.died)
        if end is None or storage.died is None:
            return None
        if end is part:
            return self.starts[index] + storage.died - part.start
        if end.micro_batch == part.micro_batch >= 0:  # from a forward to its own backward
            return self._own(end, key, index, storage.died)
        last = self.source.traced - 1
        if end.micro_batch < 0 and part.micro_batch in (-1, 0, last):  # gradients, and what was there before the step
            return self.starts[-2] + storage.died - end.start
        if part.micro_batch < 0 or (end.micro_batch == last and part.micro_batch == 0):
            return self._first(end, storage.died)  # kept through all that lies between
        return self.starts[index + 1]  # until what follows takes its place

    def _first(self, end: _Stretch, died: int) -> int:
        for at, (part, _) in enumerate(self.placed):
            if part is end:
                return self.starts[at] + died - end.start
        return self.starts[1]

    def _own(self, end: _Stretch, key: int, index: int, died: int) -> int:
        for at in range(index + 1, len(self.placed)):
            part, other = self.placed[at]
            if other == key and part.name == end.name:
                return self.starts[at] + died - part.start
        raise AssertionError("a forward without its backward")
