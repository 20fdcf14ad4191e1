"""A deep model's training, rehearsed with a few of its layers.

Layers that are alike (the same classes, settings and shapes) are treated in a few ways by a plan. A model with some
of each is rehearsed, and one with one more of each; what that adds, the layers that were left out add too. Peaks are
followed moment by moment, since which moment has the largest may be another one in the deep model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from brim.core import Op, Phase, Trace
from brim.core.hardware import RAM, VRAM
from brim.estimation.extrapolation import Stack, find_stack
from brim.memory.pool import round_up
from brim.run.fit.step import bytes_at_once
from brim.run.train.strategy.choice import Choice
from brim.run.train.strategy.prediction import Rehearsal
from brim.techniques.blocks import Block, Partition, tensor_bytes
from brim.techniques.streaming.weight_streaming import Weights

_LARGEST_SHARE = 0.6  # of the layers; with more, a rehearsal of all is no more work than two of some
_GRAIN_BYTES = 512  # of the caching allocator
_LEAST_WEIGHT = 1 << 20
_SEGMENTS_BYTES = 40 << 20  # two of the caching allocator's, which a deep model may hold more than a shallow one
_REST_BYTES = 1 << 20  # of a 2 MiB segment, which a further layer's small tensors may leave unfilled
_TRIES = 2  # a model with one layer of a kind may lack a moment that those with more have

_GROWS = 1.15  # times what is known of a layer: more, and the shallower of two models lacks what the other has

# Bytes that one layer takes, as far as the planner knows: (deep layer, tier, whether at an early moment) -> bytes.
LayerBytes = Callable[[int, str, bool], int]
# RAM that states and gradients pass through in a model of these layers: more for many than for few of them.
RoomBytes = Callable[[Collection[int]], int]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A rehearsal: bytes of tensors in the compute tier by moment, what its allocator holds beyond the largest, and
    the peaks of other tiers."""

    moments: Mapping[str, int]
    beyond_bytes: int
    others: Mapping[str, int]


