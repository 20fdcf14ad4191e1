"""Predict a deep model's training from traces with a few of its layers.

A plan treats equal layers (the same classes, settings and shapes) in a few ways. A model with some layers of each
treatment is traced, and one with one more of each; the difference, scaled by the bytes that the search knows of
each layer, is added for the layers left out. Peaks are extrapolated moment by moment, since the deep model may have
its peak at another moment.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from brim.core import Op, Phase, Trace
from brim.core.hardware import DISK, RAM, VRAM
from brim.estimation.extrapolation import Stack, find_stack
from brim.memory.pool import round_up
from brim.planning.solver.cost_model import block_bytes
from brim.planning.solver.step_profile import BACKWARD, UPDATE, Assignment, StepProfile
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.prediction import TrainingStep
from brim.planning.strategy.step import bytes_at_once, part_bytes
from brim.techniques.activation_offload.activations import ToDisk, ToRam
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.optimizer_offload.state_blocks import UPDATE_PARTS
from brim.techniques.optimizer_offload.technique import gradient_buffer_bytes, usual_buffer_bytes
from brim.techniques.streaming.placement import RESIDENT
from brim.techniques.streaming.weight_streaming import Weights

_LARGEST_SHARE = 0.6  # of the layers; with more, one trace of all layers is no more work than two
_GRAIN_BYTES = 512  # of the caching allocator
_LEAST_WEIGHT = 1 << 20
_SEGMENTS_BYTES = 40 << 20  # two segments of the caching allocator that only the deep model may need
_REST_BYTES = 1 << 20  # unfilled part of a 2 MiB segment for a further layer's small tensors
_IN_WINDOW = 2  # activations, however large: one that is resident, and one that leaves
_TRIES = 2  # a model with one layer of a kind may lack a moment that deeper ones have
_GROWS = 1.15  # times a layer's known bytes: growth beyond it means that the shallower model lacked something
_MOST_BEYOND = 0.02  # of further layers' bytes: unfilled 2 MiB segments. The first segment of a pool does not recur


@dataclass(frozen=True, kw_only=True)
class _Peaks:
    """Peaks of a step: tensors in the compute tier by moment, its allocator's bytes beyond the largest of them,
    and other tiers' peaks."""

    moments: Mapping[str, int]
    beyond_bytes: int
    others: Mapping[str, int]


