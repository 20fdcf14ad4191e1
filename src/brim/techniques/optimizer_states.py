"""An optimizer's states, block by block: where they rest, and how they come to the optimizer and go again.

While they are away, ``optimizer.state[p]`` has its keys in their order, with an ``Away`` for each tensor that left.
Single numbers (``step``) stay: they are nothing, and optimizers branch on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from brim.core.hardware import DISK
from brim.errors import UsageError
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import Buffer, round_up
from brim.memory.tiers import Memory
from brim.techniques.away import Away, away
from brim.techniques.optimizer_trial import Kept, Trial
from brim.techniques.records import Records

_TODO = "Read states by handle.iter_state() or optimizer.state_dict(), or call handle.remove() first."


@dataclass(frozen=True, kw_only=True, eq=False)
class StateBlock:
    """Parameters whose states come and go together. ``bytes`` are theirs, ``state_bytes`` those of the states."""

    name: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    kept: tuple[tuple[Kept, ...], ...]
    bytes: int
    state_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A tensor in a record: of the block's parameter number ``parameter``, at ``offset``."""

    parameter: int
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in the record ``flat`` (uint8)."""
        return self.view_alone(flat[self.offset : self.offset + self.bytes])

    def view_alone(self, part: torch.Tensor) -> torch.Tensor:
        """The tensor whose bytes (uint8) are ``part``."""
        return shaped(part, self.dtype, self.shape, self.stride)


def shaped(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Bytes (uint8, one-dimensional) seen as a tensor whose elements fill them."""
    with torch.inference_mode(False):
        typed = flat.view(dtype)
        return typed.as_strided(tuple(shape), tuple(stride), typed.storage_offset())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor whose elements fill one run of it, as bytes; a change here is one there."""
    data = tensor.detach()
    return data.as_strided((data.numel(),), (1,), data.storage_offset()).view(torch.uint8)


def lay_out(kept: Sequence[Sequence[Kept]]) -> tuple[list[Field], int]:
    """Places for what is kept for each parameter, aligned as kernels like it, and the bytes of it all."""
    fields, end = [], 0
    for index, tensors in enumerate(kept):
        for one in tensors:
            begin = round_up(end, PACKED_ALIGNMENT_BYTES)
            fields.append(
                Field(
                    parameter=index,
                    key=one.key,
                    dtype=one.dtype,
                    shape=one.shape,
                    stride=one.stride,
                    offset=begin,
                )
            )
            end = begin + fields[-1].bytes
    return fields, end


class States:
    """The states of ``blocks`` (by number) in records. Those that the optimizer has already are taken at once."""

    def __init__(
        self,
        optimizer: Optimizer,
        memory: Memory,
        blocks: Mapping[int, StateBlock],
        *,
        tier: str,
        buffer_bytes: int,
    ) -> None:
        self._optimizer, self._memory, self._blocks = optimizer, memory, blocks
        laid = {index: lay_out(block.kept) for index, block in blocks.items()}
        self._fields = {index: fields for index, (fields, _) in laid.items()}
        sizes = {index: bytes for index, (_, bytes) in laid.items() if bytes}
        self.records = Records(memory, sizes, tier=tier, buffer_bytes=buffer_bytes, label="optimizer states")
        where = "the disk" if tier == DISK else "RAM"
        self._todo = f"They are in {where}. {_TODO}"

    def state(self, index: int, parameter: int) -> dict[str, Any]:
        """The optimizer's own dictionary; empty and not entered where there is none."""
        found: dict[str, Any] = self._optimizer.state.get(self._blocks[index].parameters[parameter], {})
        return found

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch the states of these blocks."""
        self.records.expect([index for index in indices if index in self._blocks and self._is_away(index)])

    def _is_away(self, index: int) -> bool:
        return any(type(self.state(index, f.parameter).get(f.key)) is Away for f in self._fields[index])

    @contextlib.contextmanager
    def present(self, index: int, *, stepping: Sequence[bool] = ()) -> Iterator[None]:
        """Within: the block's states are in the optimizer. What it makes or changes there goes with them.

        ``stepping`` says of each parameter whether it will be stepped. What a first step makes by ``zeros_like`` of
        the parameter is made in the record at once; the bytes of states that it makes otherwise are held against the
        budget until they are in it.
        """
        fields = self._fields[index]
        if not fields:
            yield
            return
        news = [f for f in fields if any(stepping) and stepping[f.parameter] and not self.state(index, f.parameter)]
        flat = self.records.enter(index, empty=not self._is_away(index))
        births = _Births({id(p): p for p in self._blocks[index].parameters}, self._places(index, news, flat))
        passing: Buffer | None = None
        try:
            for field in fields:
                state = self.state(index, field.parameter)
                if type(state.get(field.key)) is Away:
                    state[field.key] = field.view(flat)
            with births if news else contextlib.nullcontext():
                yield
            made = births.left_bytes
            passing = self._memory.ram.account(made, "new states") if made else None
        finally:
            self._take(index, flat)
            if passing is not None:
                passing.free()
            self.records.leave(index)

    def _places(self, index: int, news: Sequence[Field], flat: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        """Where the new states of each parameter (by identity) will rest, in the order of their making."""
        parameters = self._blocks[index].parameters
        found: dict[int, list[torch.Tensor]] = {}
        for field in news:
            found.setdefault(id(parameters[field.parameter]), []).append(field.view(flat))
        return found

    def _take(self, index: int, flat: torch.Tensor) -> None:
        """Whatever the optimizer has for the block now goes into the record."""
        for field in self._fields[index]:
            state = self.state(index, field.parameter)
            value = state.get(field.key)
            if not isinstance(value, torch.Tensor) or type(value) is Away:
                continue
            if (value.dtype, tuple(value.shape)) != (field.dtype, field.shape):
                continue  # it changed its kind: then it stays where the optimizer put it
            place = field.view(flat)
            inside = value.untyped_storage()._cdata == flat.untyped_storage()._cdata
            if not inside or value.storage_offset() != place.storage_offset():
                place.copy_(value)
            state[field.key] = self._away(index, field)

    def _away(self, index: int, field: Field) -> Away:
        block = self._blocks[index]
        device = block.parameters[field.parameter].device
        what = f"The optimizer state {block.names[field.parameter]}.{field.key}"
        return away(field.shape, field.stride, field.dtype, device, what=what, todo=self._todo)

    def take_all(self) -> None:
        """Take the states that the optimizer has in memory (it was loaded, or had stepped before)."""
        for index in self._blocks:
            if any(type(self.state(index, f.parameter).get(f.key)) is torch.Tensor for f in self._fields[index]):
                with self.present(index):
                    pass

    # -- one at a time

    def value(self, index: int, field: Field) -> torch.Tensor:
        """A state in memory of its own, on the CPU."""
        return field.view_alone(self.records.get(index, field.offset, field.bytes))

    def away_fields(self, index: int, parameter: int) -> dict[str, Field]:
        """Of one parameter, what is away now, by key."""
        state = self.state(index, parameter)
        fields = [field for field in self._fields[index] if field.parameter == parameter]
        return {field.key: field for field in fields if type(state.get(field.key)) is Away}

    def load(self, index: int, parameter: int, key: str, tensor: torch.Tensor, sample: Mapping[str, Any]) -> None:
        """Make ``tensor`` a state of a parameter. Raises UsageError where it does not fit."""
        block = self._blocks[index]
        state = self._optimizer.state[block.parameters[parameter]]
        name = f"{block.names[parameter]}.{key}"
        field = next((f for f in self._fields[index] if (f.parameter, f.key) == (parameter, key)), None)
        if field is None:
            state[key] = as_number(tensor, sample.get(key))
            return
        if tuple(tensor.shape) != field.shape:
            raise UsageError(
                f"{name} was to become {list(tensor.shape)}.",
                f"The optimizer keeps {list(field.shape)} for this parameter.",
                "Load what was saved for this model with this optimizer and its options.",
            )
        made = torch.empty_strided(field.shape, field.stride, dtype=field.dtype).copy_(tensor)
        self.records.put(index, field.offset, flat_bytes(made))
        state[key] = self._away(index, field)

    def restore(self) -> None:
        """Give the optimizer all states as tensors again, each on its parameter's device.

        After an error it can be called again: what came back is not fetched twice.
        """
        for index, block in self._blocks.items():
            for number, parameter in enumerate(block.parameters):
                for key, field in self.away_fields(index, number).items():
                    self.state(index, number)[key] = self.value(index, field).to(parameter.device)


class _Births(TorchDispatchMode):
    """Lets what an optimizer's first step makes by ``zeros_like`` of a parameter come into being where it will rest.

    Else a step would hold it twice for a moment, and of the largest block that may be the peak of all. What was not
    made that way is found by its storage and copied.
    """

    def __init__(self, parameters: Mapping[int, torch.Tensor], places: dict[int, list[torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters, self._places = parameters, places

    @property
    def left_bytes(self) -> int:
        """Of the states that were to come, those that were made elsewhere."""
        return sum(place.numel() * place.element_size() for places in self._places.values() for place in places)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = self._places.get(id(args[0])) if func is torch.ops.aten.zeros_like.default else None
        if places and self._parameters[id(args[0])] is args[0]:
            wanted = (kwargs or {}).get("dtype") or args[0].dtype
            if (places[0].dtype, places[0].shape) == (wanted, args[0].shape):
                return places.pop(0).zero_()
        return func(*args, **(kwargs or {}))


def as_number(tensor: torch.Tensor, sample: Any) -> Any:
    """``tensor`` as the kind of value that an optimizer keeps where ``sample`` is one of its own."""
    if isinstance(sample, torch.Tensor):
        return tensor.to(sample.dtype).clone() if sample.dim() == 0 else tensor.clone()
    return tensor.clone() if sample is None else type(sample)(tensor.item())


def state_blocks(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    block_bytes: int,
    given: Sequence[tuple[str, Sequence[nn.Parameter]]] = (),
    trial: Trial | None = None,
) -> list[StateBlock]:
    """The trainable parameters of ``optimizer`` as blocks of at most ``block_bytes``, in the model's order.

    Those in ``given`` (names and parameters: the blocks of weight streaming) are blocks as they are. A parameter
    larger than the bound is a block of its own. Raises UnsupportedError for an optimizer that needs all at once.
    """
    trial = trial or Trial(optimizer)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found = {id(p): name for name, p in model.named_parameters()}
    order = {id(p): p for p in model.parameters() if id(p) in groups}
    order |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    names = {key: found.get(key, f"parameter {number}") for number, key in enumerate(order)}
    open_ = {key: p for key, p in order.items() if p.requires_grad}
    parts: list[tuple[str, list[nn.Parameter]]] = []
    for name, parameters in given:
        mine = [open_.pop(id(p)) for p in parameters if id(p) in open_]
        parts += [(name, mine)] if mine else []
    for group in _within(list(open_.values()), block_bytes):
        parts.append((names[id(group[0])], group))
    made = []
    for name, parameters in parts:
        kept = tuple(tuple(trial.kept(groups[id(p)], p)) for p in parameters)
        made.append(
            StateBlock(
                name=name,
                names=tuple(names[id(p)] for p in parameters),
                parameters=tuple(parameters),
                kept=kept,
                bytes=sum(p.numel() * p.element_size() for p in parameters),
                state_bytes=lay_out(kept)[1],
            )
        )
    return made


def _within(parameters: Sequence[nn.Parameter], block_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours together, up to a bound."""
    groups: list[list[nn.Parameter]] = []
    held = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not groups or held + size > block_bytes:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += size
    return groups
