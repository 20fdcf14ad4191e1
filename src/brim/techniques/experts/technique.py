"""Mixture of experts: each expert is a block of its own, with a cache of a few of them per layer in the compute tier.

A token needs 2 to 8 of a layer's 8 to 512 experts, so a layer that is moved as one moves mostly what nobody asked
for. Here the experts of a layer rest one by one in RAM or on disk; those that a call's tokens were routed to come
into slots, and stay there by use (``expert_cache``). The rest of the layer is resident or streamed like any block.

transformers' experts are fused (``transformers/integrations/moe.py``): parameters of shape [experts, ...] and a
forward of hidden states, the indices of the experts chosen per token, and their weights. Which kernels compute them
stays the model's choice (``experts_implementation``), and so does every bit of the result. Older ones are lists of
modules, some of which are called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from brim.core import Plan
from brim.core.hardware import DISK, RAM
from brim.errors import UnsupportedError
from brim.memory.backing_store import BackingStore
from brim.memory.checkpoint_files import TensorSource, leading_slices
from brim.memory.layout import BlockLayout, equal_layouts, file_layout, packed_layout
from brim.memory.pool import Buffer
from brim.techniques.blocks import Block, Partition, tensor_bytes
from brim.techniques.experts.backing_store import ExpertsStore
from brim.techniques.experts.cache import ExpertCache
from brim.techniques.experts.calls import IMPLEMENTATIONS, ExpertCall, implementation
from brim.techniques.streaming.block_state import Streamed
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.placement import Placement
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

NAME = "experts"
CACHE_RAM, CACHE_DISK = "cache:ram", "cache:disk"  # where the experts rest that are not in a slot
EXPERT_SLOTS = "expert_slots"  # a plan's setting: slots per layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """The experts of one layer, in the module at ``path``.

    Fused, its own parameters ``tensors`` have an expert per row. In a list each of ``modules`` is an expert, and
    ``tensors`` are theirs, one expert after the other.
    """

    path: str
    count: int
    tensors: tuple[str, ...]
    bytes: int  # of all experts
    modules: tuple[str, ...] = ()

    def of_module(self, number: int) -> tuple[str, ...]:
        """The tensors of an expert in a list."""
        each = len(self.tensors) // self.count
        return self.tensors[number * each : (number + 1) * each]

    def parts(self, source: Callable[[str], TensorSource]) -> list[tuple[TensorSource, ...]]:
        """Of each expert, what its tensors are made of; ``source`` says it of a parameter."""
        if self.modules:
            return [tuple(source(name) for name in self.of_module(number)) for number in range(self.count)]
        return list(zip(*(leading_slices(source(name)) for name in self.tensors), strict=True))

    def layouts(self, source: Callable[[str], TensorSource], *, in_ram: bool) -> list[BlockLayout]:
        """The form of each expert in a slot. Of fused ones the slots are one tensor, so it is the same for all.

        ``in_ram``: RAM is the compute tier, where the form is that in the files if the model would be mapped from
        them. Experts that the files hold one by one are put together in memory, as transformers does.
        """
        parts = self.parts(source)
        in_files = in_ram and all(source(name).is_mappable for name in self.tensors)
        if self.modules:
            return [(file_layout if in_ram else packed_layout)(each) for each in parts]
        return equal_layouts(parts, in_files=in_files)


def find_experts(model: nn.Module) -> list[ExpertLayer]:
    """The layers of ``model`` whose experts can be cached, in definition order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = [layer for layer in (_layer(path, module, names) for path, module in model.named_modules()) if layer]
    # Experts that two layers share are one set of parameters with two callers: they are left as they are.
    uses = [name for layer in layers for name in layer.tensors]
    return [layer for layer in layers if all(uses.count(name) == 1 for name in layer.tensors)]


def _layer(path: str, module: nn.Module, names: Mapping[int, str]) -> ExpertLayer | None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        modules = tuple(f"{path}.{name}" for name, _ in module.named_children()) if _is_list(path, module) else ()
        own = [parameter for child in module.children() for parameter in child.parameters()] if modules else []
    else:
        modules, own = (), [parameter for parameter in module._parameters.values() if parameter is not None]
        own = own if own and _is_fused(module, own) else []
    if not own:
        return None
    return ExpertLayer(
        path=path,
        count=len(modules) or int(module.num_experts),  # type: ignore[arg-type]
        tensors=tuple(names[id(parameter)] for parameter in own),
        bytes=sum(tensor_bytes(parameter) for parameter in own),
        modules=modules,
    )


