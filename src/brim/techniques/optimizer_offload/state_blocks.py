"""The blocks of an optimizer: parameters that are updated together, their units, and the layout of their states.

An optimizer that treats every element on its own (SGD, Adam, RMSprop, Lion, ...) gives the same bits when a parameter
is updated run by run. ``Trial.is_elementwise`` tries whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from brim.errors import UnsupportedError
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import round_up
from brim.techniques.blocks import groups_within, inner_tensors, tensor_bytes, with_inner
from brim.techniques.optimizer_offload.trial import StateTensor, Trial, dense_stride, kind
from brim.units import MIB

BLOCK_BYTES = 16 * MIB
GPU_BLOCK_BYTES = 64 * MIB  # a GPU steps these in less time than Python takes to start the step of 16 MiB
UPDATE_PARTS = 16  # of the trained parameters, at least
_GRAIN = 1024  # elements; a kernel's loop for the rest then runs at the end of a parameter only


@dataclass(frozen=True, kw_only=True, eq=False)
class StateBlock:
    """Parameters whose states and gradients are moved together. ``bytes`` are those of the parameters.

    ``units`` are the parts that are updated at once, so that their states fit in a bounded buffer.
    """

    name: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    state_tensors: tuple[tuple[StateTensor, ...], ...]  # of each parameter
    bytes: int
    state_bytes: int
    units: tuple[Unit, ...]

    def unit_bytes(self) -> list[int]:
        return [lay_out(self.unit_tensors(unit))[1] for unit in self.units]

    def unit_tensors(self, unit: Unit) -> list[tuple[StateTensor, ...]]:
        return [part.state_tensors(self.state_tensors[part.parameter]) for part in unit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A state tensor of the unit's part number ``parameter``, at ``offset`` of a record."""

    parameter: int
    key: str
    like: torch.Tensor
    offset: int

    @property
    def bytes(self) -> int:
        *_, (begin, bytes) = self._runs()
        return begin + bytes - self.offset

    def _runs(self) -> Iterator[tuple[int, int]]:
        """The beginnings of its inner tensors in the record, and their bytes."""
        begin = self.offset
        for inner in inner_tensors(self.like):
            yield begin, tensor_bytes(inner)
            begin = round_up(begin + tensor_bytes(inner), PACKED_ALIGNMENT_BYTES)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in the record ``flat`` (uint8)."""
        return self.over(partial(flat.narrow, 0))

    def over(self, read: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """The tensor over the bytes (uint8) that ``read`` returns for a beginning in the record and a length."""
        runs = zip(inner_tensors(self.like), self._runs(), strict=True)
        return with_inner(self.like, (shaped(read(*run), i.dtype, i.shape, i.stride()) for i, run in runs))


def shaped(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A tensor over bytes (uint8, one-dimensional) that its elements fill."""
    with torch.inference_mode(False):
        typed = flat.view(dtype)
        return typed.as_strided(tuple(shape), tuple(stride), typed.storage_offset())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a dense tensor's memory as bytes."""
    data = tensor.detach()
    return data.as_strided((data.numel(),), (1,), data.storage_offset()).view(torch.uint8)


def lay_out(state_tensors: Sequence[Sequence[StateTensor]]) -> tuple[list[Field], int]:
    """The aligned layout of the state tensors of each parameter in a record, and the record's bytes."""
    fields, end = [], 0
    for index, tensors in enumerate(state_tensors):
        for tensor in tensors:
            begin = round_up(end, PACKED_ALIGNMENT_BYTES)
            fields.append(Field(parameter=index, key=tensor.key, like=tensor.like, offset=begin))
            end = begin + fields[-1].bytes
    return fields, end


def state_blocks(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    block_bytes: int = BLOCK_BYTES,
    given: Sequence[tuple[str, Sequence[nn.Parameter]]] = (),
    trial: Trial | None = None,
) -> list[StateBlock]:
    """The trainable parameters of ``optimizer`` as blocks of at most ``block_bytes``, in the model's order.

    ``given`` are the blocks of weight streaming, which are taken as they are. A parameter above the bound is a block
    of its own; blocks above it are cut into units. Raises UnsupportedError for an optimizer that needs all parameters
    at once.
    """
    trial = trial or Trial(optimizer)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = _names(model, optimizer)
    rows = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    blocks = []
    for name, parameters in _together(names, given, block_bytes):
        state_tensors = tuple(tuple(trial.state_tensors(groups[id(p)], p)) for p in parameters)
        units = cut(parameters, block_bytes, _may_be_cut(parameters, state_tensors, groups, trial, rows))
        blocks.append(
            StateBlock(
                name=name,
                names=tuple(names[p] for p in parameters),
                parameters=tuple(parameters),
                state_tensors=state_tensors,
                bytes=sum(map(tensor_bytes, parameters)),
                state_bytes=lay_out(state_tensors)[1],
                units=units,
            )
        )
    return blocks


