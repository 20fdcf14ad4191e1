"""Copies of activations from the compute tier to RAM and back, around a call that the CPU computes."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from brim.core.hardware import RAM
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import PAGE_BYTES, Buffer, round_up
from brim.memory.tiers import Memory
from brim.techniques.blocks import tensor_bytes

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