def _is_list(path: str, module: nn.ModuleList | nn.ModuleDict) -> bool:
    """Modules of one form, by name experts: what else tells a router's choice from layers that are all called?"""
    forms = {
        (type(child), tuple((name, p.shape, p.dtype) for name, p in child.named_parameters()))
        for child in module.children()
    }
    named = "expert" in f"{type(module).__name__} {path.rpartition('.')[2]}".lower()
    return named and len(module) > 1 and len(forms) == 1 and any(True for _ in module.parameters())


def _is_fused(module: nn.Module, own: Sequence[nn.Parameter]) -> bool:
    """What ``use_experts_implementation`` decorates, all of whose parameters have an expert per row."""
    count = getattr(module, "num_experts", None)
    return (
        isinstance(count, int)
        and count > 1
        and isinstance(getattr(module, "has_gate", None), bool)  # as the decorator says of each
        and not getattr(module, "_is_expert_parallel", False)  # before transformers 5.18 there is no such thing
        and implementation(module) in IMPLEMENTATIONS
        and all(parameter.dim() >= 2 and parameter.shape[0] == count for parameter in own)
    )


def without_experts(partition: Partition, layers: Sequence[ExpertLayer], names: frozenset[str]) -> Partition:
    """A partition that was made with the experts' parameters ``names`` to stay, without them."""
    return replace(
        partition,
        loose=tuple(name for name in partition.loose if name not in names),
        loose_bytes=partition.loose_bytes - sum(layer.bytes for layer in layers),
    )


