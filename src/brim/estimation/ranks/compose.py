"""Extrapolate a pipeline rank's step from a step of a few turns to any number and order of micro-batches.

A turn's operations depend on its position among those of its model chunk: gradients are allocated in the first
backward pass, ZeRO defers work to the last, and weights that FSDP2 gathers for a forward pass serve the next one
unless a backward pass in between freed them. ``traced_order`` has one turn of every kind; each turn of the whole step
is a copy of the traced one in the most similar position.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from brim.core import Category, Op, Storage, Trace
from brim.estimation.ranks.layers import Layers
from brim.estimation.ranks.schedule import Turn

FORWARD, BACKWARD, OPTIMIZER = "brim.forward", "brim.backward", "brim.optimizer"
_MARKS = (FORWARD, BACKWARD, OPTIMIZER)
# Forward and backward passes of one chunk that contain every kind of turn: each forward followed by its backward, and
# some forwards ahead.
_IN_TURN = ((0, True), (0, False), (1, True), (1, False), (2, True), (2, False))
_AHEAD = ((0, True), (1, True), (0, False), (2, True), (3, True), (1, False), (2, False), (3, False))
_FOREACH = "aten._foreach_"


@dataclass(frozen=True)
class _Situation:
    """A turn's position among those of its chunk. ``after``: True if the turn before was a forward; None: there is
    none."""

    forward: bool
    first: bool
    last: bool
    after: bool | None

    def likeness(self, other: _Situation) -> int:
        """Similarity of two turns: the turn before matters most for a forward, being last for a backward."""
        weights = (1, 2, 4) if self.forward else (2, 4, 1)
        same = (self.first == other.first, self.last == other.last, self.after == other.after)
        return sum(weight for weight, alike in zip(weights, same, strict=True) if alike)


@dataclass(frozen=True)
class _Stretch:
    """Ticks ``[start, end)`` of the trace: a turn, or None for those before or after all turns."""

    start: int
    end: int
    turn: Turn | None


def traced_order(order: Sequence[Turn]) -> list[Turn]:
    """The turns to trace for a step of the given ``order``: all turns of a chunk if they are few, else one of each
    kind.

    Chunks are independent, so they are traced one after the other.
    """
    traced = []
    for chunk in sorted({turn.chunk for turn in order}):
        own = [turn for turn in order if turn.chunk == chunk]
        ahead = any(before.forward and after.forward for before, after in itertools.pairwise(own))
        few = _AHEAD if ahead else _IN_TURN
        if len(own) > len(few):
            own = [Turn(micro_batch=number, chunk=chunk, forward=forward) for number, forward in few]
        traced += own
    return traced


def mark_of(turn: Turn) -> str:
    """The name of the mark at a turn's beginning."""
    return FORWARD if turn.forward else BACKWARD


