"""An operation that stands for a compiled kernel: it reads its inputs and allocates its results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Defined by hand: ``custom_op`` adds autograd and checks to every call, of which a trace makes thousands.
_LIBRARY = torch.library.Library("brim", "FRAGMENT")
_LIBRARY.define("fused(Tensor[] inputs, str layouts) -> Tensor[]")
_LIBRARY.define("fused_(Tensor[] inputs, Tensor(a!)[] over, str layouts) -> Tensor[]")


def _on_fake_tensors(inputs: Sequence[torch.Tensor], layouts: str) -> list[torch.Tensor]:
    return [_empty(layout) for layout in layouts.split("|")] if layouts else []


def _over_fake_tensors(
    inputs: Sequence[torch.Tensor], over: Sequence[torch.Tensor], layouts: str
) -> list[torch.Tensor]:
    return _on_fake_tensors(inputs, layouts)


torch.library.register_fake("brim::fused", _on_fake_tensors, lib=_LIBRARY)
torch.library.register_fake("brim::fused_", _over_fake_tensors, lib=_LIBRARY)


def fused(
    inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], over: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Run one kernel that reads ``inputs``; return tensors laid out like ``results``.

    Its other results are written ``over`` inputs: without new tensors it still runs, and is recorded.
    """
    layouts = "|".join(map(_layout, results))
    outputs: list[torch.Tensor] = (
        torch.ops.brim.fused_(list(inputs), list(over), layouts)
        if over
        else torch.ops.brim.fused(list(inputs), layouts)
    )
    return outputs


def _layout(tensor: torch.Tensor) -> str:
    """``bfloat16:2,8:8,1``: plain data, so that fake kernels' results can be cached."""
    numbers = (",".join(map(str, values)) for values in (tensor.shape, tensor.stride()))
    return ":".join((str(tensor.dtype).removeprefix("torch."), *numbers))


def _empty(layout: str) -> torch.Tensor:
    dtype, size, stride = layout.split(":")
    return torch.empty_strided(_numbers(size), _numbers(stride), dtype=getattr(torch, dtype))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
