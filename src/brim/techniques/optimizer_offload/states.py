"""An optimizer's blocks: which parameters' states come and go together, and how those lie in a record of bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import round_up
from brim.techniques.optimizer_offload.parts import Unit, cut
from brim.techniques.optimizer_offload.trial import Kept, Trial, dense_stride


@dataclass(frozen=True, kw_only=True, eq=False)
class StateBlock:
    """Parameters whose gradients come and go together. ``bytes`` are theirs, ``state_bytes`` those of the states.

    ``units``: what of them is updated at once, where that is to be bounded.
    """

    name: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    kept: tuple[tuple[Kept, ...], ...]
    bytes: int
    state_bytes: int
    units: tuple[Unit, ...]

    def unit_bytes(self) -> list[int]:
        """Bytes of the states of each unit."""
        return [lay_out([part.kept(self.kept[part.parameter]) for part in unit])[1] for unit in self.units]


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A tensor in a record: of the unit's part number ``parameter``, at ``offset``."""

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
        for tensor in tensors:
            begin = round_up(end, PACKED_ALIGNMENT_BYTES)
            fields.append(
                Field(
                    parameter=index,
                    key=tensor.key,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    stride=tensor.stride,
                    offset=begin,
                )
            )
            end = begin + fields[-1].bytes
    return fields, end


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
    larger than the bound is a block of its own; blocks above it are cut into units. Raises UnsupportedError for an
    optimizer that needs all at once.
    """
    trial = trial or Trial(optimizer)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = _names(model, optimizer)
    rows = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    blocks = []
    for name, parameters in _together(names, given, block_bytes):
        kept = tuple(tuple(trial.kept(groups[id(p)], p)) for p in parameters)
        units = cut(parameters, block_bytes, _may_be_cut(parameters, kept, groups, trial, rows))
        blocks.append(
            StateBlock(
                name=name,
                names=tuple(names[p] for p in parameters),
                parameters=tuple(parameters),
                kept=kept,
                bytes=sum(p.numel() * p.element_size() for p in parameters),
                state_bytes=lay_out(kept)[1],
                units=units,
            )
        )
    return blocks


def _names(model: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """The optimizer's parameters, each with its name: in the model's order, and after them what the model has not."""
    names = {p: name for name, p in model.named_parameters()}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    mine = set(updated)
    ordered = dict.fromkeys([*(p for p in names if p in mine), *updated])
    return {p: names.get(p, f"parameter {number}") for number, p in enumerate(ordered)}


def _together(
    names: Mapping[nn.Parameter, str], given: Sequence[tuple[str, Sequence[nn.Parameter]]], block_bytes: int
) -> list[tuple[str, list[nn.Parameter]]]:
    """Which of the parameters that are trained make a block, and its name: those ``given``, then neighbours."""
    open_ = {p: p for p in names if p.requires_grad}
    parts: list[tuple[str, list[nn.Parameter]]] = []
    for name, parameters in given:
        mine = [open_.pop(p) for p in parameters if p in open_]
        parts += [(name, mine)] if mine else []
    return parts + [(names[group[0]], group) for group in _within(list(open_), block_bytes)]


def _may_be_cut(
    parameters: Sequence[nn.Parameter],
    kept: Sequence[Sequence[Kept]],
    groups: Mapping[int, int],
    trial: Trial,
    rows: Collection[int],
) -> Callable[[int], bool]:
    """Whether a parameter, by its number, may be updated in parts. ``rows``: those with sparse gradients."""

    def answer(number: int) -> bool:
        parameter = parameters[number]
        alike = all(
            tensor.shape == parameter.shape and tensor.stride == dense_stride(parameter) for tensor in kept[number]
        )
        return alike and id(parameter) not in rows and trial.is_elementwise(groups[id(parameter)], parameter)

    return answer


def _within(parameters: Sequence[nn.Parameter], block_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours together, up to a bound."""
    groups: list[list[nn.Parameter]] = []
    group_bytes = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not groups or group_bytes + size > block_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(parameter)
        group_bytes += size
    return groups
