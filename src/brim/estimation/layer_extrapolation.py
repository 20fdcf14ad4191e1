"""From traces of a model with d, d + 1 and d + 2 layers, the trace with any number of layers, or nothing.

The second trace is the first with events put in at some places (a layer's forward, its backward, its share of every
list that the optimizer works on). The third must be the first with the same events put in twice at the same places;
then each further layer puts them in once more. Which storage an event frees, and which layer a name has, follows the
same rule in all copies or the answer is None. Nothing is assumed of what a layer does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from brim.core import Op, Storage, Trace

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_LAYER = "*"
_WORK = ("flops", "read_bytes", "written_bytes")

Place = tuple[int, int, int]  # (chunk, copy, offset); chunk -1: of the first trace, at that offset


@dataclass(frozen=True, slots=True)
class _Event:
    """An operation, or a storage's birth or death; ``origin`` is the event of the birth."""

    what: Op | Storage
    kind: str
    origin: int = -1


class _Sequence:
    """A trace's events in order, each with a token that leaves out what may differ between layers."""

    def __init__(self, trace: Trace, numbers: dict[Any, int]) -> None:
        births: dict[int, int] = {}
        self.events: list[_Event] = []
        self.tokens: list[int] = []
        for kind, what in _in_order(trace):
            if isinstance(what, Storage):
                event = _Event(what, kind, births.setdefault(what.id, len(self.events)))
                token: Any = (kind, what.bytes, what.category, _split(what.module)[0], what.dtype)
            else:
                event = _Event(what, kind)
                token = (kind, what.name, what.phase, _split(what.module)[0], what.dtype, what.step)
            self.events.append(event)
            self.tokens.append(numbers.setdefault(token, len(numbers)))


def _in_order(trace: Trace) -> Iterator[tuple[str, Op | Storage]]:
    """Operations, births and deaths. Deaths in a row are in the order of their births: what is freed at once has no
    order of its own that one could rely on."""
    changes: list[tuple[int, str, Op | Storage]] = [(op.at, "op", op) for op in trace.ops]
    for storage in trace.storages:
        changes.append((storage.born, "born", storage))
        if storage.died is not None:
            changes.append((storage.died, "died", storage))
    changes.sort(key=lambda change: change[0])
    for kind, group in itertools.groupby(changes, key=lambda change: change[1]):
        entries: list[Op | Storage] = [what for _, _, what in group]
        if kind == "died":
            entries.sort(key=lambda what: what.born if isinstance(what, Storage) else 0)
        elif kind == "op":  # of several in a row while building, all but the last make nothing on the device
            entries = [what for what in entries if what is entries[-1] or (isinstance(what, Op) and what.step >= 0)]
        for what in entries:
            yield kind, what


def _split(path: str) -> tuple[str, int]:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``, 3; -1 where no part is a number."""
    match = _NUMBER.search(path)
    if match is None:
        return path, -1
    return f"{path[: match.start()]}{_LAYER}{path[match.end() :]}", int(match[0])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Events ``[start, start + length)`` of the second trace, put in before event ``before`` of the first."""

    before: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Deepened:
    """The deep trace, and which storage of the second trace each of its storages is like, by position."""

    trace: Trace
    templates: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    """A shallow model's trace whose storages those of a deep one are copies of: ``storages`` gives their positions.

    The shallow model is the deep one with ``layers`` in its configuration's ``field``.
    """

    field: str
    layers: int
    trace: Trace
    storages: tuple[int, ...]


def deepened(traces: Sequence[Trace], layers: int) -> Deepened | None:
    """The trace with ``layers`` layers more than the first of three has, or None where the rule does not hold."""
    numbers: dict[Any, int] = {}
    first, second, third = (_Sequence(trace, numbers) for trace in traces)
    chunk_pairs = _chunks(first.tokens, second.tokens)
    if chunk_pairs is None:
        return None
    for turns in (1, 0):
        chunks = [_whole(_turned(chunk, second.tokens, turns), second) for chunk in chunk_pairs]
        places = [list(_places(chunks, len(first.tokens), copies)) for copies in (1, 2)]
        homes = {place: index for index, place in enumerate(places[0])}
        if [second.tokens[homes[number, 0, offset]] for number, _, offset in places[1]] != third.tokens:
            return None
        with suppress(_NoRule):
            return _Growth(traces, (first, second, third), chunks, places).at(layers)
    return None


