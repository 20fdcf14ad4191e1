"""A pipeline rank's model chunks from a trace of each kind of chunk: most chunks of interleaved stages are alike.

Chunks are independent, so their turns follow one another. Only the optimizer works on all of them at once: by foreach
operations, each of which updates every chunk's weights before the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from brim.core import Category, Op, Storage, Trace
from brim.estimation.ranks.compose import OPTIMIZER
from brim.estimation.ranks.layers import Layers
from brim.estimation.ranks.schedule import Turn

_FOREACH = "aten._foreach_"
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