class Composer:
    """Reads a trace whose last step took ``traced``, each turn beginning at a mark, and then the optimizer's step."""

    def __init__(self, trace: Trace, traced: Sequence[Turn]) -> None:
        self.trace, self.traced = trace, tuple(traced)
        marks = [op for op in trace.ops if op.name in _MARKS and op.at >= trace.step_starts[-1]]
        names = [op.name for op in marks]
        expected = [mark_of(turn) for turn in traced]
        assert names == [*expected, OPTIMIZER], f"the last step's marks are {names}"
        end = 1 + max(op.at for op in trace.ops)
        end = max([end, *(1 + s.born for s in trace.storages), *(1 + (s.died or 0) for s in trace.storages)])
        bounds = [0, *(op.at for op in marks), end]
        self.stretches = [
            _Stretch(start, stop, turn)
            for (start, stop), turn in zip(itertools.pairwise(bounds), [None, *traced, None], strict=True)
        ]
        self._bounds = bounds
        self._kinds = _situations(self.traced)
        self._ops: dict[_Stretch, list[Op]] = {stretch: [] for stretch in self.stretches}
        for op in trace.ops:
            self._ops[self.stretch_at(op.at)].append(op)
        self._ticks: dict[_Stretch, dict[tuple[str, str, int], int]] = {}
        self._lists: dict[_Stretch, tuple[list[tuple[str, str, int]], list[int]]] = {}

    def like(self, turn: Turn, kind: _Situation) -> _Stretch:
        """The traced turn of the same chunk in the most similar position."""
        alike = [at for at, traced_turn in enumerate(self.traced) if traced_turn.kind == turn.kind]
        return self.stretches[1 + max(alike, key=lambda at: self._kinds[at].likeness(kind))]

    def ops_at(self, stretch: _Stretch) -> list[Op]:
        return self._ops[stretch]

    def usual_ops(self) -> tuple[Op, ...]:
        """Operations of a usual micro-batch through all chunks: no first or last turn if possible."""
        usual: list[Op] = []
        for turn in {turn.kind: turn for turn in self.traced}.values():
            kind = _Situation(forward=turn.forward, first=False, last=False, after=not turn.forward)
            usual += self.ops_at(self.like(turn, kind))
        return tuple(usual)

    def end_ops(self) -> tuple[Op, ...]:
        """Operations of every chunk's first and last forward and backward."""
        ends = [stretch for stretch, kind in zip(self.stretches[1:], self._kinds, strict=False)
                if kind.first or kind.last]  # fmt: skip
        return tuple(op for stretch in ends for op in self.ops_at(stretch))

    def optimizer_ops(self) -> tuple[Op, ...]:
        return tuple(self.ops_at(self.stretches[-1]))

    def composed(self, order: Sequence[Turn]) -> Trace:
        """The trace of a step that takes these turns."""
        return _Composition(self, order).trace()

    def stretch_at(self, tick: int) -> _Stretch:
        return self.stretches[min(bisect.bisect_right(self._bounds, tick), len(self.stretches)) - 1]

    def moved(self, tick: int, source: _Stretch, target: _Stretch) -> int:
        """Move ``tick`` of one stretch into another of the same chunk, as an offset: behind the same operation."""
        if source is target:
            return tick - source.start
        names, ticks = self._named(source)
        there = self._ticks_of(target)
        at = bisect.bisect_right(ticks, tick) - 1
        while names[at] not in there:  # stops at the latest at the mark at the begin of each stretch
            tick, at = ticks[at], at - 1
        return min(there[names[at]] + tick - ticks[at], target.end - 1) - target.start

    def _ticks_of(self, stretch: _Stretch) -> dict[tuple[str, str, int], int]:
        """Each operation's tick by its name, its module, and its number of earlier occurrences."""
        if stretch not in self._ticks:
            seen: dict[tuple[str, str], int] = {}
            ticks = {}
            for op in self.ops_at(stretch):
                key = (op.name, op.module)
                seen[key] = number = seen.get(key, -1) + 1
                ticks[(*key, number)] = op.at
            self._ticks[stretch] = ticks
        return self._ticks[stretch]

    def _named(self, stretch: _Stretch) -> tuple[list[tuple[str, str, int]], list[int]]:
        ticks = self._ticks_of(stretch)
        if stretch not in self._lists:
            self._lists[stretch] = (list(ticks), list(ticks.values()))
        return self._lists[stretch]


def _situations(order: Sequence[Turn]) -> list[_Situation]:
    situations = []
    before: dict[int, bool] = {}
    count: dict[tuple[int, bool], int] = {}
    total = Counter(turn.kind for turn in order)
    for turn in order:
        key = turn.kind
        count[key] = number = count.get(key, 0) + 1
        situations.append(_Situation(
            forward=turn.forward, first=number == 1, last=number == total[key], after=before.get(turn.chunk)
        ))  # fmt: skip
        before[turn.chunk] = turn.forward
    return situations


