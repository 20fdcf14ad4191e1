"""What of a block of parameters is updated at once, where all would be too much: some of them, or a part of one.

An optimizer that treats every element on its own (SGD, Adam, RMSprop, Lion, ...) gives the same bits when a parameter
is updated run by run. Whether it does is tried, not known by its name: see ``Trial.is_elementwise``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.techniques.optimizer_offload.trial import Kept, dense_stride

_GRAIN = 1024  # elements: what kernels do at a run's end they do at the parameter's end only


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Of a block's parameter number ``parameter`` the elements from ``begin`` to ``end``, as they lie in memory."""

    parameter: int
    begin: int
    end: int
    whole: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a contiguous tensor of the parameter's shape, one-dimensional; ``tensor`` itself if whole."""
        return tensor if self.whole else tensor.reshape(-1)[self.begin : self.end]

    def stand_in(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        """A parameter to be updated in the place of ``parameter``, whose memory it is. Raises UnsupportedError."""
        if self.whole:
            return parameter
        if not parameter.is_contiguous():
            raise UnsupportedError(
                f"Cannot update {name}.",
                f"It has become a tensor with strides {list(parameter.stride())}; it was contiguous when fitted.",
                "Keep the layout of parameters, or call .brim.remove() first and fit the model again.",
            )
        return nn.Parameter(self.of(parameter.detach()), requires_grad=parameter.requires_grad)

    def kept(self, kept: Sequence[Kept]) -> tuple[Kept, ...]:
        """What the optimizer keeps for the part, where ``kept`` is for the parameter."""
        if self.whole:
            return tuple(kept)
        shape = (self.end - self.begin,)
        return tuple(Kept(key=tensor.key, dtype=tensor.dtype, shape=shape, stride=(1,)) for tensor in kept)


Unit = tuple[Part, ...]  # what is updated at once
Here = tuple[torch.Tensor, bool]  # a gradient, and whether it is in a record


def uncut(parameters: Sequence[torch.Tensor]) -> Unit:
    return tuple(Part(parameter=n, begin=0, end=p.numel(), whole=True) for n, p in enumerate(parameters))


def cut(
    parameters: Sequence[torch.Tensor], bound_bytes: int, is_elementwise: Callable[[int], bool]
) -> tuple[Unit, ...]:
    """``parameters`` as units of at most ``bound_bytes`` of them, as far as they can be cut, in their order.

    ``is_elementwise`` says of a parameter, by its number, whether it may be.
    """
    units: list[list[Part]] = []
    unit_bytes = 0
    for number, parameter in enumerate(parameters):
        size, count = parameter.numel() * parameter.element_size(), parameter.numel()
        if size > bound_bytes and _is_contiguous(parameter) and is_elementwise(number):
            pieces = -(-size // bound_bytes)
            length = -(-count // pieces // _GRAIN) * _GRAIN
            ends = [*range(length, count, length), count]
            begins = [0, *ends[:-1]]
            units += [
                [Part(parameter=number, begin=begin, end=end, whole=len(ends) == 1)]
                for begin, end in zip(begins, ends, strict=True)
            ]
            unit_bytes = bound_bytes  # nothing joins the last one
            continue
        if not units or unit_bytes + size > bound_bytes:
            units.append([])
            unit_bytes = 0
        units[-1].append(Part(parameter=number, begin=0, end=count, whole=True))
        unit_bytes += size
    return tuple(tuple(unit) for unit in units)


def _is_contiguous(parameter: torch.Tensor) -> bool:
    """Where it is, or where it will be when it has values (a streamed one has none at rest)."""
    return dense_stride(parameter) == torch.empty(parameter.shape, device="meta").stride()
