"""An optimizer's states, unit by unit: where they rest, and how they come to the optimizer and go again.

A unit is what of a block is updated at once: all of it, some of its parameters, or a part of a large one.

While states are offloaded, ``optimizer.state[p]`` has its keys in their order, with an ``OffloadedTensor`` for each
tensor that left. Single numbers (``step``) stay: they take no memory, and optimizers branch on them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from brim.core.hardware import DISK
from brim.errors import UsageError
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory
from brim.techniques.offloaded_tensor import OffloadedTensor, offloaded_tensor
from brim.techniques.optimizer_offload.parts import Part, Unit, uncut
from brim.techniques.optimizer_offload.states import Field, StateBlock, flat_bytes, lay_out
from brim.techniques.optimizer_offload.trial import Kept
from brim.techniques.records import Records

_TODO = "Read states by handle.iter_state() or optimizer.state_dict(), or call handle.remove() first."


class States:
    """The states of ``blocks`` (by number) in records. Those that the optimizer has already are taken at once.

    ``at_once``: a block is one unit, whatever its own are. ``brief``: RAM that states pass through is held only from
    the first that comes until ``let_go``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        memory: Memory,
        blocks: Mapping[int, StateBlock],
        *,
        tier: str,
        buffer_bytes: int,
        at_once: bool = False,
        brief: bool = False,
    ) -> None:
        self._optimizer, self._memory, self._blocks, self._brief = optimizer, memory, blocks, brief
        self._slices: dict[int, list[_Slice]] = {}  # by block
        self._before: dict[tuple[int, int], dict[str, Any]] = {}  # numbers of a parameter whose parts are new
        sizes: dict[int, int] = {}
        for index, block in blocks.items():
            self._slices[index] = []
            for unit in (uncut(block.parameters),) if at_once else block.units:
                fields, bytes = lay_out([part.kept(block.kept[part.parameter]) for part in unit])
                self._slices[index].append(_Slice(record=len(sizes), unit=unit, fields=fields))
                sizes[len(sizes)] = bytes
        sizes = {record: bytes for record, bytes in sizes.items() if bytes}
        self.records = Records(
            memory, sizes, tier=tier, buffer_bytes=buffer_bytes, label="optimizer states", brief=brief
        )
        where = "the disk" if tier == DISK else "RAM"
        self._todo = f"They are in {where}. {_TODO}"

    def state(self, index: int, parameter: int) -> dict[str, Any]:
        """The optimizer's own dictionary; empty and not entered where there is none."""
        state: dict[str, Any] = self._optimizer.state.get(self._blocks[index].parameters[parameter], {})
        return state

    def ends_step(self, indices: Sequence[int]) -> None:
        """The step is over, and the next one begins with the states of these blocks: they are fetched, unless nothing
        is to be held meanwhile."""
        if self._brief:
            self.records.let_go()
        else:
            self.expect(indices)

    def units(self, index: int) -> int:
        """How many units the block has."""
        return len(self._slices[index])

    def fit_parts(self, index: int) -> bool:
        """Whether no parameter that is updated in parts has a state of another kind than foreseen (it was loaded)."""
        cut = {part.parameter for piece in self._slices[index] for part in piece.unit if not part.whole}
        values = [value for number in cut for value in self.state(index, number).values()]
        return not any(type(value) is torch.Tensor and value.dim() for value in values)

    def parts(self, index: int, number: int) -> Unit:
        return self._slices[index][number].unit

    def expect(self, indices: Sequence[int], first: int = 0) -> None:
        """Begin to fetch the states of these blocks, of the first one from its unit number ``first`` on."""
        todo = [
            (i, piece) for i in indices if i in self._blocks for piece in self._slices[i][first * (i == indices[0]) :]
        ]
        self.records.expect([piece.record for index, piece in todo if self._is_away(index, piece)])

    def _is_away(self, index: int, one: _Slice) -> bool:
        """Whether the record has what its fields are for."""
        return any(type(self.state(index, one.owner(f)).get(f.key)) is OffloadedTensor for f in one.fields)

    @contextlib.contextmanager
    def present(self, index: int, number: int, *, stepping: Sequence[bool]) -> Iterator[list[nn.Parameter]]:
        """Within: the states of the block's unit ``number`` are in the optimizer, for the parameters that this gives.

        Those are the block's own, or what stands in for a part of one. What the optimizer makes or changes there
        goes with them. ``stepping`` says of each part whether it will be stepped. What a first step makes by
        ``zeros_like`` of the parameter is made in the record at once; the bytes of states that it makes otherwise
        are held against the budget until they are in it.
        """
        piece, block = self._slices[index][number], self._blocks[index]
        parameters = [p.stand_in(block.parameters[p.parameter], block.names[p.parameter]) for p in piece.unit]
        with contextlib.ExitStack() as stack:
            for part, parameter in zip(piece.unit, parameters, strict=True):
                if not part.whole:
                    stack.enter_context(self._standing_in(index, part, parameter))
            if piece.fields:
                stack.enter_context(self._fetched(index, piece, parameters, stepping))
            yield parameters

    @contextlib.contextmanager
    def _standing_in(self, index: int, part: Part, parameter: nn.Parameter) -> Iterator[None]:
        """Within: the optimizer has a state for a part, the numbers in it as they were before the first part's."""
        key, block = (index, part.parameter), self._blocks[index]
        if part.begin == 0:
            self._before[key] = dict(self.state(*key))
        before = self._before[key]
        if before:
            self._optimizer.state[parameter] = {name: _own(value) for name, value in before.items()}
        try:
            yield
        finally:
            state = self._optimizer.state.pop(parameter, {})
            if part.end == block.parameters[part.parameter].numel() and state:
                self._optimizer.state[block.parameters[part.parameter]] = self._whole(*key, state)

    def _whole(self, index: int, parameter: int, made: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter, of whose last part it is ``made``."""
        kept = {kept_tensor.key: kept_tensor for kept_tensor in self._blocks[index].kept[parameter]}
        return {key: self._offloaded(index, parameter, kept[key]) if key in kept else v for key, v in made.items()}

    @contextlib.contextmanager
    def _fetched(
        self, index: int, one: _Slice, parameters: Sequence[nn.Parameter], stepping: Sequence[bool]
    ) -> Iterator[None]:
        states = [self._optimizer.state.get(parameter, {}) for parameter in parameters]
        news = [f for f in one.fields if stepping[f.parameter] and not states[f.parameter]]
        flat = self.records.enter(one.record, empty=not self._is_away(index, one))
        births = _Births({id(p): p for p in parameters}, _places(news, parameters, flat))
        passing: Buffer | None = None
        try:
            for field in one.fields:
                if type(states[field.parameter].get(field.key)) is OffloadedTensor:
                    states[field.parameter][field.key] = field.view(flat)
            with births if news else contextlib.nullcontext():
                yield
            new_bytes = births.left_bytes
            passing = self._memory.ram.account(new_bytes, "new states") if new_bytes else None
        finally:
            self._take(index, one, parameters, flat)
            if passing is not None:
                passing.free()
            self.records.leave(one.record)

    def _take(self, index: int, one: _Slice, parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
        """Whatever the optimizer has for the parameters of a unit now goes into its record."""
        for field in one.fields:
            state = self._optimizer.state.get(parameters[field.parameter], {})
            value = state.get(field.key)
            if not isinstance(value, torch.Tensor) or type(value) is OffloadedTensor:
                continue
            if (value.dtype, tuple(value.shape)) != (field.dtype, field.shape):
                continue  # it changed its kind: then it stays where the optimizer put it
            place = field.view(flat)
            inside = value.untyped_storage()._cdata == flat.untyped_storage()._cdata
            if not inside or value.storage_offset() != place.storage_offset():
                place.copy_(value)
            owner = one.owner(field)
            kept = next(k for k in self._blocks[index].kept[owner] if k.key == field.key)
            state[field.key] = self._offloaded(index, owner, kept)

    def _offloaded(self, index: int, parameter: int, kept: Kept) -> OffloadedTensor:
        block = self._blocks[index]
        device = block.parameters[parameter].device
        what = f"The optimizer state {block.names[parameter]}.{kept.key}"
        return offloaded_tensor(kept.shape, kept.stride, kept.dtype, device, what=what, todo=self._todo)

    # -- whole

    @contextlib.contextmanager
    def gathered(self, index: int) -> Iterator[None]:
        """Within: the optimizer has the states of all of a block in memory, for what cannot be done in parts."""
        self._restore(index)
        try:
            yield
        finally:
            self._take_whole(index)

    def take_all(self) -> None:
        """Take the states that the optimizer has in memory (it was loaded, or had stepped before)."""
        for index in self._blocks:
            self._take_whole(index)

    def _take_whole(self, index: int) -> None:
        fetched: set[tuple[int, str]] = set()
        for piece in self._slices[index]:
            there = [f for f in piece.fields if self._is_here(index, piece.owner(f), f.key)]
            if not there:
                continue
            flat = self.records.enter(piece.record, empty=not self._is_away(index, piece))
            try:
                for field in there:
                    value = self.state(index, piece.owner(field))[field.key]
                    field.view(flat).copy_(piece.unit[field.parameter].of(value))
            finally:
                self.records.leave(piece.record)
            fetched |= {(piece.owner(field), field.key) for field in there}
        for parameter, key in fetched:
            kept = next(k for k in self._blocks[index].kept[parameter] if k.key == key)
            self.state(index, parameter)[key] = self._offloaded(index, parameter, kept)

    def _is_here(self, index: int, parameter: int, key: str) -> bool:
        """Whether the optimizer has this state in memory, of the kind that there is room for."""
        value = self.state(index, parameter).get(key)
        kept = next(k for k in self._blocks[index].kept[parameter] if k.key == key)
        return type(value) is torch.Tensor and (value.dtype, tuple(value.shape)) == (kept.dtype, kept.shape)

    def restore(self) -> None:
        """Give the optimizer all states as tensors again, each on its parameter's device.

        After an error it can be called again: what came back is not fetched twice.
        """
        for index in self._blocks:
            self._restore(index)

    def _restore(self, index: int) -> None:
        for number, parameter in enumerate(self._blocks[index].parameters):
            for key in self.away_keys(index, number):
                self.state(index, number)[key] = self.value(index, number, key).to(parameter.device)

    # -- one at a time

    def value(self, index: int, parameter: int, key: str) -> torch.Tensor:
        """A state in memory of its own, on the CPU."""
        kept = next(k for k in self._blocks[index].kept[parameter] if k.key == key)
        pieces = list(self._pieces(index, parameter, key))
        if len(pieces) == 1:
            return self._piece(*pieces[0])
        whole = torch.empty(kept.shape, dtype=kept.dtype)
        for piece, field in pieces:
            piece.unit[field.parameter].of(whole).copy_(self._piece(piece, field))
        return whole

    def _piece(self, one: _Slice, field: Field) -> torch.Tensor:
        return field.view_alone(self.records.get(one.record, field.offset, field.bytes))

    def _pieces(self, index: int, parameter: int, key: str) -> Iterator[tuple[_Slice, Field]]:
        for piece in self._slices[index]:
            for field in piece.fields:
                if (piece.owner(field), field.key) == (parameter, key):
                    yield piece, field

    def away_keys(self, index: int, parameter: int) -> list[str]:
        """Of one parameter, what is away now."""
        state = self.state(index, parameter)
        return [
            kept_tensor.key
            for kept_tensor in self._blocks[index].kept[parameter]
            if type(state.get(kept_tensor.key)) is OffloadedTensor
        ]

    def load(self, index: int, parameter: int, key: str, tensor: torch.Tensor, sample: Mapping[str, Any]) -> None:
        """Make ``tensor`` a state of a parameter. Raises UsageError where it does not fit."""
        block = self._blocks[index]
        state = self._optimizer.state[block.parameters[parameter]]
        name = f"{block.names[parameter]}.{key}"
        kept = next((k for k in block.kept[parameter] if k.key == key), None)
        if kept is None:
            state[key] = as_number(tensor, sample.get(key))
            return
        if tuple(tensor.shape) != kept.shape:
            raise UsageError(
                f"Cannot load {name} of shape {list(tensor.shape)}.",
                f"The optimizer keeps shape {list(kept.shape)} for this parameter.",
                "Load what was saved for this model with this optimizer and its options.",
            )
        for piece, field in self._pieces(index, parameter, key):
            part = torch.empty_strided(field.shape, field.stride, dtype=field.dtype)
            self.records.put(
                piece.record, field.offset, flat_bytes(part.copy_(piece.unit[field.parameter].of(tensor)))
            )
        state[key] = self._offloaded(index, parameter, kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Slice:
    """A unit of a block, and what of its states lies where in a record."""

    record: int
    unit: Unit
    fields: Sequence[Field]

    def owner(self, field: Field) -> int:
        """The number in the block of the parameter that ``field`` is of."""
        return self.unit[field.parameter].parameter


def _places(
    news: Sequence[Field], parameters: Sequence[nn.Parameter], flat: torch.Tensor
) -> dict[int, list[torch.Tensor]]:
    """Where the new states of each parameter (by identity) will rest, in the order of their making."""
    places: dict[int, list[torch.Tensor]] = {}
    for field in news:
        places.setdefault(id(parameters[field.parameter]), []).append(field.view(flat))
    return places


def _own(value: Any) -> Any:
    """A number that one part's step may change."""
    if type(value) is OffloadedTensor:
        return value
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


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
        """The size of the expected states that were created elsewhere."""
        return sum(place.numel() * place.element_size() for places in self._places.values() for place in places)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = self._places.get(id(args[0])) if func is torch.ops.aten.zeros_like.default else None
        if places and self._parameters[id(args[0])] is args[0]:
            dtype = (kwargs or {}).get("dtype") or args[0].dtype
            if (places[0].dtype, places[0].shape) == (dtype, args[0].shape):
                return places.pop(0).zero_()
        return func(*args, **(kwargs or {}))


def as_number(tensor: torch.Tensor, sample: Any) -> Any:
    """``tensor`` as the kind of value that an optimizer keeps where ``sample`` is one of its own."""
    if isinstance(sample, torch.Tensor):
        return tensor.to(sample.dtype).clone() if sample.dim() == 0 else tensor.clone()
    return tensor.clone() if sample is None else type(sample)(tensor.item())