class _Composition:
    def __init__(self, source: Composer, order: Sequence[Turn]) -> None:
        self.source = source
        kinds = _situations(order)
        first, last = source.stretches[0], source.stretches[-1]
        self.turns: list[Turn | None] = [None, *order, None]
        alike = (source.like(turn, kind) for turn, kind in zip(order, kinds, strict=True))
        self.placed: list[_Stretch] = [first, *alike, last]
        lengths = [part.end - part.start for part in self.placed]
        self.starts = list(itertools.accumulate(lengths, initial=0))
        self._dies: dict[tuple[int, _Stretch], int] = {}

    def trace(self) -> Trace:
        storages = sorted(self._storages(), key=lambda storage: storage.born)
        numbered = tuple(replace(storage, id=index) for index, storage in enumerate(storages))
        return replace(self.source.trace, storages=numbered, ops=tuple(self._ops()))

    def _ops(self) -> Iterator[Op]:
        for part, start in zip(self.placed, self.starts, strict=False):
            for op in self.source.ops_at(part):
                yield replace(op, at=start + op.at - part.start)

    def _storages(self) -> Iterator[Storage]:
        by_stretch: dict[_Stretch, list[Storage]] = {}
        for storage in self.source.trace.storages:
            by_stretch.setdefault(self.source.stretch_at(storage.born), []).append(storage)
        for index, part in enumerate(self.placed):
            for storage in by_stretch.get(part, ()):
                born = self.starts[index] + storage.born - part.start
                yield replace(storage, born=born, died=self._death(storage.died, part, index))

    def _death(self, died: int | None, part: _Stretch, index: int) -> int | None:
        if died is None:
            return None
        end = self.source.stretch_at(died)
        if end is part:
            return self.starts[index] + died - part.start
        if end.turn is None:  # gradients, and storages from before the step
            return self.starts[-2] + died - end.start
        key = (index, end)
        if key not in self._dies:
            self._dies[key] = self._turn_like(end, end.turn, part, index)
        at = self._dies[key]
        return self.starts[at] + self.source.moved(died, end, self.placed[at])

    def _turn_like(self, end: _Stretch, ends: Turn, part: _Stretch, index: int) -> int:
        """The turn in this order in which a storage born at ``index`` dies, given that the traced turn is ``end``:
        its own backward, the last one, or as many turns of that kind later."""
        turn = part.turn
        if turn is not None and not ends.forward and (turn.micro_batch, turn.chunk) == (ends.micro_batch, ends.chunk):
            own = self.turns[index]
            assert own is not None
            return self.turns.index(replace(own, forward=False))
        kind = ends.kind
        traced = self.source.stretches
        between = [stretch for stretch in traced[traced.index(part) + 1 :] if _kind(stretch.turn) == kind]
        number = between.index(end)
        later = [at for at in range(index + 1, len(self.turns)) if _kind(self.turns[at]) == kind]
        if not later:  # there are fewer turns in this order: it dies when the next stretch begins
            return index + 1
        if number and end is between[-1]:
            return later[-1]
        return later[min(number, len(later) - 1)]


def _kind(turn: Turn | None) -> tuple[int, bool] | None:
    return None if turn is None else turn.kind


_BORN, _DIED, _OTHER = "born", "died", "other"


def of_chunks(
    chunks: Sequence[Layers],
    order: Sequence[Turn],
    trace: Callable[[Layers, Sequence[Turn]], Trace],
    known: MutableMapping[Any, Trace],
) -> Trace | None:
    """The trace of a rank with these chunks, from ``trace`` of each kind alone, cached in ``known``; None where the
    traces cannot be joined."""
    traces = []
    for number, chunk in enumerate(chunks):
        own = tuple(replace(turn, chunk=0) for turn in order if turn.chunk == number)
        key = (chunk.kinds, chunk.embeds, chunk.has_head, own)
        if key not in known:
            known[key] = trace(chunk, own)
        traces.append(known[key])
    return joined(traces)


def joined(traces: Sequence[Trace]) -> Trace | None:
    """Join ``traces`` into one program, in order; None where their optimizers' steps differ."""
    chunks = [_Chunk(trace) for trace in traces]
    line = _Line(chunks)
    for stretch in range(2 * len(traces[0].step_starts) + 1):
        if stretch and stretch % 2 == 0:  # building, then each step's turns and its optimizer
            if not line.in_step(stretch):
                return None
        else:
            line.in_turn(stretch)
    streams = max((storage.stream for trace in traces for storage in trace.storages), default=0)
    storages = [
        _moved(storage, chunk, number * streams)
        for number, chunk in enumerate(chunks) for storage in chunk.trace.storages
        if not (number and storage.category is Category.WORKSPACE)  # one workspace for all
    ]  # fmt: skip
    storages.sort(key=lambda storage: storage.born)
    return replace(
        traces[0],
        ops=tuple(sorted(line.ops, key=lambda op: op.at)),
        storages=tuple(replace(storage, id=index) for index, storage in enumerate(storages)),
        step_starts=tuple(line.starts[1::2]),
        not_modelled=tuple(sorted({name for trace in traces for name in trace.not_modelled})),
    )