class CachedExperts:
    """All layers with cached experts of one fitted model."""

    def __init__(self, placement: Placement, streamed_blocks: StreamedBlocks) -> None:
        self._placement, self._streamed_blocks, self._memory = placement, streamed_blocks, placement.memory
        self._caches: dict[int, ExpertCache] = {}  # by index of the Streamed
        self._calls: list[ExpertCall] = []
        self._lists: list[ListedExperts] = []

    def place(self, layers: Sequence[ExpertLayer]) -> None:
        """Bring the experts of each layer to where they rest, and make its slots."""
        if self._streamed_blocks.training:
            raise UnsupportedError(
                "Cannot train by a plan with cached experts.",
                "Slots are reused before it is known which experts a backward pass needs.",
                "Plan without the technique 'experts', or fit the model for inference.",
            )
        choices = self._placement.plan.choices(NAME)
        for layer in layers:
            place = self._place_list if layer.modules else self._place_fused
            place(layer, RAM if choices[layer.path] == CACHE_RAM else DISK)

    def _slots(self, layer: ExpertLayer, layouts: Sequence[BlockLayout]) -> tuple[Buffer, int]:
        """The slots of a layer in one buffer, and the bytes of one."""
        slot_bytes = max(layout.bytes for layout in layouts)
        count = min(layer.count, self._placement.plan.settings[EXPERT_SLOTS])
        slots = self._memory.compute.allocate(slot_bytes * count, f"{layer.path}, slots")
        self._placement.buffers.append(slots)
        return slots, slot_bytes

    def _place_list(self, layer: ExpertLayer, tier: str) -> None:
        placement, memory = self._placement, self._memory
        stores: list[BackingStore] = []
        parts = layer.parts(placement.source)
        layouts = layer.layouts(placement.source, in_ram=memory.host is None)
        slots, slot_bytes = self._slots(layer, layouts)
        listed = ListedExperts(ExpertCache(memory, stores, layer.path, slots, slot_bytes), len(self._streamed_blocks))
        self._lists.append(listed)
        for number, path in enumerate(layer.modules):
            names = layer.of_module(number)
            bytes = sum(source.bytes for source in parts[number])
            block = Block(name=path, triggers=(path,), lookups=(), tensors=names, bytes=bytes)
            parameters = [placement.parameters[name] for name in names]
            values = [parameter.data for parameter in parameters]
            stores.append(placement.store_of(path, parts[number], values, tier, layouts[number]))
            streamed = self._streamed_blocks.add(block, parameters, stores[-1])
            self._streamed_blocks.carriers[streamed.index] = listed

    def _place_fused(self, layer: ExpertLayer, tier: str) -> None:
        placement, memory = self._placement, self._memory
        module = placement.model.get_submodule(layer.path)
        parameters = [placement.parameters[name] for name in layer.tensors]
        parts = layer.parts(placement.source)
        layouts = layer.layouts(placement.source, in_ram=memory.host is None)
        slots, slot_bytes = self._slots(layer, layouts)
        store = ExpertsStore([placement.source(name) for name in layer.tensors], tier)
        try:
            for number, (sources, layout) in enumerate(zip(parts, layouts, strict=True)):
                values = [parameter.data[number] for parameter in parameters]
                name = f"{layer.path}, expert {number}"
                store.stores.append(placement.store_of(name, sources, values, tier, layout))
        except BaseException:
            store.free()
            raise
        block = Block(name=layer.path, triggers=(layer.path,), lookups=(), tensors=layer.tensors, bytes=layer.bytes)
        # Parameters at rest point to nothing: experts are in as many places as there are experts.
        streamed = self._streamed_blocks.add(block, parameters, store, in_pieces=True)
        cache = ExpertCache(memory, store.stores, layer.path, slots, slot_bytes)
        self._caches[streamed.index] = cache
        self._streamed_blocks.drop_copies[streamed.index] = cache.forget
        self._calls.append(ExpertCall(self._streamed_blocks, module, streamed, cache, slots))

    def install(self, guards: Guards) -> None:
        if self._memory.fake:  # without values nobody knows where tokens go; in the end all slots are full
            for cache in self._all():
                cache.fill()
            return
        for call in self._calls:
            guards.replace(call.module, "forward", torch.compiler.disable(call.forward))

    def has(self, streamed: Streamed) -> bool:
        """Whether these are the experts of a whole layer, which come by themselves when it is called."""
        return streamed.index in self._caches

    def _all(self) -> list[ExpertCache]:
        return [*self._caches.values(), *(listed.cache for listed in self._lists)]

    def begin_step(self) -> None:
        """The whole model is called: what an interrupted call left is over."""
        for cache in self._all():
            cache.done()
        for listed in self._lists:
            listed.begin_step()

    def facts(self) -> dict[str, float]:
        caches = self._all()
        return {"expert_hits": sum(c.hits for c in caches), "expert_loads": sum(c.loads for c in caches)}


class ListedExperts:
    """Brings experts that are modules of a list, as a Ring brings blocks: by the index of each."""

    def __init__(self, cache: ExpertCache, first: int) -> None:
        self.cache, self._first = cache, first
        self._called: dict[int, float] = {}  # in this step; which others will be, nobody says

    def begin_step(self) -> None:
        # Only now: experts that were called a moment ago are those needed last in the next step.
        if self._called:
            self.cache.usage.visit(self._called)
            self._called = {}

    def acquire(self, index: int) -> Buffer:
        """The slot that holds the expert."""
        expert = index - self._first
        self._called[expert] = 1.0
        self.cache.expect([expert])
        return self.cache.part(self.cache.acquire(expert))

    def release(self, index: int) -> None:
        self.cache.release(index - self._first)

    def forget(self, indexes: Collection[int]) -> None:
        """Drop these where they are not in use: their values changed."""
        self.cache.forget({index - self._first for index in indexes})


def expert_layers(model: nn.Module, plan: Plan) -> list[ExpertLayer]:
    """The layers whose experts ``plan`` caches."""
    choices = plan.choices(NAME)
    return [layer for layer in find_experts(model) if layer.path in choices] if choices else []


def passing_sources(
    layers: Sequence[ExpertLayer], plan: Plan, source: Callable[[str], TensorSource]
) -> list[tuple[TensorSource, ...]]:
    """The experts of each layer that rests on disk: what a slot between disk and VRAM must hold, one at a time."""
    choices = plan.choices(NAME)
    return [part for layer in layers if choices[layer.path] == CACHE_DISK for part in layer.parts(source)]