@dataclass(kw_only=True)
class Shallow:
    """Cached versions of ``step`` with few layers."""

    step: TrainingStep
    stack: Stack
    _steps: dict[int, TrainingStep] = field(default_factory=dict)
    _peaks: dict[str, _Peaks] = field(default_factory=dict)

    @classmethod
    def of(cls, step: TrainingStep) -> Shallow | None:
        """Find the layers; None where there are none, or a block lies in several of them."""
        stack = find_stack(step.model)
        if stack is None:
            return None
        for block in step.partition.blocks:
            if len({stack.place(name) for name in (*block.triggers, *block.tensors)}) > 1:
                return None
        return cls(step=step, stack=stack)

    @property
    def unfilled_bytes(self) -> int:
        """The most bytes of unfilled segments that are added for all layers."""
        return _unfilled_bytes(self.stack.layers)

    def few(self, more: int = 1) -> TrainingStep:
        """Return the step with all special layers and ``more`` of the others."""
        return self._shortened(self.stack.special + more)

    def template(self, name: str) -> str:
        """Return the first block in ``few(2)`` that is equal to a block of the deep model."""
        special, layers = self.stack.special, self.stack.layers
        return self.stack.renamed(name, dict.fromkeys(range(special, layers), special)) or name

    def predict(self, choice: Choice, assignment: Assignment, profile: StepProfile) -> dict[str, int] | None:
        """Return the deep step's peaks per tier; None where all layers have to be traced.

        ``choice`` is the runtime's form of ``assignment``.
        """
        compute, stack = self.step.hardware.compute, self.stack
        known = _KnownLayers(profile, stack, assignment, compute, bytes_at_once(self.step.model, choice))
        treatments = self._treatments(choice)
        fewest = known.fewest(treatments)
        groups: dict[str, list[int]] = defaultdict(list)
        for layer, treatment in treatments.items():
            groups[treatment].append(layer)
        peaks: dict[str, int] | None = None
        for further in range(_TRIES):
            few, more = (
                sorted(n for name, layers in groups.items() for n in layers[-fewest.get(name, 1) - further - added :])
                for added in (0, 1)
            )
            if len(more) + stack.special > _LARGEST_SHARE * stack.layers or len(few) == len(more):
                return None
            first, second = (self._simulated(choice, layers, known) for layers in (few, more))
            if first.moments.keys() != second.moments.keys():
                continue
            added_layers = sorted(set(more) - set(few))
            left = [n for n in range(stack.special, stack.layers) if n not in set(more)]
            deeper = _extrapolated(first, second, added_layers, left, known)
            peaks = deeper if peaks is None else {**peaks, compute: deeper[compute]}
            if _grows_as_known(first, second, added_layers, known):
                break
        return None if peaks is None else {**peaks, RAM: peaks.get(RAM, 0) + known.room(range(stack.layers))}

    def _treatments(self, choice: Choice) -> dict[int, str]:
        """Return a key of each repeated layer's choices, equal for equal treatment."""
        treatments: dict[int, list[str]] = {n: [] for n in range(self.stack.special, self.stack.layers)}
        for name in dict.fromkeys([*choice.streaming, *choice.checkpointing, *choice.activations]):
            layer = self.stack.place(name)
            if layer in treatments:
                inside = self.stack.renamed(name, {layer: 0})
                choices = choice.streaming.get(name, ""), choice.checkpointing.get(name, "")
                treatments[layer].append(f"{inside}={choices} {name in choice.activations}")
        return {layer: " ".join(sorted(words)) for layer, words in treatments.items()}

    def _simulated(self, choice: Choice, layers: Sequence[int], known: _KnownLayers) -> _Peaks:
        """Trace the special layers and ``layers``; return peaks without the RAM buffer of states."""
        own = [*range(self.stack.special), *layers]
        small = _narrowed(choice, self.stack, own)
        key = f"{len(own)} {small!r}"
        if key not in self._peaks:
            simulated = self._shortened(len(own)).simulate(small)
            compute = self.step.hardware.compute
            moments = _moments(simulated.trace, f"{self.stack.path}.{len(own) - 1}", self.stack.path)
            others = {tier: count for tier, count in simulated.peak_bytes.items() if tier != compute}
            beyond = simulated.peak_bytes[compute] - max(moments.values())
            self._peaks[key] = _Peaks(moments=moments, beyond_bytes=beyond, others=others)
        peaks = self._peaks[key]
        return replace(peaks, others={**peaks.others, RAM: peaks.others.get(RAM, 0) - known.room(own)})

    def _shortened(self, count: int) -> TrainingStep:
        """Return the step with the first ``count`` layers."""
        if count in self._steps:
            return self._steps[count]
        step = self.step
        model = _without(step.model, self.stack, count)
        parameters = dict(model.named_parameters())

        def stays(name: str) -> bool:
            return (self.stack.place(name) or 0) < count

        blocks = [b for b in step.partition.blocks if all(map(stays, (*b.triggers, *b.tensors)))]
        loose = tuple(filter(stays, step.partition.loose))
        loose_bytes = sum(map(tensor_bytes, (*(parameters[name] for name in loose), *model.buffers())))
        sources = {name: source for name, source in step.weights.sources.items() if name in parameters}
        at_once = part_bytes(step.model) if step.update_bytes is None else step.update_bytes
        self._steps[count] = replace(
            step,
            model=model,
            partition=Partition(blocks=tuple(blocks), loose=loose, loose_bytes=loose_bytes),
            weights=Weights(sources=sources),
            update_bytes=at_once,
        )
        return self._steps[count]