def _names(model: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """The names of the optimizer's parameters, in the model's order, those that the model does not have last."""
    names = {p: name for name, p in model.named_parameters()}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    mine = set(updated)
    ordered = dict.fromkeys([*(p for p in names if p in mine), *updated])
    return {p: names.get(p, f"parameter {number}") for number, p in enumerate(ordered)}


def _together(
    names: Mapping[nn.Parameter, str], given: Sequence[tuple[str, Sequence[nn.Parameter]]], block_bytes: int
) -> list[tuple[str, list[nn.Parameter]]]:
    """The names and trained parameters of the blocks: those ``given``, then groups of neighbours."""
    open_ = {p: p for p in names if p.requires_grad}
    parts: list[tuple[str, list[nn.Parameter]]] = []
    for name, parameters in given:
        mine = [open_.pop(p) for p in parameters if p in open_]
        parts += [(name, mine)] if mine else []
    return parts + [(names[group[0]], group) for group in groups_within(open_, block_bytes, tensor_bytes)]


def _may_be_cut(
    parameters: Sequence[nn.Parameter],
    state_tensors: Sequence[Sequence[StateTensor]],
    groups: Mapping[int, int],
    trial: Trial,
    rows: Collection[int],
) -> Callable[[int, int], bool]:
    """A predicate of parameters, by number, that may be updated in parts of a length.

    ``rows``: those with sparse gradients.
    """

    def answer(number: int, length: int) -> bool:
        parameter, group = parameters[number], groups[id(parameters[number])]
        sample, of_part = trial.sample(group, parameter), trial.state_tensors(group, parameter, length)
        shapes = ((tuple(parameter.shape), state_tensors[number]), ((length,), of_part))
        alike = all(  # states may have fewer bits where a parameter is large: the tried one is small
            kind(tensor.like) == (getattr(sample.get(tensor.key), "dtype", None), shape)
            for shape, tensors in shapes
            for tensor in tensors
        ) and all(tensor.like.stride() == dense_stride(parameter) for tensor in state_tensors[number])
        return alike and id(parameter) not in rows and trial.is_elementwise(group, parameter)

    return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The elements ``begin`` to ``end``, in memory order, of a block's parameter number ``parameter``."""

    parameter: int
    begin: int
    end: int
    is_complete: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a contiguous tensor of the parameter's shape, one-dimensional unless complete."""
        return tensor if self.is_complete else tensor.reshape(-1)[self.begin : self.end]

    def stand_in(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        """A parameter over this part of the memory of ``parameter``. Raises UnsupportedError."""
        if self.is_complete:
            return parameter
        if not parameter.is_contiguous():
            raise UnsupportedError(
                f"Cannot update {name}.",
                f"It has become a tensor with strides {list(parameter.stride())}; it was contiguous when fitted.",
                "Keep the layout of parameters, or call .brim.remove() first and fit the model again.",
            )
        return nn.Parameter(self.of(parameter.detach()), requires_grad=parameter.requires_grad)

    def state_tensors(self, complete: Sequence[StateTensor]) -> tuple[StateTensor, ...]:
        """The state tensors of the part, given those of the ``complete`` parameter."""
        if self.is_complete:
            return tuple(complete)
        return tuple(tensor.part(self.begin, self.end) for tensor in complete)


Unit = tuple[Part, ...]  # the parts that are updated at once


class LoadedGradient(NamedTuple):
    """A gradient in memory: in a record in RAM, or as autograd left it."""

    tensor: torch.Tensor
    in_record: bool


def single_unit(parameters: Sequence[torch.Tensor]) -> Unit:
    return tuple(Part(parameter=n, begin=0, end=p.numel(), is_complete=True) for n, p in enumerate(parameters))


def cut(
    parameters: Sequence[torch.Tensor], bound_bytes: int, is_elementwise: Callable[[int, int], bool]
) -> tuple[Unit, ...]:
    """Cut ``parameters``, in order, into units of at most ``bound_bytes``, as far as they can be cut.

    ``is_elementwise`` is a predicate of parameters, by number, that may be cut into parts of a length.
    """
    units: list[list[Part]] = []
    unit_bytes = 0
    for number, parameter in enumerate(parameters):
        size, count = tensor_bytes(parameter), parameter.numel()
        # A streamed parameter has no values at rest: this is whether it will be contiguous when it has.
        is_contiguous = dense_stride(parameter) == torch.empty(parameter.shape, device="meta").stride()
        length = -(-count // max(1, -(-size // bound_bytes)) // _GRAIN) * _GRAIN
        if size > bound_bytes and is_contiguous and is_elementwise(number, length):
            ends = [*range(length, count, length), count]
            begins = [0, *ends[:-1]]
            units += [
                [Part(parameter=number, begin=begin, end=end, is_complete=len(ends) == 1)]
                for begin, end in zip(begins, ends, strict=True)
            ]
            unit_bytes = bound_bytes  # nothing joins the last one
            continue
        if not units or unit_bytes + size > bound_bytes:
            units.append([])
            unit_bytes = 0
        units[-1].append(Part(parameter=number, begin=0, end=count, is_complete=True))
        unit_bytes += size
    return tuple(tuple(unit) for unit in units)
