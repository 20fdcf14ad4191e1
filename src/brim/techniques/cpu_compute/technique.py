"""CPU compute: the CPU computes blocks whose weights rest in RAM, while the link copies other blocks.

A decode step at batch 1 reads every weight once and computes little with it. The weights beyond the compute tier are
read by both at once: the link copies some of them, the CPU reads the rest in RAM. Then a step takes
overflow / (link + RAM) seconds, both in bytes per second (cf. PowerInfer, arXiv:2312.12456, and llama.cpp's layers on
the CPU, beside which the link is idle).

A call's inputs are copied to RAM, its outputs back. The states that a block keeps between calls (keys and values in a
cache) are created in RAM and stay there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from brim.core.hardware import RAM
from brim.errors import UnsupportedError, UsageError
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import PAGE_BYTES, Buffer, round_up
from brim.memory.tiers import Memory
from brim.techniques.base import refuse_gradients
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.placement import COMPUTE_RAM, Companion, Placement, computable
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

# A plan's setting: the page-locked RAM that activations are copied through; it grows where needed.
TRANSFER_BYTES = "transfer_bytes"


class HostCompute(Companion):
    """The blocks of a fitted model that the CPU computes."""

    def __init__(self, placement: Placement, streamed_blocks: StreamedBlocks, *, partition: Partition) -> None:
        self._placement, self._streamed_blocks, self._computable = placement, streamed_blocks, computable(partition)
        self._blocks: dict[str, list[StreamedBlock]] = {}  # by the path of the module that needs them
        if streamed_blocks.training:
            raise UnsupportedError(
                "Cannot train with a plan in which the CPU computes some blocks.",
                "That is for inference: the activations of these blocks are in RAM, where backward cannot use them.",
                "Plan without compute:ram, or fit the model for inference.",
            )
        if streamed_blocks.memory.host is None:
            raise UsageError(
                "Cannot apply a plan in which the CPU computes some blocks beside a GPU.",
                "This machine has no GPU: the CPU computes all blocks.",
                "Make the plan for this machine.",
            )
        self.transfer = ActivationTransfer(streamed_blocks.memory)

    def prepare(self) -> None:
        self.transfer.make_room(self._placement.plan.settings.get(TRANSFER_BYTES, 0))

    def take(self, streamed: StreamedBlock, choice: str) -> None:
        if choice != COMPUTE_RAM:
            return
        block = streamed.block
        if block.name not in self._computable:
            raise UnsupportedError(
                f"Cannot compute {block.name} on the CPU.",
                "Its modules use parameters of other blocks, which may be in another tier.",
                "Plan it as resident or streamed.",
            )
        for trigger in block.triggers:
            if trigger not in block.lookups:  # look-ups read rows at rest in any case
                self._blocks.setdefault(trigger, []).append(streamed)
        self._streamed_blocks.gathering[streamed.index] = self.bound

    @contextlib.contextmanager
    def bound(self, streamed: StreamedBlock) -> Iterator[None]:
        """Bind the parameters to RAM while the block is in use."""
        if not streamed.uses:
            self._streamed_blocks.adopt_changes(streamed)
            streamed.store.settle()
            if not streamed.fake:
                self._streamed_blocks.bind(streamed, [view for view in streamed.store.rest() if view is not None])
        streamed.uses += 1
        try:
            yield
        finally:
            streamed.uses -= 1
            if not streamed.uses:
                if streamed.is_changed():
                    streamed.store.write_back([p.data for p in streamed.parameters])
                streamed.rest()

    def install(self, guards: Guards) -> None:
        for trigger, blocks in self._blocks.items():
            module = self._placement.model.get_submodule(trigger)
            call = _Call(self, module, blocks)
            guards.replace(module, "forward", torch.compiler.disable(call.forward))

    def free(self) -> None:
        self.transfer.free()


class _Call:
    """Replaces the forward of a module. Its hooks still get tensors of the compute tier."""

    def __init__(self, host: HostCompute, module: nn.Module, blocks: Sequence[StreamedBlock]) -> None:
        self._host, self._module, self._blocks = host, module, blocks
        self._forward: Callable[..., Any] = module.forward  # of the instance, or of its class
        self._label = f"{blocks[0].block.name}, activations"
        # transformers' modules with states in a cache have the index of their layer.
        layer_indexes = (getattr(part, "layer_idx", None) for part in module.modules())
        self._layers = frozenset(index for index in layer_indexes if isinstance(index, int))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            refuse_gradients(
                [*args, *kwargs.values(), *self._module.parameters()],
                f"Cannot compute gradients through {self._blocks[0].block.name}, which the CPU computes.",
                "Blocks that the CPU computes from RAM are for inference only.",
                "Run the model under torch.no_grad(), or fit it for training.",
            )
        rest_in(CPU, (args, kwargs), self._layers)
        return self._host.transfer.call(self._with_weights, self._label, args, kwargs)

    def _with_weights(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for streamed in self._blocks:
                stack.enter_context(self._host.bound(streamed))
            return self._forward(*args, **kwargs)


def rest_in(device: torch.device, arguments: Any, layers: Collection[int]) -> None:
    """Move the states of ``layers`` in every cache among ``arguments`` to ``device``, permanently.

    transformers' caches (``transformers.cache_utils.Cache``) have an object per layer, which takes the device of its
    first input: only a cache that was filled or laid out elsewhere has to be moved. Raises UnsupportedError for a
    cache that moves its layers itself.
    """
    for cache in _caches(arguments):
        if getattr(cache, "offloading", False):
            raise UnsupportedError(
                "Cannot use a cache that offloads its layers with a block that the CPU computes.",
                "It would move the keys and values of that block back to the device.",
                "Use a plain DynamicCache: blocks that the CPU computes keep their part of it in RAM.",
            )
        for index in layers:
            if index < len(cache.layers):
                _move(cache.layers[index], device)


def _caches(arguments: Any) -> Iterator[Any]:
    """The caches with a list of layers in ``arguments``, also an encoder's and a decoder's in one object."""
    # A cache is a leaf here, even if it is registered as a container.
    for leaf in pytree.tree_leaves(arguments, is_leaf=lambda value: not isinstance(value, (list, tuple, dict))):
        nested = [getattr(leaf, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
        yield from (cache for cache in (leaf, *nested) if isinstance(getattr(cache, "layers", None), list))


def _move(layer: Any, device: torch.device) -> None:
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and value.device.type != device.type:
            setattr(layer, name, value.to(device))
        elif isinstance(value, dict):  # several states, by number
            for key, state in value.items():
                if isinstance(state, torch.Tensor) and state.device.type != device.type:
                    value[key] = state.to(device)
        elif isinstance(value, torch.device) and value.type != device.type:
            setattr(layer, name, device)


CPU = torch.device("cpu")
_CHANGEABLE = (list, dict, OrderedDict, defaultdict)


class ActivationTransfer:
    """Copies activations between the tiers through a buffer of page-locked RAM.

    The copies are newly allocated, with the same strides, so that callers may keep them. The buffer grows where a
    call needs more; then BudgetError is raised if the pool has no room.

    Copies are ordered with compute. In the queue that prefetches blocks they would wait for entire blocks.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._buffer: Buffer | None = None

    def free(self) -> None:
        if self._buffer is not None:
            self._buffer.free()
            self._buffer = None

    def call(self, function: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function`` with its arguments in RAM, and copy its result and in-place changes back."""
        visit = _Visit(self, label, args, kwargs)
        return visit.come_back(function(*visit.args, **visit.kwargs))

    def to_ram(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Copy tensors to RAM, after all compute on them."""
        engine, tier = self.memory.engine, self.memory.compute.tier
        # In-place changes must show in the versions of the copies, which inference mode would not count.
        with torch.inference_mode(False), torch.no_grad():
            dense = [_dense(tensor) for tensor in tensors]
            parts = self._parts(dense)
            for source, part in zip(dense, parts, strict=True):
                engine.cross(_bytes(source), _bytes(part), label, (tier, RAM))
            engine.finish(engine.mark())
            return [_like(tensor, part) for tensor, part in zip(tensors, parts, strict=True)]

    def to_device(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Copy tensors to the compute tier, for compute that is queued from now on."""
        memory, moved = self.memory, []
        dense = [_dense(tensor) for tensor in tensors]
        for tensor, source, part in zip(tensors, dense, self._parts(dense), strict=True):
            part.copy_(source)
            arrived = torch.empty(part.shape, dtype=part.dtype, device=memory.device)
            memory.engine.cross(_bytes(part), _bytes(arrived), label, (RAM, memory.compute.tier))
            same = (arrived.shape, arrived.stride()) == (tensor.shape, tensor.stride())
            moved.append(arrived if same else _like(tensor, arrived))
        return moved

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A part of the buffer for each tensor, in its shape."""
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end = round_up(end + tensor_bytes(tensor), PACKED_ALIGNMENT_BYTES)
        self.make_room(end)
        if self._buffer is None:  # they are all empty
            return [torch.empty_like(tensor, device=CPU) for tensor in tensors]
        buffer = self._buffer.tensor
        return [
            buffer[begin : begin + tensor_bytes(t)].view(t.dtype).view(t.shape)
            for begin, t in zip(begins, tensors, strict=True)
        ]

    def make_room(self, bytes: int) -> None:
        if bytes > (0 if self._buffer is None else self._buffer.bytes):
            self.free()
            self._buffer = self.memory.ram.allocate(round_up(bytes, PAGE_BYTES), "transfer buffer")


class _Visit:
    """The arguments of a call in RAM, and the copy of its results back."""

    def __init__(
        self, transfer: ActivationTransfer, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._transfer, self._label = transfer, label
        tensors = _tensors([args, kwargs])
        self._originals = [t for t in tensors if t.device.type == transfer.memory.device.type]
        self._copies = transfer.to_ram(self._originals, label)
        self._versions = [copied._version for copied in self._copies]
        moved = {id(o): c for o, c in zip(self._originals, self._copies, strict=True)}
        self._stay = [t for t in tensors if id(t) not in moved]  # on the CPU already
        mapping = _Mapping(lambda t: moved.get(id(t), t))
        self.args, self.kwargs = tuple(mapping(value) for value in args), {k: mapping(v) for k, v in kwargs.items()}
        self._containers = [pair for pair in mapping.met.values() if type(pair[0]) in _CHANGEABLE]

    def come_back(self, output: Any) -> Any:
        """``output`` with its tensors in the compute tier; in-place changes of arguments are copied there."""
        home = {id(c): o for o, c in zip(self._originals, self._copies, strict=True)} | {id(t): t for t in self._stay}
        versioned_copies = zip(self._copies, self._versions, strict=True)
        changed = [copied for copied, version in versioned_copies if copied._version != version]
        everything = [output, *(inside for _, inside in self._containers)]
        new = [t for t in _tensors(everything) if id(t) not in home and t.device.type == CPU.type]
        arrived = self._transfer.to_device([*changed, *new], self._label)
        for copied, value in zip(changed, arrived, strict=False):
            home[id(copied)].copy_(value)
        home |= {id(t): value for t, value in zip(new, arrived[len(changed) :], strict=True)}
        mapping = _Mapping(lambda t: home.get(id(t), t))
        for outside, inside in self._containers:
            mapping.met[id(inside)] = inside, outside
        for outside, inside in self._containers:
            _refill(outside, mapping.children(inside))
        return mapping(output)


class _Mapping:
    """Copies nested containers with other tensors in them; those without other tensors are not copied.

    A container that occurs again is replaced by the same copy. Special containers (a cache) stay as they are.
    """

    def __init__(self, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._new = new
        self.met: dict[int, tuple[Any, Any]] = {}  # id -> the container, what it became

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._new(value) if value.layout is torch.strided else value
        if id(value) in self.met:
            return self.met[id(value)][1]
        if isinstance(value, (list, tuple, dict)):
            self.met[id(value)] = value, value  # for a container that pytree does not know
            self.met[id(value)] = value, self.children(value)
            return self.met[id(value)][1]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        return value

    def children(self, value: Any) -> Any:
        were, structure = _parts_of(value)
        parts = [self(part) for part in were]
        if all(before is after for before, after in zip(were, parts, strict=True)):
            return value
        return pytree.tree_unflatten(parts, structure)

    def _dataclass(self, value: Any) -> Any:
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        mapped = {name: self(part) for name, part in parts.items()}
        if all(part is parts[name] for name, part in mapped.items()):
            return value
        copied = copy.copy(value)
        for name, part in mapped.items():
            object.__setattr__(copied, name, part)
        return copied


def _parts_of(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    outer = [value]
    try:
        return pytree.tree_flatten(value, is_leaf=lambda part: part is not outer[0])
    finally:
        # pytree's inner function refers to itself, and so keeps ``is_leaf`` alive until garbage is collected.
        outer.clear()


def _refill(container: Any, values: Any) -> None:
    """Replace the contents of the list or dict ``container`` by ``values``."""
    if values is container:
        return
    if isinstance(container, list):
        container[:] = values
    else:
        items = dict(values)
        container.clear()
        container.update(items)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    tensors_by_id: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors_by_id[id(tensor)] = tensor
        return tensor

    mapping = _Mapping(note)
    for value in values:
        mapping(value)
    return list(tensors_by_id.values())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor without repeated values: expanded dimensions have a size of one."""
    return _narrowed(tensor.detach()).resolve_conj().resolve_neg().contiguous()


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _like(tensor: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """A copy of ``dense`` on its device, with the shape and the strides of ``tensor``.

    Kernels are chosen by strides: other strides can give other bits.
    """
    narrow = _narrowed(tensor)
    strided = torch.empty_strided(narrow.shape, narrow.stride(), dtype=tensor.dtype, device=dense.device)
    return strided.copy_(dense).expand(tensor.shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