class _KnownLayers:
    """Known bytes of a deep model's layers under ``assignment``, on a machine that computes in the tier ``compute``.

    ``at_once_bytes`` of resident parameters are updated at once.
    """

    def __init__(
        self, profile: StepProfile, stack: Stack, assignment: Assignment, compute: str, at_once_bytes: int
    ) -> None:
        self.compute = compute
        self._profile, self._stack, self._assignment, self._at_once_bytes = profile, stack, assignment, at_once_bytes
        self._blocks = [(block, stack.place(block.name)) for block in profile.at(assignment.frame.micro_batch).blocks]
        self._bytes: dict[int, dict[tuple[str, str], int]] = defaultdict(dict)
        states, gradients = assignment.frame.homes(compute)
        trained = max(1, sum(block.trained_bytes for block in profile.blocks))
        for block, layer in self._blocks:
            if layer is None:
                continue
            own = self._bytes[layer]
            block_bytes(block, assignment.weights[block.name], assignment.activations[block.name], compute, own)
            for moment in (BACKWARD, UPDATE):
                share = block.trained_bytes / trained
                own[states, moment] = own.get((states, moment), 0) + int(profile.state_bytes * share)
                visiting_bytes = int(profile.state_bytes * share) * assignment.frame.gpu_sixteenths // UPDATE_PARTS
                own[compute, moment] = own.get((compute, moment), 0) + visiting_bytes
                own[gradients, moment] = own.get((gradients, moment), 0) + block.trained_bytes

    def weight(self, layers: Collection[int], tier: str, early: bool) -> int:
        """Return the bytes of ``layers`` in a tier, in backward (``early``) or in the update; at least 1 MiB each."""
        key = (tier, BACKWARD if early else UPDATE)
        return sum(self._bytes[layer].get(key, 0) + _LEAST_WEIGHT for layer in layers)

    def room(self, layers: Collection[int]) -> int:
        """Return the bytes of the RAM buffers for states and gradients on disk, in a model of these layers."""
        profile, frame = self._profile, self._assignment.frame
        per_byte = profile.state_bytes / max(1, profile.gradient_bytes)
        sizes: list[int] = []
        for block in profile.blocks:
            if block.trained_bytes and self._stack.place(block.name) in {None, *layers}:
                streams = self._assignment.weights[block.name] != RESIDENT
                pieces = 1 if streams else -(-block.trained_bytes // self._at_once_bytes)
                sizes += [block.trained_bytes // pieces] * pieces
        states = 0
        if frame.states == DISK:
            states = usual_buffer_bytes([int(size * per_byte) for size in sizes])
            if frame.gpu_sixteenths:
                states = frame.gpu_sixteenths * int(sum(sizes) * per_byte) // UPDATE_PARTS
        return states + (gradient_buffer_bytes(sizes) if frame.gradients == DISK else 0)

    def fewest(self, treatments: Mapping[int, str]) -> dict[str, int]:
        """Return the least layers of each treatment from which on each further layer adds the same bytes.

        Offloaded activations have a window in the compute tier: layers that fill it add other bytes than later ones.
        """
        window = ToRam.window_bytes if self.compute == VRAM else ToDisk.window_bytes
        return {
            treatments[layer]: 1 + max(_IN_WINDOW, -(-window // moved_bytes))
            for block, layer in self._blocks
            if layer in treatments and layer is not None
            if (moved_bytes := block.moved_bytes(self._assignment.activations[block.name]))
        }


def _narrowed(choice: Choice, stack: Stack, layers: Sequence[int]) -> Choice:
    """Restrict ``choice`` to these layers."""
    places = {layer: index for index, layer in enumerate(layers)}

    def narrow(values: Mapping[str, Any]) -> dict[str, Any]:
        return {new: value for name, value in values.items() if (new := stack.renamed(name, places)) is not None}

    return replace(
        choice,
        streaming=narrow(choice.streaming),
        checkpointing=narrow(choice.checkpointing),
        activations=tuple(narrow(dict.fromkeys(choice.activations))),
    )


def _without(model: nn.Module, stack: Stack, count: int) -> nn.Module:
    """Copy ``model`` with its first ``count`` layers; parameters and buffers are shared."""
    parent, _, name = stack.path.rpartition(".")
    owner: Any = model.get_submodule(parent)
    layers = owner._modules[name]
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    owner._modules[name] = nn.ModuleList(layers[:count])
    try:
        return copy.deepcopy(model, dict(shared))
    finally:
        owner._modules[name] = layers


def _moments(trace: Trace, last: str, stack: str) -> dict[str, int]:
    """Return the peak bytes of tensors at each moment of the step, in the allocator's grain.

    ``last`` is the path of the last layer, whose backward comes first. The moments are the building, each forward
    pass with the beginning of its backward, the rest of that backward, and the update.
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
    return peaks


def _marks(trace: Trace, last: str, stack: str) -> Iterator[tuple[int, str]]:
    """Yield the tick at which each moment begins, and its name."""
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
    """Return the tick at which the optimizer begins after the last backward pass."""
    before = max((op.at for op in ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)), default=-1)
    return min((op.at for op in ops if op.phase is Phase.OPTIMIZER and op.at > before), default=1 << 62)


def _grows_as_known(first: _Peaks, second: _Peaks, added: Sequence[int], known: _KnownLayers) -> bool:
    """Return True where late moments grow by no more than the known bytes of the layers ``added``."""
    return all(
        count - first.moments[moment] <= _GROWS * known.weight(added, known.compute, early=moment.startswith("end"))
        for moment, count in second.moments.items()
        if not moment.startswith("begin")
    )


def _extrapolated(
    first: _Peaks, second: _Peaks, added: Sequence[int], left: Sequence[int], known: _KnownLayers
) -> dict[str, int]:
    """Extrapolate ``second`` by the layers ``left``, in proportion to their known bytes over those ``added``."""
    compute = known.compute

    def more(growth: float, tier: str, early: bool) -> int:
        weights = [known.weight(layers, tier, early) for layers in (added, left)]
        return int(growth * weights[1] / weights[0])

    def deep(moment: str, count: int) -> int:
        growth = max(0, count - first.moments[moment])
        # In the rest of backward layers have what they have in the update, and those before them their activations.
        stays: float = growth
        if moment.startswith(("begin", "end")):
            late = _GROWS * known.weight(added, compute, early=False)
            stays = min(growth, late) if moment.startswith("end") else 0
        return count + more(stays, compute, early=False) + more(growth - stays, compute, early=True)

    moments = [deep(moment, count) for moment, count in second.moments.items()]
    beyond = max(first.beyond_bytes, second.beyond_bytes)
    growth = max(0, second.beyond_bytes - first.beyond_bytes)
    share = growth / max(1, max(second.moments.values()) - max(first.moments.values()))
    peak = max(moments)
    segments = int(min(share, _MOST_BEYOND) * (peak - max(second.moments.values())))
    peaks = {compute: peak + beyond + segments + (_unfilled_bytes(len(left)) if compute == VRAM else 0)}
    for tier, count in second.others.items():
        growth = max(0, count - first.others.get(tier, 0))
        peaks[tier] = count + max(more(growth, tier, early) for early in (False, True))
    return peaks


def _unfilled_bytes(layers: int) -> int:
    return _SEGMENTS_BYTES + _REST_BYTES * layers
