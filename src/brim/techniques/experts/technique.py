"""Mixture of experts: each expert is a block, and each layer has a cache of a few of them in the compute tier.

A token needs 2 to 8 of a layer's 8 to 512 experts, so to move all of a layer is mostly waste. Here the experts of a
layer rest separately in RAM or on disk. The experts of a call's tokens are loaded into slots, and stay there by
use (``cache.Usage``). The rest of the layer is resident or streamed like any block.

transformers' experts are fused (``transformers/integrations/moe.py``): parameters of shape [experts, ...] and a
forward of hidden states, the indices of the experts chosen per token, and their weights. The model still chooses the
kernels (``experts_implementation``), so every bit of the result is the same. Older models have lists of modules, some
of which are called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from brim.core import Plan
from brim.core.hardware import DISK, RAM
from brim.errors import UnsupportedError
from brim.memory.backing_store import BackingStore, DiskStore, RamStore
from brim.memory.checkpoint_files import TensorSource, leading_slices
from brim.memory.layout import BlockLayout, equal_layouts, file_layout, packed_layout
from brim.memory.pool import Buffer
from brim.memory.transfer import Waitable
from brim.techniques.blocks import Block, Partition, tensor_bytes
from brim.techniques.experts.cache import ExpertCache
from brim.techniques.experts.calls import IMPLEMENTATIONS, ExpertCall, implementation
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.placement import Companion, Placement
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

NAME = "experts"
CACHE_RAM, CACHE_DISK = "cache:ram", "cache:disk"  # the tier of experts that are not in a slot
EXPERT_SLOTS = "expert_slots"  # a plan's setting: slots per layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """The experts of a layer, in the module at ``path``.

    Fused experts are the rows of its own parameters ``tensors``. In a list each of ``modules`` is an expert, and
    ``tensors`` are theirs, one expert after the other.
    """

    path: str
    count: int
    tensors: tuple[str, ...]
    bytes: int  # of all experts
    modules: tuple[str, ...] = ()

    def of_module(self, number: int) -> tuple[str, ...]:
        each = len(self.tensors) // self.count
        return self.tensors[number * each : (number + 1) * each]

    def parts(self, source: Callable[[str], TensorSource]) -> list[tuple[TensorSource, ...]]:
        """The sources of each expert's tensors, by the ``source`` of a parameter."""
        if self.modules:
            return [tuple(source(name) for name in self.of_module(number)) for number in range(self.count)]
        return list(zip(*(leading_slices(source(name)) for name in self.tensors), strict=True))

    def layouts(self, source: Callable[[str], TensorSource], *, in_ram: bool) -> list[BlockLayout]:
        """The layout of each expert in a slot, the same for all fused ones, whose slots are a single tensor.

        ``in_ram``: RAM is the compute tier, where the layout is that of the files if the model could be mapped from
        them. Experts that are stored one by one are put together in memory, as transformers does.
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
    # Experts that two layers share are parameters with two callers: they are not cached.
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
    """Return whether these modules have equal shapes and are named experts, unlike layers that are all called."""
    shapes = {
        (type(child), tuple((name, p.shape, p.dtype) for name, p in child.named_parameters()))
        for child in module.children()
    }
    named = "expert" in f"{type(module).__name__} {path.rpartition('.')[2]}".lower()
    return named and len(module) > 1 and len(shapes) == 1 and any(True for _ in module.parameters())


def _is_fused(module: nn.Module, own: Sequence[nn.Parameter]) -> bool:
    """Return whether ``use_experts_implementation`` decorates the module, and all its parameters have experts as
    rows.
    """
    count = getattr(module, "num_experts", None)
    return (
        isinstance(count, int)
        and count > 1
        and isinstance(getattr(module, "has_gate", None), bool)  # set by the decorator
        and not getattr(module, "_is_expert_parallel", False)  # before transformers 5.18 there is no such thing
        and implementation(module) in IMPLEMENTATIONS
        and all(parameter.dim() >= 2 and parameter.shape[0] == count for parameter in own)
    )


def without_experts(partition: Partition, layers: Sequence[ExpertLayer], names: frozenset[str]) -> Partition:
    """A partition without the experts' parameters ``names``, which were loose in it."""
    return replace(
        partition,
        loose=tuple(name for name in partition.loose if name not in names),
        loose_bytes=partition.loose_bytes - sum(layer.bytes for layer in layers),
    )


