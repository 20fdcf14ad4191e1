"""Plan caches for a mixture's experts: slots per layer, their bytes and their loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from brim.core import Decision, Hardware, Plan
from brim.core.hardware import DISK, RAM
from brim.memory.checkpoint_files import TensorSource
from brim.memory.direct_io import bounce_bytes
from brim.memory.layout import packed_layout, staged_layout
from brim.planning.seconds.expert_reading import expected_experts
from brim.planning.solver import Job
from brim.planning.solver.passes import STAGING
from brim.techniques.blocks import Partition
from brim.techniques.experts.technique import (
    CACHE_DISK,
    CACHE_RAM,
    EXPERT_SLOTS,
    NAME,
    ExpertLayer,
    find_experts,
    without_experts,
)
from brim.techniques.streaming.weight_streaming import FROM_DISK, STAGING_SLOTS

_CHOSEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k")


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer of experts. An expert has ``slot_bytes`` in the compute tier, ``packed_bytes`` in RAM, ``staged_bytes``
    between disk and VRAM; a token uses ``chosen`` experts."""

    layer: ExpertLayer
    slot_bytes: int
    packed_bytes: int
    staged_bytes: int
    bounce_bytes: int
    values: int  # of one expert
    chosen: int

    def held_bytes(self, slots: int) -> int:
        return min(slots, self.layer.count) * self.slot_bytes

    def distinct(self, tokens: int) -> float:
        """Return the mean number of different experts in a step."""
        return expected_experts(self.layer.count, self.chosen, tokens)

    def loads(self, slots: int, tokens: int) -> float:
        """Return the mean number of experts that a step loads."""
        return self.distinct(tokens) * (1.0 - min(slots, self.layer.count) / self.layer.count)


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """A plan to cache all layers of experts: ``slots`` per layer, the others in RAM or on disk (``choice``)."""

    layers: Sequence[_Layer]
    slots: int
    choice: str

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for each in self.layers for name in each.layer.tensors)

    def partition(self, partition: Partition) -> Partition:
        """Remove the experts from a partition in which ``names`` stay."""
        return without_experts(partition, [each.layer for each in self.layers], self.names)

    def job(self, job: Job, hardware: Hardware, tokens: int, rate: float) -> Job:
        """Add slots and experts to the fixed parts of the other blocks' job."""
        spent = dict(job.spent_bytes)
        if hardware.compute != RAM:
            spent[RAM] = spent.get(RAM, 0) + self._ram_bytes() + STAGING * self.staging_bytes
        return replace(
            job,
            fixed_bytes=job.fixed_bytes + sum(each.held_bytes(self.slots) for each in self.layers),
            fixed_compute_s=job.fixed_compute_s + self._compute_s(hardware, tokens, rate),
            spent_bytes=spent,
            bounce_bytes=max([job.bounce_bytes, *(each.bounce_bytes for each in self.layers)]),
            fills_ram=self.choice == CACHE_RAM,
        )

    def _ram_bytes(self) -> int:
        if self.choice != CACHE_RAM:
            return 0
        return sum(each.layer.count * each.packed_bytes for each in self.layers)

    @property
    def staging_bytes(self) -> int:
        """Bytes of a slot between disk and VRAM."""
        return max(each.staged_bytes for each in self.layers) if self.choice == CACHE_DISK else 0

    def _compute_s(self, hardware: Hardware, tokens: int, rate: float) -> float:
        tier = hardware.tier(hardware.compute).bytes_per_s
        return sum(
            max(2 * tokens * each.chosen * each.values / rate, each.distinct(tokens) * each.slot_bytes / tier)
            for each in self.layers
        )

    def loads_s(self, hardware: Hardware, tokens: int) -> float:
        """Return the seconds that a step waits for experts: nothing hides loads after the router's choice."""
        count = self._loaded_bytes(tokens)
        return max(count / hardware.link(*link).bytes_per_s for link in self.links(hardware))

    def moved_bytes(self, hardware: Hardware, tokens: int) -> float:
        """Return the bytes of experts that a step moves over all links."""
        return self._loaded_bytes(tokens) * len(self.links(hardware))

    def _loaded_bytes(self, tokens: int) -> float:
        return sum(each.loads(self.slots, tokens) * each.packed_bytes for each in self.layers)

    def links(self, hardware: Hardware) -> list[tuple[str, str]]:
        """Return the links that load an expert into its slot."""
        links = [(DISK, RAM)] if self.choice == CACHE_DISK else []
        return links + ([(RAM, hardware.compute)] if hardware.compute != RAM else [])

    def plan(self, plan: Plan, hardware: Hardware, tokens: int) -> Plan:
        """Add the experts to the plan of the other blocks."""
        loads_s, promise = self.loads_s(hardware, tokens), plan.promise
        peak, settings = dict(promise.peak_bytes), {**plan.settings, EXPERT_SLOTS: self.slots}
        if hardware.compute != RAM and self.choice == CACHE_DISK:
            staging = settings.setdefault(STAGING_SLOTS, STAGING)
            others = max((d.bytes for d in plan.decisions if d.choice == FROM_DISK), default=0)
            # Blocks and experts share the staging slots, which have the size of the largest of them.
            peak[RAM] += staging * (max(others, self.staging_bytes) - others - self.staging_bytes)
        decisions = tuple(
            Decision(technique=NAME, block=each.layer.path, choice=self.choice, bytes=each.layer.bytes)
            for each in self.layers
        )
        limited = "experts" if loads_s > promise.step_s else promise.limited_by
        return replace(
            plan,
            decisions=plan.decisions + decisions,
            settings=settings,
            promise=replace(
                promise,
                peak_bytes=peak,
                step_s=promise.step_s + loads_s,
                bound_s=max(promise.bound_s, loads_s),
                limited_by=limited,
            ),
        )


