"""Mixture of experts: each expert is a block of its own, with a cache of a few of them per layer in the compute tier.

A token needs 2 to 8 of a layer's 8 to 512 experts, so a layer that is moved as one moves mostly what nobody asked
for. Here the experts of a layer rest one by one in RAM or on disk; those that a call's tokens were routed to come
into slots, and stay there by use (``expert_cache``). The rest of the layer is resident or streamed like any block.

This is for transformers' fused experts (``transformers/integrations/moe.py``): parameters of shape
[experts, ...] and a forward of hidden states, the indices of the experts chosen per token, and their weights. Which
kernels compute them stays the model's choice (``experts_implementation``), and so does every bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from brim.core import Plan
from brim.core.hardware import DISK, RAM
from brim.errors import UnsupportedError
from brim.memory.checkpoint_files import TensorSource, leading_slices
from brim.memory.layout import equal_layouts
from brim.techniques.blocks import Block, Partition, tensor_bytes
from brim.techniques.expert_calls import IMPLEMENTATIONS, ExpertCall, implementation
from brim.techniques.expert_cache import ExpertCache
from brim.techniques.experts_home import ExpertsHome
from brim.techniques.streamed import Streamed

if TYPE_CHECKING:
    from brim.techniques.weight_streaming import WeightStreaming

NAME = "experts"
CACHE_RAM, CACHE_DISK = "cache:ram", "cache:disk"  # where the experts rest that are not in a slot
EXPERT_SLOTS = "expert_slots"  # a plan's setting: slots per layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """The experts of one layer: a module at ``path`` whose own parameters ``tensors`` have an expert per row."""

    path: str
    count: int
    tensors: tuple[str, ...]
    bytes: int  # of all experts

    def parts(self, source: Callable[[str], TensorSource]) -> list[tuple[TensorSource, ...]]:
        """Of each expert, what its tensors are made of; ``source`` says it of a parameter."""
        return list(zip(*(leading_slices(source(name)) for name in self.tensors), strict=True))


def find_experts(model: nn.Module) -> list[ExpertLayer]:
    """The layers of ``model`` whose experts can be cached, in definition order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for path, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not own or not _is_fused(module, own) or not all(id(p) in names for p in own):
            continue
        found.append(
            ExpertLayer(
                path=path,
                count=int(module.num_experts),  # type: ignore[arg-type]
                tensors=tuple(names[id(parameter)] for parameter in own),
                bytes=sum(tensor_bytes(parameter) for parameter in own),
            )
        )
    # Experts that two layers share are one set of parameters with two callers: they are left as they are.
    uses = [name for layer in found for name in layer.tensors]
    return [layer for layer in found if all(uses.count(name) == 1 for name in layer.tensors)]


def _is_fused(module: nn.Module, own: Sequence[nn.Parameter]) -> bool:
    """What ``use_experts_implementation`` decorates, all of whose parameters have an expert per row."""
    count = getattr(module, "num_experts", None)
    return (
        isinstance(count, int)
        and count > 1
        and getattr(module, "_is_expert_parallel", None) is False
        and implementation(module) in IMPLEMENTATIONS
        and all(parameter.dim() >= 2 and parameter.shape[0] == count for parameter in own)
    )


def without_experts(partition: Partition, layers: Sequence[ExpertLayer], names: frozenset[str]) -> Partition:
    """A partition that was made with the experts' parameters ``names`` to stay, without them."""
    kept = tuple(name for name in partition.loose if name not in names)
    return replace(
        partition,
        loose=kept,
        loose_bytes=partition.loose_bytes - sum(layer.bytes for layer in layers),
        elsewhere=partition.elsewhere + tuple(name for name in partition.loose if name in names),
    )


class CachedExperts:
    """All layers with cached experts of one handle."""

    def __init__(self, handle: WeightStreaming) -> None:
        self._handle = handle
        self._caches: dict[int, ExpertCache] = {}  # by index of the Streamed
        self._calls: list[ExpertCall] = []

    def place(self, layers: Sequence[ExpertLayer]) -> Iterator[Streamed]:
        """Bring the experts of each layer to where they rest, and make its slots."""
        if self._handle._recall is not None:
            raise UnsupportedError(
                "A plan with cached experts was to be put into force for training.",
                "Which experts a backward pass needs is not known when their slots are given to others.",
                "Plan without the technique 'experts', or fit the model for inference.",
            )
        choices = self._handle.plan.choices(NAME)
        for layer in layers:
            if layer.path in choices:
                yield self._place(layer, choices[layer.path])

    def _place(self, layer: ExpertLayer, choice: str) -> Streamed:
        handle, memory = self._handle, self._handle.memory
        module, placement = handle.model.get_submodule(layer.path), handle._placement
        parameters = [handle._parameters[name] for name in layer.tensors]
        parts = layer.parts(placement.source)
        layouts = equal_layouts(parts, in_files=memory.host is None)
        slot_bytes = max(layout.bytes for layout in layouts)
        slots = memory.compute.allocate(slot_bytes * handle.plan.settings[EXPERT_SLOTS], f"{layer.path}, slots")
        placement.buffers.append(slots)
        home = ExpertsHome([placement.source(name) for name in layer.tensors])
        try:
            for number, (sources, layout) in enumerate(zip(parts, layouts, strict=True)):
                values = [parameter.data[number] for parameter in parameters]
                name, tier = f"{layer.path}, expert {number}", RAM if choice == CACHE_RAM else DISK
                home.homes.append(placement.home_of(name, sources, values, tier, layout))
        except BaseException:
            home.free()
            raise
        block = Block(name=layer.path, triggers=(layer.path,), lookups=(), tensors=layer.tensors, bytes=layer.bytes)
        # Parameters at rest point to nothing: experts are in as many places as there are experts.
        streamed = Streamed(len(handle._streamed), block, parameters, home, memory.device, True, memory.fake)
        cache = ExpertCache(memory, home.homes, layer.path, slots, slot_bytes)
        self._caches[streamed.index] = cache
        self._calls.append(ExpertCall(handle, module, streamed, cache, slots))
        return streamed

    def install(self) -> None:
        if self._handle.memory.fake:  # without values nobody knows where tokens go; in the end all slots are full
            for cache in self._caches.values():
                cache.fill()
            return
        for call in self._calls:
            self._handle._guards.replace(call.module, "forward", torch.compiler.disable(call.forward))

    def has(self, streamed: Streamed) -> bool:
        return streamed.index in self._caches

    def forget(self, streamed: Streamed) -> None:
        """The values of a layer's experts have changed."""
        if streamed.index in self._caches:
            self._caches[streamed.index].forget()

    def let_go(self) -> None:
        for cache in self._caches.values():
            cache.done()

    def facts(self) -> dict[str, float]:
        caches = self._caches.values()
        return {"expert_hits": sum(c.hits for c in caches), "expert_loads": sum(c.loads for c in caches)}


def expert_layers(model: nn.Module, plan: Plan) -> list[ExpertLayer]:
    """The layers of which ``plan`` caches experts."""
    choices = plan.choices(NAME)
    return [layer for layer in find_experts(model) if layer.path in choices] if choices else []


def passing_sources(
    layers: Sequence[ExpertLayer], plan: Plan, source: Callable[[str], TensorSource]
) -> list[tuple[TensorSource, ...]]:
    """One expert of each layer that rests on disk: what a slot between disk and VRAM must hold."""
    choices = plan.choices(NAME)
    return [layer.parts(source)[0] for layer in layers if choices[layer.path] == CACHE_DISK]