class CachedExperts(Companion):
    """The layers of a fitted model whose experts are cached."""

    def __init__(
        self, placement: Placement, streamed_blocks: StreamedBlocks, *, layers: Sequence[ExpertLayer]
    ) -> None:
        self._placement, self._streamed_blocks, self._memory = placement, streamed_blocks, placement.memory
        self._layers = layers
        self._calls: list[ExpertCall] = []
        self._lists: list[ListedExperts] = []

    def staged(self) -> list[tuple[TensorSource, ...]]:
        choices, source = self._placement.plan.choices(NAME), self._placement.source
        return [part for layer in self._layers if choices[layer.path] == CACHE_DISK for part in layer.parts(source)]

    def place(self) -> None:
        """Bring the experts of each layer to their backing stores, and allocate its slots."""
        if self._streamed_blocks.training:
            raise UnsupportedError(
                "Cannot train by a plan with cached experts.",
                "The backward pass may need experts whose slots are reused by then.",
                "Plan without the technique 'experts', or fit the model for inference.",
            )
        choices = self._placement.plan.choices(NAME)
        for layer in self._layers:
            place = self._place_list if layer.modules else self._place_fused
            place(layer, RAM if choices[layer.path] == CACHE_RAM else DISK)

    def _slots(self, layer: ExpertLayer) -> tuple[list[BlockLayout], Buffer, int]:
        """The layouts of a layer's experts, its slots in a single buffer, and the bytes of a slot."""
        layouts = layer.layouts(self._placement.source, in_ram=self._memory.host is None)
        slot_bytes = max(layout.bytes for layout in layouts)
        count = min(layer.count, self._placement.plan.settings[EXPERT_SLOTS])
        slots = self._memory.compute.allocate(slot_bytes * count, f"{layer.path}, slots")
        self._placement.buffers.append(slots)
        return layouts, slots, slot_bytes

    def _place_list(self, layer: ExpertLayer, tier: str) -> None:
        placement, memory = self._placement, self._memory
        stores: list[BackingStore] = []
        parts = layer.parts(placement.source)
        layouts, slots, slot_bytes = self._slots(layer)
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
        layouts, slots, slot_bytes = self._slots(layer)
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
        # Parameters at rest are hollow, as each expert is in a store of its own.
        streamed = self._streamed_blocks.add(block, parameters, store, in_pieces=True)
        cache = ExpertCache(memory, store.stores, layer.path, slots, slot_bytes)
        self._streamed_blocks.drop_copies[streamed.index] = cache.forget
        self._calls.append(ExpertCall(self._streamed_blocks, module, streamed, cache, slots))

    def install(self, guards: Guards) -> None:
        if self._memory.fake:  # without values the routing is unknown; all slots are full in the end
            for cache in self._all():
                cache.fill()
            return
        for call in self._calls:
            guards.replace(call.module, "forward", torch.compiler.disable(call.forward))

    def _all(self) -> list[ExpertCache]:
        return [*(call.cache for call in self._calls), *(listed.cache for listed in self._lists)]

    def begin_step(self) -> None:
        """End the calls of an interrupted step."""
        for cache in self._all():
            cache.end_call()
        for listed in self._lists:
            listed.begin_step()

    def facts(self) -> dict[str, float]:
        caches = self._all()
        return {"expert_hits": sum(c.hits for c in caches), "expert_loads": sum(c.loads for c in caches)}


class ListedExperts:
    """Loads experts that are modules of a list, by their index as blocks, as a Ring does."""

    def __init__(self, cache: ExpertCache, first: int) -> None:
        self.cache, self._first = cache, first
        self._called: dict[int, float] = {}  # in this step

    def begin_step(self) -> None:
        # Only at the end of the step: experts called late in a step are needed late in the next step.
        if self._called:
            self.cache.usage.visit(self._called)
            self._called = {}

    def acquire(self, index: int) -> Buffer:
        expert = index - self._first
        self._called[expert] = 1.0
        self.cache.expect([expert])
        return self.cache.part(self.cache.acquire(expert))

    def release(self, index: int) -> None:
        self.cache.release(index - self._first)

    def forget(self, indexes: Collection[int]) -> None:
        """Drop these if they are not in use: their values changed."""
        self.cache.forget({index - self._first for index in indexes})


def expert_layers(model: nn.Module, plan: Plan) -> list[ExpertLayer]:
    choices = plan.choices(NAME)
    return [layer for layer in find_experts(model) if layer.path in choices] if choices else []


class ExpertsStore:
    """A BackingStore of parameters [experts, ...], with a store for each expert. It is never loaded as a whole."""

    def __init__(self, sources: Sequence[TensorSource], tier: str) -> None:
        self.stores: list[RamStore | DiskStore] = []
        self.layout, self.tier = packed_layout(sources), tier

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        raise _one_by_one(label)

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        raise _one_by_one(label)

    def settle(self) -> None:
        for store in self.stores:
            store.settle()

    def rest(self) -> list[torch.Tensor | None]:
        return [None] * len(self.layout.tensors)

    def value(self, index: int) -> torch.Tensor:
        return torch.stack([store.value(index) for store in self.stores])

    def values(self) -> list[torch.Tensor]:
        return [self.value(index) for index in range(len(self.layout.tensors))]

    def written(self) -> list[bool]:
        return [False] * len(self.layout.tensors)  # parameters at rest are hollow

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for number, store in enumerate(self.stores):
            store.write_back([tensor[number] for tensor in tensors])

    def free(self) -> None:
        for store in self.stores:
            store.free()


def _one_by_one(label: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot move all of {label} to the compute tier at once.",
        "Its experts are moved one by one.",
        "Change them with load_state_dict, or call .brim.remove() first.",
    )