def expert_plans(model: nn.Module, hardware: Hardware, source: Callable[[str], TensorSource]) -> Iterator[ExpertPlan]:
    """Yield the expert plans worth trying; none for a model without experts.

    ``source`` returns the source of a parameter's values.
    """
    expert_layers = [layer for layer in find_experts(model) if _is_whole(layer, source)]
    if not expert_layers:
        return
    layers = [_layer(model, layer, hardware, source) for layer in expert_layers]
    chosen = max(each.chosen for each in layers)
    count = max(each.layer.count for each in layers)
    for slots in sorted({1, 2, chosen, *(max(1, count * part // 16) for part in range(1, 17))}):
        if slots <= count:
            for choice in [CACHE_DISK] if hardware.compute == RAM else [CACHE_RAM, CACHE_DISK]:
                yield ExpertPlan(layers=layers, slots=slots, choice=choice)


def _is_whole(layer: ExpertLayer, source: Callable[[str], TensorSource]) -> bool:
    """Return True where all of the layer's tensors are in files, or none is."""
    return len({bool(source(name).extents) for name in layer.tensors}) == 1


def _layer(model: nn.Module, layer: ExpertLayer, hardware: Hardware, source: Callable[[str], TensorSource]) -> _Layer:
    parts, module = layer.parts(source), model.get_submodule(layer.path)
    config = getattr(module, "config", None) or getattr(model, "config", None)
    layouts = layer.layouts(source, in_ram=hardware.compute == RAM)
    return _Layer(
        layer=layer,
        slot_bytes=max(layout.bytes for layout in layouts),
        packed_bytes=packed_layout(parts[0]).bytes,
        staged_bytes=max(staged_layout(packed_layout(part)).bytes for part in parts),
        bounce_bytes=max(bounce_bytes(layout.runs) for layout in layouts),
        values=sum(math.prod(tensor.shape) for tensor in parts[0]),
        chosen=min(layer.count, _chosen(config)),
    )


def _chosen(config: Any) -> int:
    """Return the number of experts per token."""
    return next((int(getattr(config, name)) for name in _CHOSEN_NAMES if getattr(config, name, None)), 2)