def _chunks(first: Sequence[int], second: Sequence[int]) -> list[_Chunk] | None:
    """What was put into ``first`` to make ``second``; None where that is not all that differs."""
    chunks, here, there = [], 0, 0
    left = len(second) - len(first)
    while True:
        same = _agreement(first, here, second, there)
        here, there = here + same, there + same
        if here == len(first):
            if left:
                chunks.append(_Chunk(here, there, left))
            return chunks
        candidates = [skip for skip in range(1, left + 1) if second[there + skip] == first[here]]
        if not candidates:
            return None
        length = max(candidates, key=lambda skip: (_agreement(first, here, second, there + skip), -skip))
        chunks.append(_Chunk(here, there, length))
        there, left = there + length, left - length


def _turned(chunk: _Chunk, tokens: Sequence[int], turns: int) -> _Chunk:
    """The same insertion as many times its length earlier, where the same events come before it.

    Agreement is followed to its end, so copies lie behind all layers of the first trace. One turn on they lie between
    its first and its last one, in the forward pass as in the backward pass: copies of one layer have one number.
    """
    back = turns * chunk.length
    if back <= chunk.before and all(
        tokens[at] == tokens[at + chunk.length] for at in range(chunk.start - back, chunk.start)
    ):
        return _Chunk(chunk.before - back, chunk.start - back, chunk.length)
    return chunk


def _whole(chunk: _Chunk, second: _Sequence) -> _Chunk:
    """The same insertion, begun at an operation where it can be: what an operation does is then not torn apart.

    Tokens of operations outside of modules are the same whatever they work on, so agreement went too far by one.
    """
    for back in range(min(chunk.before, chunk.length)):
        start = chunk.start - back
        if second.events[start].kind == "op":
            return _Chunk(chunk.before - back, start, chunk.length)
        if second.tokens[start - 1] != second.tokens[start - 1 + chunk.length]:
            break
    return chunk


def _agreement(first: Sequence[int], here: int, second: Sequence[int], there: int) -> int:
    """How many tokens are the same from here and there on."""
    count, most = 0, min(len(first) - here, len(second) - there)
    while count < most and first[here + count] == second[there + count]:
        count += 1
    return count


def _places(chunks: Sequence[_Chunk], length: int, copies: int) -> Iterator[Place]:
    """Where each event of a trace with ``copies`` copies of every chunk comes from, in order."""
    done = 0
    for number, chunk in enumerate(chunks):
        for offset in range(done, chunk.before):
            yield -1, 0, offset
        for copy in range(copies):
            for offset in range(chunk.length):
                yield number, copy, offset
        done = chunk.before
    for offset in range(done, length):
        yield -1, 0, offset


class _NoRule(Exception):
    """Copies do not follow one rule."""