def _moved(storage: Storage, chunk: _Chunk, streams: int) -> Storage:
    died = None if storage.died is None else chunk.at[storage.died]
    stream = storage.stream + streams if storage.stream else 0  # FSDP2 makes streams for each chunk
    return replace(storage, born=chunk.at[storage.born], died=died, stream=stream)


class _Chunk:
    """A trace's ticks in stretches, and the position of each stretch in the joined trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.at: dict[int, int] = {}
        self.op_at = {op.at: op for op in trace.ops}
        kinds = [(op.at, op.name) for op in trace.ops] + [(storage.born, _BORN) for storage in trace.storages]
        kinds += [(storage.died, _DIED) for storage in trace.storages if storage.died is not None]
        bounds = sorted([*trace.step_starts, *(op.at for op in trace.ops if op.name == OPTIMIZER)])
        self.stretches: list[list[tuple[int, str]]] = [[] for _ in range(len(bounds) + 1)]
        for tick, kind in sorted(kinds):
            stretch = sum(tick >= bound for bound in bounds)
            self.stretches[stretch].append((tick, kind))


@dataclass(kw_only=True)
class _Run:
    """Events of an optimizer's step between two changes of kind."""

    kind: str
    ticks: list[int] = field(default_factory=list)


class _Line:
    """The joined program's ticks, assigned in order."""

    def __init__(self, chunks: Sequence[_Chunk]) -> None:
        self.chunks, self.now = chunks, 0
        self.ops: list[Op] = []
        self.starts: list[int] = []

    def in_turn(self, stretch: int) -> None:
        """Place the chunks one after the other."""
        self.starts.append(self.now)
        for chunk in self.chunks:
            self._follow(chunk, [tick for tick, _ in chunk.stretches[stretch]])

    def in_step(self, stretch: int) -> bool:
        """Place all chunks together, operation by operation; return whether that is possible."""
        self.starts.append(self.now)
        runs = [list(_runs(chunk.stretches[stretch])) for chunk in self.chunks]
        if any([run.kind for run in own] != [run.kind for run in runs[0]] for own in runs):
            return False
        for together in zip(*runs, strict=True):
            if together[0].kind in (_BORN, _DIED, _OTHER):
                for chunk, run in zip(self.chunks, together, strict=True):
                    self._follow(chunk, run.ticks)
            else:
                self._at_once([(chunk, run.ticks[0]) for chunk, run in zip(self.chunks, together, strict=True)])
        return True

    def _follow(self, chunk: _Chunk, ticks: Sequence[int]) -> None:
        for tick in ticks:
            chunk.at[tick] = self.now
            if tick in chunk.op_at:
                self.ops.append(replace(chunk.op_at[tick], at=self.now))
            self.now += 1

    def _at_once(self, ticks: Sequence[tuple[_Chunk, int]]) -> None:
        """Give one tick to an operation that works on the tensors of all chunks."""
        ops = []
        for chunk, tick in ticks:
            chunk.at[tick] = self.now
            ops.append(chunk.op_at[tick])
        whole = {name: sum(getattr(op, name) for op in ops) for name in ("flops", "read_bytes", "written_bytes")}
        self.ops.append(replace(ops[0], at=self.now, **whole))
        self.now += 1


def _runs(events: Sequence[tuple[int, str]]) -> Iterator[_Run]:
    """Foreach operations and a step's mark alone; between them births together and deaths together, or everything
    together if there are other operations, which work on one tensor after the other."""
    alone = [kind == OPTIMIZER or kind.startswith(_FOREACH) for _, kind in events]
    for single, group in itertools.groupby(zip(alone, events, strict=True), key=lambda pair: pair[0]):
        events_of_run = [event for _, event in group]
        if single:
            yield from (_Run(kind=kind, ticks=[tick]) for tick, kind in events_of_run)
        elif any(kind not in (_BORN, _DIED) for _, kind in events_of_run):
            yield _Run(kind=_OTHER, ticks=[tick for tick, _ in events_of_run])
        else:
            for kind, own in itertools.groupby(events_of_run, key=lambda event: event[1]):
                yield _Run(kind=kind, ticks=[tick for tick, _ in own])
