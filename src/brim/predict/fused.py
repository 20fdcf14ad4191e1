"""An operation that stands for a compiled kernel: it reads its inputs and makes its results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Defined by hand: ``custom_op`` adds autograd and checks to every call, and a trace makes thousands of calls.
_LIBRARY = torch.library.Library("brim", "FRAGMENT")
_LIBRARY.define("fused(Tensor[] inputs, str layouts) -> Tensor[]")
_LIBRARY.define("fused_(Tensor[] inputs, Tensor(a!)[] over, str layouts) -> Tensor[]")


def _on_fake_tensors(inputs: Sequence[torch.Tensor], layouts: str) -> list[torch.Tensor]:
    return [_made(layout) for layout in layouts.split("|")] if layouts else []


def _over_fake_tensors(
    inputs: Sequence[torch.Tensor], over: Sequence[torch.Tensor], layouts: str
) -> list[torch.Tensor]:
    return _on_fake_tensors(inputs, layouts)


torch.library.register_fake("brim::fused", _on_fake_tensors, lib=_LIBRARY)
torch.library.register_fake("brim::fused_", _over_fake_tensors, lib=_LIBRARY)


def fused(
    inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], over: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Tensors laid out like ``results``, as one kernel makes them that reads ``inputs``.

    The rest of what it gives lies ``over`` what it reads besides: without new tensors it still runs, and is recorded.
    """
    layouts = "|".join(map(_layout, results))
    outputs: list[torch.Tensor] = (
        torch.ops.brim.fused_(list(inputs), list(over), layouts)
        if over
        else torch.ops.brim.fused(list(inputs), layouts)
    )
    return outputs


def _layout(tensor: torch.Tensor) -> str:
    """``bfloat16:2,8:8,1``: plain data, so that what a fake kernel answers can be remembered."""
    numbers = (",".join(map(str, values)) for values in (tensor.shape, tensor.stride()))
    return ":".join((str(tensor.dtype).removeprefix("torch."), *numbers))


def _made(layout: str) -> torch.Tensor:
    dtype, size, stride = layout.split(":")
    return torch.empty_strided(_numbers(size), _numbers(stride), dtype=getattr(torch, dtype))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