class _Growth:
    """Every event's rule, found from three traces and applied to any number of copies."""

    def __init__(
        self,
        traces: Sequence[Trace],
        sequences: Sequence[_Sequence],
        chunks: Sequence[_Chunk],
        places: Sequence[list[Place]],
    ) -> None:
        self.trace, self.chunks = traces[0], chunks
        self.positions = {storage.id: position for position, storage in enumerate(traces[1].storages)}
        self.first, self.second, self.third = (sequence.events for sequence in sequences)
        self.places = places  # of the second's and of the third's events
        self.index = [{place: index for index, place in enumerate(own)} for own in places]
        self._work: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._origins: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._names: dict[tuple[int, int], tuple[Any, ...]] = {}

    def at(self, copies: int) -> Deepened:
        ops: list[Op] = []
        born: list[tuple[Storage, str, int]] = []
        templates: list[int] = []
        died: dict[int, int] = {}
        births: dict[Place, int] = {}
        starts: dict[int, int] = {}
        for tick, place in enumerate(_places(self.chunks, len(self.first), copies)):
            event = self._sample(place)
            if isinstance(event.what, Op):
                starts.setdefault(event.what.step, tick)
                ops.append(self._op(place, event.what, copies, tick))
            elif event.kind == "born":
                births[place] = len(born)
                templates.append(self._template(place))
                born.append((event.what, self._name(place, copies), tick))
            else:
                died[births[self._origin(place, copies)]] = tick
        trace = replace(
            self.trace,
            ops=tuple(ops),
            storages=tuple(
                replace(storage, id=index, module=name, born=tick, died=died.get(index))
                for index, (storage, name, tick) in enumerate(born)
            ),
            step_starts=tuple(starts[step] for step in range(len(self.trace.step_starts))),
        )
        return Deepened(trace, tuple(templates))

    def _template(self, place: Place) -> int:
        """The position of the second trace's storage that is born at this place."""
        number, _, offset = place
        index = self.index[0][-1, 0, offset] if number < 0 else self.chunks[number].start + offset
        storage = self.second[index].what
        assert isinstance(storage, Storage)
        return self.positions[storage.id]

    def _sample(self, place: Place) -> _Event:
        number, _, offset = place
        return self.first[offset] if number < 0 else self.second[self.chunks[number].start + offset]

    def _samples(self, number: int, offset: int) -> tuple[_Event, _Event, _Event]:
        """An event of the first trace in all three; of a chunk, its one copy in the second and two in the third."""
        if number < 0:
            in_second, in_third = (index[-1, 0, offset] for index in self.index)
            return self.first[offset], self.second[in_second], self.third[in_third]
        in_second = self.index[0][number, 0, offset]
        first_copy, second_copy = (self.index[1][number, copy, offset] for copy in (0, 1))
        return self.second[in_second], self.third[first_copy], self.third[second_copy]

    def _op(self, place: Place, op: Op, copies: int, tick: int) -> Op:
        number, _, offset = place
        rule = self._work.get((number, offset))
        if rule is None:
            rule = self._work[number, offset] = self._work_rule(number, offset)
        flops, read, written = (size + copies * more for size, more in rule)
        name = self._name(place, copies)
        return replace(op, module=name, at=tick, flops=flops, read_bytes=read, written_bytes=written)

    def _work_rule(self, number: int, offset: int) -> list[tuple[int, int]]:
        """What the operation does, and how much more per layer that is added."""
        rule = []
        for field in _WORK:
            a, b, c = (getattr(event.what, field) for event in self._samples(number, offset))
            if c - b != b - a or (number >= 0 and a != b):
                raise _NoRule
            rule.append((a, b - a))
        return rule

    def _name(self, place: Place, copies: int) -> str:
        number, copy, offset = place
        rule = self._names.get((number, offset))
        if rule is None:
            rule = self._names[number, offset] = self._name_rule(number, offset)
        template, base, per_copy, per_layer = rule
        if base < 0:
            return str(template)
        layer = base + per_copy * copy + per_layer * (copies if number < 0 else copies - 1)
        return str(template).replace(_LAYER, str(layer), 1)

    def _name_rule(self, number: int, offset: int) -> tuple[Any, ...]:
        """(name with a star, its layer in the first sample, layers on per copy, per layer that is added)."""
        parts = [_split(event.what.module) for event in self._samples(number, offset)]
        template, base = parts[0]
        steps = tuple(layer - base for _, layer in parts[1:])
        if number < 0:
            rules = {(0, 0): (0, 0), (1, 2): (0, 1)}
        else:  # of the third trace's two copies
            rules = {(0, 0): (0, 0), (0, 1): (1, 0), (1, 0): (-1, 1), (1, 1): (0, 1)}
        if steps not in rules:
            raise _NoRule
        return (template, base, *rules[steps])

    def _origin(self, place: Place, copies: int) -> Place:
        """The birth of the storage whose death this is."""
        number, copy, offset = place
        rule = self._origins.get((number, offset))
        if rule is None:
            rule = self._origins[number, offset] = self._origin_rule(number, offset)
        target, inside, forward, shift, fixed = rule
        other = _copy(copy, copies, forward, shift)
        if target >= 0 and other is not None:
            return target, other, inside
        if fixed is None:
            raise _NoRule
        return -1, 0, fixed

    def _origin_rule(self, number: int, offset: int) -> tuple[Any, ...]:
        """(chunk, offset in it, whether copies count from the first, how many on, the birth beside the copies)."""
        told = [(0, 1), (0, 2)] if number < 0 else [(0, 1), (0, 2), (1, 2)]  # copy, of how many
        born = [self._born(copies - 1, (number, copy, offset)) for copy, copies in told]
        inside = {(place[0], place[2]) for place in born if place[0] >= 0}
        outside = {place[2] for place in born if place[0] < 0}
        if len(inside) > 1 or len(outside) > 1:
            raise _NoRule
        fixed = outside.pop() if outside else None
        if not inside:
            return -1, -1, True, 0, fixed
        copies_found = [place[1] if place[0] >= 0 else None for place in born]
        for forward, shift in itertools.product((True, False), (0, -1, 1)):
            if copies_found == [_copy(copy, copies, forward, shift) for copy, copies in told]:
                return (*inside.pop(), forward, shift, fixed)
        raise _NoRule

    def _born(self, which: int, place: Place) -> Place:
        events = (self.second, self.third)[which]
        return self.places[which][events[self.index[which][place]].origin]


def _copy(copy: int, copies: int, forward: bool, shift: int) -> int | None:
    other = (copy if forward else copies - 1 - copy) + shift
    return other if 0 <= other < copies else None
