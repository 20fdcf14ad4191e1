"""Chunked cross-entropy: the loss of a language model without its logits, which are often the largest activation.

The head returns lazy logits (see ``lazy_logits``); ``torch.nn.functional.cross_entropy`` calls the head on a chunk of
rows at a time, and again in backward. So hooks of the head are called for every chunk. The idea is that of Wijmans et
al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009. It is exact except for the order of
summation over tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from brim.core import Hardware
from brim.errors import UnsupportedError, UsageError
from brim.predict.cost import flops_per_s
from brim.techniques.base import Option
from brim.techniques.dry_run import call_with, dry_run
from brim.techniques.loss.lazy_logits import RULES, View, defer

NAME = "chunked_loss"
_HALVES = (torch.float16, torch.bfloat16)


def apply(model: nn.Module, chunk_tokens: int = 1024, *, head: str | None = None, example: Any = None) -> ChunkedLoss:
    """Compute at most ``chunk_tokens`` rows of logits at once for a cross-entropy loss.

    ``head`` is the path of the layer that computes the logits, each row independently; by default ``find_head`` finds
    it. Calls on ``chunk_tokens`` rows or fewer, and calls in a graph of ``torch.compile``, are not changed. Raises
    UsageError for a wrong size or path or a second application, UnsupportedError if no head is found.
    """
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise UsageError(
            f"Cannot compute a loss in chunks of {chunk_tokens!r} tokens.", "The number must be 1 or more."
        )
    name = find_head(model, example) if head is None else head
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise UsageError(f"Cannot use {name!r} as the head.", f"{type(model).__name__} has no such part.") from error
    if "_call_impl" in vars(module):
        raise UsageError(
            f"Cannot chunk the loss of {type(model).__name__}.",
            f"The loss of {name} is chunked already.",
            "Call .remove() on its handle first.",
        )
    return ChunkedLoss(name, module, chunk_tokens)


class ChunkedLoss:
    """The handle. ``head`` is the path of the layer whose logits are lazy."""

    def __init__(self, name: str, module: nn.Module, chunk_tokens: int) -> None:
        self.head, self.chunk_tokens = name, chunk_tokens
        self._module = module
        self._placed = _Deferring(module, chunk_tokens)
        # Not ``forward``: a hook of the head must get the logits of a chunk, and change them once.
        vars(module)["_call_impl"] = self._placed

    def remove(self) -> None:
        if vars(self._module).get("_call_impl") is self._placed:
            del vars(self._module)["_call_impl"]


class _Deferring:
    """The call of a head. ``inner`` computes logits; weight streaming replaces it, too."""

    def __init__(self, module: nn.Module, chunk_tokens: int) -> None:
        self._module, self._chunk_tokens = module, chunk_tokens
        self.inner: Callable[..., Any] = partial(type(module)._call_impl, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiler cannot trace lazy logits: it gets the full ones.
        hidden = args[0] if len(args) == 1 and not kwargs and not torch.compiler.is_compiling() else None
        if isinstance(hidden, torch.Tensor) and hidden.is_floating_point() and hidden.dim() > 1:
            width = hidden.shape[-1]
            if width and hidden.numel() // width > self._chunk_tokens:
                return defer(self._module, hidden, self._chunk_tokens, self.inner)
        return self.inner(*args, **kwargs)


def find_head(model: nn.Module, example: Any = None) -> str:
    """The path of the layer that computes the logits.

    With ``example``, the inputs of a call (a dictionary or a tuple), it is the last linear layer with the width of
    the logits in a call on fake tensors. Else it is the output layer of a transformers model, or the last linear
    layer. A wrong guess costs memory, not correctness.
    """
    parts = dict(model.named_modules())
    linear: list[str] = [name for name, module in parts.items() if isinstance(module, nn.Linear)]
    if example is not None:
        linear = _called(model, example, linear)
    elif callable(named := getattr(model, "get_output_embeddings", None)):
        output_embedding = named()
        linear = [name for name, module in parts.items() if module is output_embedding] or linear
    if not linear:
        raise UnsupportedError(
            f"Cannot chunk the loss of {type(model).__name__}.",
            "brim found no linear layer that computes its logits.",
            "Name the layer: head='path.of.the.layer'.",
        )
    return linear[-1]


def _called(model: nn.Module, example: Any, linear: Sequence[str]) -> list[str]:
    """The linear layers with the width of the model's output, in the order of their calls."""
    order: list[str] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name)) for name in linear
    ]
    try:
        with torch.no_grad(), dry_run(model, example) as inputs:
            output = call_with(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    logits = getattr(output, "logits", output)
    while isinstance(logits, (tuple, list)):
        logits = logits[0]
    return [name for name in order if model.get_submodule(name).out_features == logits.shape[-1]]


def _chunked(
    view: View,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``torch.nn.functional.cross_entropy`` by chunks; None for unsupported arguments."""
    rows = view.rows.reshape(-1, view.rows.shape[-1])
    labels = _flat_target(view, target)
    is_supported = reduction in ("none", "mean", "sum") and size_average is None and reduce is None
    if labels is None or not is_supported or rows.shape[0] == 0:
        return None

    def losses(rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            view.run(rows),
            target,
            weight=weight,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )

    size = view.call.chunk_tokens
    grad = view.call.grad and torch.is_grad_enabled()
    parts: list[torch.Tensor] = []
    with contextlib.nullcontext() if grad else torch.no_grad():
        for some, their in zip(rows.split(size), labels.split(size), strict=True):
            parts.append(checkpoint(losses, some, their, use_reentrant=False) if grad else losses(some, their))
    if reduction == "none":
        return torch.cat(parts).reshape(view.rows.shape[:-1])
    total = _sum(parts)
    if reduction == "mean":
        total = total / _count(labels, weight, ignore_index)
    return total.to(parts[0].dtype)


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in float32 at least: a sum of 16-bit numbers over many tokens overflows or loses small ones."""
    wide = torch.float32 if parts[0].dtype in _HALVES else parts[0].dtype
    return torch.stack([part.sum(dtype=wide) for part in parts]).sum()


def _flat_target(view: View, target: Any) -> torch.Tensor | None:
    """The class indices of the flattened rows, or class probabilities; None for unsupported targets."""
    leading = tuple(view.rows.shape[:-1])
    class_dim = 1  # cross_entropy's input: (rows, classes) or (batch, classes, positions...)
    if not isinstance(target, torch.Tensor) or view.class_dim != class_dim:
        return None
    if target.is_floating_point():
        return target if len(leading) == 1 and tuple(target.shape) == view.shape else None
    return target.reshape(-1) if tuple(target.shape) == leading else None


def _count(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor | int:
    """The divisor of the mean: the number of counted rows, or the sum of their classes' weights."""
    if target.is_floating_point():
        return target.shape[0]
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return (weight[torch.where(counted, target, 0)] * counted).sum()


RULES[functional.cross_entropy] = lambda view, func, args, kwargs: _chunked(view, *args, **kwargs)


def option(tokens: int, classes: int, hidden: int, hardware: Hardware, *, chunk: int, dtype: torch.dtype) -> Option:
    """The option of chunks of ``chunk`` rows, for a loss over more ``tokens``.

    In the loss's backward there are the logits in ``dtype``, their copy in float32 if that differs, their log-softmax
    and its gradient (aten/src/ATen/native/LossNLL.cpp). In chunks, the head is computed once more.
    """
    each = classes * (8 + 4 + (dtype.itemsize if dtype in _HALVES else 0))
    seconds = 2 * tokens * classes * hidden / flops_per_s(hardware, str(dtype).removeprefix("torch."))
    return Option(block="", choice=str(chunk), saves_bytes=(tokens - chunk) * each, compute_s=seconds)
