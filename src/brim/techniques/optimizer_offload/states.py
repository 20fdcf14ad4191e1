"""The offloaded states of an optimizer, which are loaded unit by unit.

A unit is updated at once: all of a block, some of its parameters, or a part of a large one.

While states are offloaded, ``optimizer.state[p]`` has its keys in their order, with an ``OffloadedTensor`` for each
offloaded tensor. Single numbers (``step``) stay: they take no memory, and optimizers branch on them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from brim.core.hardware import DISK
from brim.errors import UsageError
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory
from brim.techniques.blocks import inner_tensors, moved, tensor_bytes
from brim.techniques.offloaded_tensor import OffloadedTensor, offloaded_tensor
from brim.techniques.optimizer_offload.state_blocks import (
    Field,
    Part,
    StateBlock,
    Unit,
    lay_out,
    single_unit,
)
from brim.techniques.optimizer_offload.trial import StateTensor, kind
from brim.techniques.records import Records

_TODO = "Read states by handle.iter_state() or optimizer.state_dict(), or call handle.remove() first."


class States:
    """The states of ``blocks`` (by number) in records.

    ``at_once``: each block is a single unit. ``brief``: the buffer that states pass through is allocated for the
    first state, and freed by ``free_buffer``. ``on_gpu``: it is VRAM.
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
        on_gpu: bool = False,
    ) -> None:
        self._optimizer, self._blocks, self._brief = optimizer, blocks, brief
        self._stored: dict[int, list[_StoredUnit]] = {}  # by block
        self._before: dict[tuple[int, int], dict[str, Any]] = {}  # the state of a parameter before its first part
        sizes: dict[int, int] = {}
        for index, block in blocks.items():
            self._stored[index] = []
            for unit in (single_unit(block.parameters),) if at_once else block.units:
                fields, bytes = lay_out(block.unit_tensors(unit))
                self._stored[index].append(_StoredUnit(record=len(sizes), unit=unit, fields=fields))
                sizes[len(sizes)] = bytes
        sizes = {record: bytes for record, bytes in sizes.items() if bytes}
        self.records = Records(
            memory,
            sizes,
            tier=tier,
            buffer_bytes=buffer_bytes,
            label="optimizer states",
            brief=brief,
            on_gpu=on_gpu,
        )
        where = "the disk" if tier == DISK else "RAM"
        self._todo = f"They are in {where}. {_TODO}"

    def state(self, index: int, parameter: int) -> dict[str, Any]:
        """The optimizer's state of a parameter, or an empty dictionary."""
        state: dict[str, Any] = self._optimizer.state.get(self._blocks[index].parameters[parameter], {})
        return state

    def end_step(self, indices: Sequence[int]) -> None:
        """Fetch the states of these blocks, the first of the next step, or free a brief buffer."""
        if self._brief:
            self.records.free_buffer()
        else:
            self.expect(indices)

    def units(self, index: int) -> int:
        return len(self._stored[index])

    def fit_parts(self, index: int) -> bool:
        """Return whether no parameter that is updated in parts has state tensors of an unexpected kind (it was
        loaded).
        """
        cut = {part.parameter for stored in self._stored[index] for part in stored.unit if not part.is_complete}
        values = [value for number in cut for value in self.state(index, number).values()]
        return not any(type(v) is not OffloadedTensor and isinstance(v, torch.Tensor) and v.dim() for v in values)

    def parts(self, index: int, number: int) -> Unit:
        return self._stored[index][number].unit

    def expect(self, indices: Sequence[int], first: int = 0) -> None:
        """Start to fetch the states of these blocks, of the first one from its unit number ``first`` on."""
        todo = [
            (i, stored)
            for i in indices
            if i in self._blocks
            for stored in self._stored[i][first * (i == indices[0]) :]
        ]
        self.records.expect([stored.record for index, stored in todo if self._is_offloaded(index, stored)])

    def _is_offloaded(self, index: int, stored: _StoredUnit) -> bool:
        """Return whether the record has states of the unit."""
        return any(type(self.state(index, stored.owner(f)).get(f.key)) is OffloadedTensor for f in stored.fields)

    @contextlib.contextmanager
    def present(self, index: int, number: int, *, stepping: Sequence[bool]) -> Iterator[list[nn.Parameter]]:
        """Load the states of the block's unit ``number`` into the optimizer within, and give the unit's parameters.

        These are the block's own, or stand-ins for parts of them. New and changed states go back to the record.
        ``stepping`` has a flag for each part that will be stepped. States that a first step makes by ``zeros_like``
        of the parameter are made in the record; the bytes of others count against the budget until they are there.
        """
        stored, block = self._stored[index][number], self._blocks[index]
        parameters = [p.stand_in(block.parameters[p.parameter], block.names[p.parameter]) for p in stored.unit]
        with contextlib.ExitStack() as stack:
            for part, parameter in zip(stored.unit, parameters, strict=True):
                if not part.is_complete:
                    stack.enter_context(self._standing_in(index, part, parameter))
            if stored.fields:
                stack.enter_context(self._fetched(index, stored, parameters, stepping))
            yield parameters

    @contextlib.contextmanager
    def _standing_in(self, index: int, part: Part, parameter: nn.Parameter) -> Iterator[None]:
        """Give the optimizer a state for a part within, with the numbers from before the first part's step."""
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
                self._optimizer.state[block.parameters[part.parameter]] = self._joined(*key, state)

    def _joined(self, index: int, parameter: int, last: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter, given that of its ``last`` part."""
        keys = {tensor.key for tensor in self._blocks[index].state_tensors[parameter]}
        return {key: self._offloaded(index, parameter, key) if key in keys else value for key, value in last.items()}

    @contextlib.contextmanager
    def _fetched(
        self, index: int, stored: _StoredUnit, parameters: Sequence[nn.Parameter], stepping: Sequence[bool]
    ) -> Iterator[None]:
        states = [self._optimizer.state.get(parameter, {}) for parameter in parameters]
        news = [f for f in stored.fields if stepping[f.parameter] and not states[f.parameter]]
        flat = self.records.enter(stored.record, empty=not self._is_offloaded(index, stored))
        new_states = _NewStates({id(p): p for p in parameters}, _places(news, parameters, flat))
        passing: Buffer | None = None
        try:
            for field in stored.fields:
                if type(states[field.parameter].get(field.key)) is OffloadedTensor:
                    states[field.parameter][field.key] = field.view(flat)
            with new_states if news else contextlib.nullcontext():
                yield
            new_bytes = new_states.unplaced_bytes
            passing = self.records.pool.account(new_bytes, "new states") if new_bytes else None
        finally:
            self._take(index, stored, parameters, flat)
            if passing is not None:
                passing.free()
            self.records.leave(stored.record)

    def _take(self, index: int, stored: _StoredUnit, parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
        """Move the optimizer's states of a unit into its record."""
        copies = []
        for field in stored.fields:
            state = self._optimizer.state.get(parameters[field.parameter], {})
            value = state.get(field.key)
            if not isinstance(value, torch.Tensor) or type(value) is OffloadedTensor:
                continue
            if kind(value) != kind(field.like):
                continue  # it stays in the optimizer
            for place, inner in zip(inner_tensors(field.view(flat)), inner_tensors(value), strict=True):
                inside = inner.untyped_storage()._cdata == flat.untyped_storage()._cdata
                if not inside or inner.storage_offset() != place.storage_offset():
                    copies.append((place, inner.clone() if inside else inner))  # it may be in another state's place
            owner = stored.owner(field)
            state[field.key] = self._offloaded(index, owner, field.key)
        for place, value in copies:
            place.copy_(value)

    def like(self, index: int, parameter: int, key: str) -> torch.Tensor:
        """A state's shape and kind, on the meta device."""
        return next(t.like for t in self._blocks[index].state_tensors[parameter] if t.key == key)

    def _offloaded(self, index: int, parameter: int, key: str) -> OffloadedTensor:
        block = self._blocks[index]
        device = block.parameters[parameter].device
        what = f"The optimizer state {block.names[parameter]}.{key}"
        like = self.like(index, parameter, key)
        return offloaded_tensor(like.shape, like.stride(), like.dtype, device, what=what, todo=self._todo)

    # -- all states of a block

    @contextlib.contextmanager
    def gathered(self, index: int) -> Iterator[None]:
        """Load all states of a block into the optimizer within, for a step that cannot be done in parts."""
        self._restore(index)
        try:
            yield
        finally:
            self._take_block(index)

    def take_all(self) -> None:
        """Take the states that the optimizer has in memory (it was loaded, or had stepped before)."""
        for index in self._blocks:
            self._take_block(index)

    def _take_block(self, index: int) -> None:
        taken: set[tuple[int, str]] = set()
        for stored in self._stored[index]:
            in_memory = [f for f in stored.fields if self._is_in_memory(index, stored.owner(f), f.key)]
            if not in_memory:
                continue
            flat = self.records.enter(stored.record, empty=not self._is_offloaded(index, stored))
            try:
                for field in in_memory:
                    value = self.state(index, stored.owner(field))[field.key]
                    copy_inner(field.view(flat), stored.unit[field.parameter].of(value))
            finally:
                self.records.leave(stored.record)
            taken |= {(stored.owner(field), field.key) for field in in_memory}
        for parameter, key in taken:
            self.state(index, parameter)[key] = self._offloaded(index, parameter, key)

    def _is_in_memory(self, index: int, parameter: int, key: str) -> bool:
        """Return whether the optimizer has this state in memory, of the expected kind."""
        value, like = self.state(index, parameter).get(key), self.like(index, parameter, key)
        return isinstance(value, torch.Tensor) and type(value) is type(like) and kind(value) == kind(like)

    def restore(self) -> None:
        """Give the optimizer all states as tensors again, each on its parameter's device.

        It can be called again after an error, and does not fetch a state twice.
        """
        for index in self._blocks:
            self._restore(index)

    def _restore(self, index: int) -> None:
        for number, parameter in enumerate(self._blocks[index].parameters):
            for key in self.offloaded_keys(index, number):
                self.state(index, number)[key] = moved(self.value(index, number, key), parameter.device)

    # -- single states

    def value(self, index: int, parameter: int, key: str) -> torch.Tensor:
        """A copy of a state on the CPU."""
        like, fields = self.like(index, parameter, key), list(self._fields(index, parameter, key))
        if len(fields) == 1:
            return self._read(*fields[0])
        value = torch.empty(like.shape, dtype=like.dtype)
        for stored, field in fields:
            stored.unit[field.parameter].of(value).copy_(self._read(stored, field))
        return value

    def _read(self, stored: _StoredUnit, field: Field) -> torch.Tensor:
        return field.over(partial(self.records.get, stored.record))

    def _fields(self, index: int, parameter: int, key: str) -> Iterator[tuple[_StoredUnit, Field]]:
        for stored in self._stored[index]:
            for field in stored.fields:
                if (stored.owner(field), field.key) == (parameter, key):
                    yield stored, field

    def offloaded_keys(self, index: int, parameter: int) -> list[str]:
        """The keys of a parameter's state that are offloaded now."""
        state, tensors = self.state(index, parameter), self._blocks[index].state_tensors[parameter]
        return [tensor.key for tensor in tensors if type(state.get(tensor.key)) is OffloadedTensor]

    def load(self, index: int, parameter: int, key: str, tensor: torch.Tensor) -> None:
        """Set an offloaded state of a parameter to ``tensor``. Raises UsageError if its shape is wrong."""
        block, like = self._blocks[index], self.like(index, parameter, key)
        if [t.shape for t in inner_tensors(tensor)] != [t.shape for t in inner_tensors(like)]:
            raise UsageError(
                f"Cannot load {block.names[parameter]}.{key} of shape {list(tensor.shape)}.",
                f"The optimizer keeps shape {list(like.shape)} for this parameter.",
                "Load a state that was saved for this model with this optimizer and its options.",
            )
        for stored, field in self._fields(index, parameter, key):
            part = torch.empty(field.bytes, dtype=torch.uint8)
            place = replace(field, offset=0).view(part)
            copy_inner(place, stored.unit[field.parameter].of(tensor))
            self.records.put(stored.record, field.offset, part)
        self._optimizer.state[block.parameters[parameter]][key] = self._offloaded(index, parameter, key)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StoredUnit:
    """A unit of a block, and the layout of its states in a record."""

    record: int
    unit: Unit
    fields: Sequence[Field]

    def owner(self, field: Field) -> int:
        return self.unit[field.parameter].parameter


def _places(
    news: Sequence[Field], parameters: Sequence[nn.Parameter], flat: torch.Tensor
) -> dict[int, list[torch.Tensor]]:
    """The places of new states in a record, by the identity of their parameter, in the order of creation."""
    places: dict[int, list[torch.Tensor]] = {}
    for field in news:
        places.setdefault(id(parameters[field.parameter]), []).append(field.view(flat))
    return places


def copy_inner(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor, or each of those that it wraps."""
    for place, value in zip(inner_tensors(target), inner_tensors(source), strict=True):
        place.copy_(value)  # the copy_ of a tensor that wraps others may leave some of them out


def _own(value: Any) -> Any:
    """Copy a number that a part's step may change."""
    if type(value) is OffloadedTensor:
        return value
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class _NewStates(TorchDispatchMode):
    """Creates the states that an optimizer's first step makes by ``zeros_like`` of a parameter in their record.

    Otherwise a step would have them in memory twice for a moment, which may be the peak for the largest block. States
    that are created in another way are copied.
    """

    def __init__(self, parameters: Mapping[int, torch.Tensor], places: dict[int, list[torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters, self._places = parameters, places

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # under another mode a compiled step is not compiled

    @property
    def unplaced_bytes(self) -> int:
        """The bytes of the expected states that were created elsewhere."""
        left = (place for places in self._places.values() for place in places)
        return sum(tensor_bytes(inner) for place in left for inner in inner_tensors(place))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = self._places.get(id(args[0])) if func is torch.ops.aten.zeros_like.default else None
        if places and self._parameters[id(args[0])] is args[0]:
            dtype = (kwargs or {}).get("dtype") or args[0].dtype
            fitting = [n for n, place in enumerate(places) if kind(place) == (dtype, tuple(args[0].shape))]
            if fitting:
                return places.pop(fitting[0]).zero_()
        return func(*args, **(kwargs or {}))


class OptimizerState:
    """The complete state of an optimizer, for ``state_dict`` and checkpoints.

    ``blocks`` are all blocks of the optimizer, ``offloaded`` those whose states are in ``states``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        blocks: Mapping[int, StateBlock],
        offloaded: Mapping[int, StateBlock],
        states: States,
    ) -> None:
        self._optimizer, self._states = optimizer, states
        self._blocks, self._offloaded = blocks, offloaded
        self._places = {name: (i, n) for i, block in blocks.items() for n, name in enumerate(block.names)}
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._fill, prepend=True),
            optimizer.register_load_state_dict_post_hook(lambda _: states.take_all(), prepend=True),
        ]
        self._load_before = vars(optimizer).get("load_state_dict")
        vars(optimizer)["load_state_dict"] = self._load

    def items(self, *, values: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every state tensor as (parameter's name + "." + key, tensor on the CPU), loaded one at a time.

        ``values`` False: on the meta device, and none is loaded.
        """
        for index, block in self._blocks.items():
            for number, (name, parameter) in enumerate(zip(block.names, block.parameters, strict=True)):
                offloaded = self._states.offloaded_keys(index, number) if index in self._offloaded else []
                for key, value in list(self._optimizer.state.get(parameter, {}).items()):
                    if key in offloaded:
                        read = self._states.value if values else self._states.like
                        yield f"{name}.{key}", read(index, number, key)
                    elif isinstance(value, torch.Tensor):
                        yield f"{name}.{key}", value.detach().cpu() if values else StateTensor.of(key, value).like

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Set a state from ``items``, which may keep ``tensor``.

        Raises UsageError for a parameter, or a tensor of one or more dimensions, that this optimizer lacks.
        """
        path, _, key = name.rpartition(".")
        index, number = self._places.get(path, (None, 0))
        keys = [] if index is None else [state.key for state in self._blocks[index].state_tensors[number]]
        if index is None or (key not in keys and tensor.dim() and tensor.numel()):
            raise UsageError(
                f"Cannot load the optimizer state {name!r}.",
                f"{type(self._optimizer).__name__} has no such state.",
                "Load a state that was saved for this model with this kind of optimizer.",
            )
        parameter = self._blocks[index].parameters[number]
        if index in self._offloaded and key in keys:
            self._states.load(index, number, key, tensor)
        else:
            self._optimizer.state[parameter][key] = moved(tensor, parameter.device) if tensor.dim() else tensor

    def _fill(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        numbers = {
            id(p): n
            for packed, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
            for n, p in zip(packed["params"], group["params"], strict=True)
        }
        for index, block in self._offloaded.items():
            for number, parameter in enumerate(block.parameters):
                keys = self._states.offloaded_keys(index, number)
                if keys:
                    values = {key: self._states.value(index, number, key) for key in keys}
                    state["state"][numbers[id(parameter)]] = state["state"][numbers[id(parameter)]] | values

    def _load(self, *args: Any, **kwargs: Any) -> None:
        if self._load_before is not None:
            self._load_before(*args, **kwargs)
        else:
            type(self._optimizer).load_state_dict(self._optimizer, *args, **kwargs)
        if self._hooks:  # a wrapper may still call this after the handle was removed
            self._states.take_all()  # bitsandbytes' calls no hooks

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        own = vars(self._optimizer)
        if own.get("load_state_dict") == self._load:  # nobody has wrapped it since
            del own["load_state_dict"]
            own |= {} if self._load_before is None else {"load_state_dict": self._load_before}