@dataclass(kw_only=True)
class Shallow:
    """Rehearsals of ``rehearsal`` with few layers, each made once."""

    rehearsal: Rehearsal
    stack: Stack
    _made: dict[int, Rehearsal] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)

    @classmethod
    def of(cls, rehearsal: Rehearsal) -> Shallow | None:
        """None where the layers cannot be told apart, or a block lies in several of them."""
        stack = find_stack(rehearsal.model)
        if stack is None:
            return None
        for block in rehearsal.partition.blocks:
            if len({stack.place(name) for name in (*block.triggers, *block.tensors)}) > 1:
                return None
        return cls(rehearsal=rehearsal, stack=stack)

    @property
    def unfilled_bytes(self) -> int:
        """The most that is added to what the tensors of all layers take."""
        return _unfilled_bytes(self.stack.layers)

    def shortened(self, count: int) -> Rehearsal:
        """The rehearsal with the first ``count`` layers: which of those that are alike does not matter."""
        if count not in self._made:
            self._made[count] = _shortened(self.rehearsal, self.stack, count)
        return self._made[count]

    def few(self, more: int = 1) -> Rehearsal:
        """With all special layers and ``more`` of the others."""
        return self.shortened(self.stack.special + more)

    def template(self, name: str) -> str:
        """Of a block in the deep model, its like in ``few(2)``: of those that are alike, the first."""
        layer = self.stack.place(name)
        if layer is None or layer < self.stack.special:
            return name
        renamed = self.stack.renamed(name, {layer: self.stack.special})
        assert renamed is not None
        return renamed

    def predict(
        self, choice: Choice, layer_bytes: LayerBytes, room_bytes: RoomBytes, most: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Peaks per tier of the deep step under ``choice``; None where all layers have to be rehearsed.

        ``most``: of layers that are treated in one way (as ``treatments`` names it), how many are needed until each
        further one adds as much as the one before.
        """
        compute = self.rehearsal.hardware.compute
        special, peaks = range(self.stack.special), None
        groups = self._groups(choice)
        for further in range(_TRIES):
            counts = {name: most.get(name, 1) + further for name in groups}
            few = sorted(itertools.chain(*(layers[-counts[name] :] for name, layers in groups.items())))
            more = sorted(itertools.chain(*(layers[-counts[name] - 1 :] for name, layers in groups.items())))
            if len(more) + self.stack.special > _LARGEST_SHARE * self.stack.layers or len(few) == len(more):
                return None
            rooms = [room_bytes({*special, *layers}) for layers in (few, more)]
            first, second = (
                _without_room(self._observe(choice, layers), room)
                for layers, room in zip((few, more), rooms, strict=True)
            )
            added = sorted(set(more) - set(few))
            if first.moments.keys() != second.moments.keys():
                continue
            left = [n for n in range(self.stack.special, self.stack.layers) if n not in set(more)]
            once_more = _extrapolated(first, second, added, left, layer_bytes, compute)
            peaks = once_more if peaks is None else {**peaks, compute: once_more[compute]}
            if _grows_as_known(first, second, added, layer_bytes, compute):
                break
        return None if peaks is None else {**peaks, RAM: peaks.get(RAM, 0) + room_bytes(range(self.stack.layers))}

    def treatments(self, choice: Choice) -> dict[int, str]:
        """What ``choice`` does with each layer that has its like, in words that are equal for equal treatment."""
        told: dict[int, list[str]] = {n: [] for n in range(self.stack.special, self.stack.layers)}
        for name in dict.fromkeys([*choice.streaming, *choice.checkpointing, *choice.activations]):
            layer = self.stack.place(name)
            if layer in told:
                inside = self.stack.renamed(name, {layer: 0})
                told[layer].append(f"{inside}={_of_block(choice, name)}")
        return {layer: " ".join(sorted(words)) for layer, words in told.items()}

    def _groups(self, choice: Choice) -> dict[str, list[int]]:
        """Layers that are alike by how they are treated."""
        groups: dict[str, list[int]] = {}
        for layer, treatment in self.treatments(choice).items():
            groups.setdefault(treatment, []).append(layer)
        return groups

    def _observe(self, choice: Choice, layers: Sequence[int]) -> _Seen:
        whole = [*range(self.stack.special), *layers]
        small = _narrowed(choice, self.stack, whole)
        key = f"{len(whole)} {small!r}"
        if key not in self._seen:
            rehearsed = self.shortened(len(whole)).rehearse(small)
            compute = self.rehearsal.hardware.compute
            moments = dict(_moments(rehearsed.trace, f"{self.stack.path}.{len(whole) - 1}", self.stack.path))
            others = {tier: count for tier, count in rehearsed.peak_bytes.items() if tier != compute}
            beyond = rehearsed.peak_bytes[compute] - max(moments.values())
            self._seen[key] = _Seen(moments=moments, beyond_bytes=beyond, others=others)
        return self._seen[key]


def _of_block(choice: Choice, name: str) -> str:
    kept = choice.checkpointing.get(name, "")
    return f"{choice.streaming.get(name, '')} {kept} {name in choice.activations}"


def _narrowed(choice: Choice, stack: Stack, layers: Sequence[int]) -> Choice:
    """``choice`` for a model of these layers only."""
    places = {layer: index for index, layer in enumerate(layers)}

    def narrow(given: Mapping[str, str]) -> dict[str, str]:
        pairs = ((stack.renamed(name, places), value) for name, value in given.items())
        return {name: value for name, value in pairs if name is not None}

    activations = (stack.renamed(name, places) for name in choice.activations)
    return replace(
        choice,
        streaming=narrow(choice.streaming),
        checkpointing=narrow(choice.checkpointing),
        activations=tuple(name for name in activations if name is not None),
    )


def _shortened(rehearsal: Rehearsal, stack: Stack, count: int) -> Rehearsal:
    places = {layer: layer for layer in range(count)}
    model = _without(rehearsal.model, stack, count)
    sources = rehearsal.weights.sources
    names = {name for name, _ in model.named_parameters()}
    blocks = tuple(b for b in rehearsal.partition.blocks if _stays(b, stack, places))
    loose = tuple(name for name in rehearsal.partition.loose if stack.renamed(name, places) is not None)
    parameters = dict(model.named_parameters())
    loose_bytes = sum(tensor_bytes(parameters[name]) for name in loose) + sum(
        tensor_bytes(b) for b in model.buffers()
    )
    at_once = bytes_at_once(rehearsal.model) if rehearsal.update_bytes is None else rehearsal.update_bytes
    return replace(
        rehearsal,
        model=model,
        partition=Partition(blocks=blocks, loose=loose, loose_bytes=loose_bytes),
        weights=Weights(sources={name: source for name, source in sources.items() if name in names}),
        update_bytes=at_once,
    )


def _stays(block: Block, stack: Stack, places: Mapping[int, int]) -> bool:
    return all(stack.renamed(name, places) is not None for name in (*block.triggers, *block.tensors))


def _without(model: nn.Module, stack: Stack, count: int) -> nn.Module:
    """A copy of ``model`` with its first ``count`` layers. Parameters and buffers are the same objects."""
    parent, _, name = stack.path.rpartition(".")
    owner: Any = model.get_submodule(parent)
    whole = owner._modules[name]
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    owner._modules[name] = nn.ModuleList(whole[:count])
    try:
        return copy.deepcopy(model, dict(shared))
    finally:
        owner._modules[name] = whole


def _moments(trace: Trace, last: str, stack: str) -> Iterator[tuple[str, int]]:
    """The most bytes of tensors at each moment of the step, in the allocator's grain.

    ``last`` is the path of the layer whose backward comes first. Moments: while building, each forward pass with the
    beginning of its backward, the rest of that, and the optimizer.
    """
    marks = list(_marks(trace, last, stack))
    changes = [(s.born, round_up(s.bytes, _GRAIN_BYTES)) for s in trace.storages if s.bytes]
    changes += [(s.died, -round_up(s.bytes, _GRAIN_BYTES)) for s in trace.storages if s.bytes and s.died is not None]
    peaks = {name: 0 for _, name in marks}
    live_bytes, at = 0, 0
    for tick, count in sorted(changes):
        while at + 1 < len(marks) and marks[at + 1][0] <= tick:
            at += 1
            peaks[marks[at][1]] = max(peaks[marks[at][1]], live_bytes)
        live_bytes += count
        peaks[marks[at][1]] = max(peaks[marks[at][1]], live_bytes)
    yield from peaks.items()


def _marks(trace: Trace, last: str, stack: str) -> Iterator[tuple[int, str]]:
    """Ticks at which another moment begins."""
    yield -1, "build"
    name, number, reached = "build", -1, False
    turn = _turn(trace.ops)
    for op in trace.ops:
        now = name
        if op.step < 0:
            continue
        if op.at >= turn:
            now = "update"
        elif op.phase is Phase.FORWARD and not name.startswith("begin"):
            number, reached, now = number + 1, False, f"begin {number + 1}"
        elif op.phase is Phase.BACKWARD and op.module:
            inside = op.module == last or op.module.startswith(f"{last}.")
            if not inside and (reached or op.module.startswith(f"{stack}.")):
                now = f"end {number}"
            reached = reached or inside
        if now != name:
            name = now
            yield op.at, name


def _turn(ops: Sequence[Op]) -> int:
    """Where the optimizer begins for good: what it does beside a backward pass belongs to that."""
    before = max((op.at for op in ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)), default=-1)
    return min((op.at for op in ops if op.phase is Phase.OPTIMIZER and op.at > before), default=1 << 62)


def _without_room(seen: _Seen, room_bytes: int) -> _Seen:
    return replace(seen, others=dict(seen.others) | {RAM: seen.others.get(RAM, 0) - room_bytes})


def _grows_as_known(first: _Seen, second: _Seen, added: Sequence[int], layer_bytes: LayerBytes, compute: str) -> bool:
    """Whether the later moments grow by what is known of the layers ``added``, as each of those left out will."""
    known_bytes = sum(layer_bytes(layer, compute, False) + _LEAST_WEIGHT for layer in added)
    late = [moment for moment in second.moments if not moment.startswith("begin")]
    return all(second.moments[moment] - first.moments[moment] <= _GROWS * known_bytes for moment in late)


def _extrapolated(
    first: _Seen, second: _Seen, added: Sequence[int], left: Sequence[int], layer_bytes: LayerBytes, compute: str
) -> dict[str, int]:
    """``second`` with the layers ``left``, each adding as much more as its bytes are to those ``added``."""

    def on(one: int, other: int, tier: str, early: bool) -> int:
        weights = [sum(layer_bytes(n, tier, early) + _LEAST_WEIGHT for n in layers) for layers in (added, left)]
        return other + int(max(0, other - one) * weights[1] / weights[0])

    moments = [on(first.moments[m], n, compute, m.startswith("begin")) for m, n in second.moments.items()]
    beyond = max(first.beyond_bytes, second.beyond_bytes)
    growth = max(0, second.beyond_bytes - first.beyond_bytes)
    share = growth / max(1, max(second.moments.values()) - max(first.moments.values()))
    peak = max(moments)
    more = int(min(share, _MOST_BEYOND) * (peak - max(second.moments.values())))
    peaks = {compute: peak + beyond + more + (_unfilled_bytes(len(left)) if compute == VRAM else 0)}
    for tier, count in second.others.items():
        peaks[tier] = max(on(first.others.get(tier, 0), count, tier, early) for early in (False, True))
    return peaks


def _unfilled_bytes(layers: int) -> int:
    return _SEGMENTS_BYTES + _REST_BYTES * layers


_MOST_BEYOND = 0.02  # of what more layers hold: 2 MiB segments that are not filled. A pool's first one is no rule


__all__ = ["LayerBytes", "Shallow"]
