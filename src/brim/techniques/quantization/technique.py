"""Quantization of weights: linear layers in int8, int4 or float8, moved as they are stored, made wide to multiply.

A quarter to an eighth of float32's bytes to hold and to move, for some arithmetic and some quality: it is never
lossless. Inputs stay as they are (weight-only). Embeddings and the output layer ("head") are left by default: a table
that is only looked up from saves no traffic, and errors of the head go straight into the choice of the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.techniques.base import refuse_second
from brim.techniques.blocks import tensor_bytes
from brim.techniques.quantization.linear import (
    GROUPS,
    SCHEMES,
    Quantization,
    QuantizedLinear,
    become,
    expand,
    form,
    is_transposed,
    quantize,
    sides,
)

__all__ = ["GROUPS", "SCHEMES", "Quantization", "QuantizationHandle", "Quantized", "QuantizedLinear"]
__all__ += ["apply", "chosen", "expand", "quantize", "quantize_meta", "stored_bytes"]

_MARK = "brim_quantization"


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What was done: how many layers, how many weights of how many in all, and their bytes before and after."""

    layers: int
    weights: int
    total_weights: int
    wide_bytes: int
    stored_bytes: int

    def __str__(self) -> str:
        return f"{self.layers:,} linear layers with {self.weights:,} of {self.total_weights:,} weights"


def chosen(model: nn.Module, asked: str | Quantization) -> dict[str, nn.Module]:
    """The linear layers that will be quantized, by path.

    Left as they are: weights that are shared, what transformers leaves (the output embeddings unless ``head``, the
    last module), sides that the scheme cannot hold, and layers that are not linear (experts in one tensor, say).
    Raises UnsupportedError where nothing is left to be quantized.
    """
    asked = Quantization.of(asked)
    linears = {path: module for path, module in model.named_modules() if _is_linear(module)}
    is_wanted = _wanted(model, asked)
    layers = {path: m for path, m in linears.items() if is_wanted(path) and form(asked, *sides(m)) is not None}
    if not layers:
        raise UnsupportedError(
            f"Cannot use quantization={asked} for {type(model).__name__}.",
            f"None of its {len(linears)} linear layers can be quantized.",
            "Use bf16.",
        )
    return layers


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def _wanted(model: nn.Module, asked: Quantization) -> Callable[[str], bool]:
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    shared = {path for path, m in model.named_modules() if owners.get(id(m._parameters.get("weight")), 0) > 1}
    head, kept = _kept(model)
    if asked.head and head:
        shared.discard(head)
        kept = [path for path in kept if path != head]

    def is_wanted(path: str) -> bool:
        from transformers.quantizers.quantizers_utils import should_convert_module

        return path not in shared and bool(should_convert_module(path, kept))

    return is_wanted


def _kept(model: Any) -> tuple[str, list[str]]:
    """The path of the output embeddings, and of all that transformers would leave, as patterns of its own."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return "", []
    from transformers.quantizers.base import get_keys_to_not_convert

    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head = next((path for path, module in model.named_modules() if module is output), "")
    return head, get_keys_to_not_convert(model)


def quantize_meta(model: nn.Module, asked: str | Quantization) -> Quantized:
    """Give a model without values (on meta or fake) the parameters that it would have: for plans and predictions."""
    asked = Quantization.of(asked)
    layers = chosen(model, asked)
    report = _report(model, layers, asked)
    for module in layers.values():
        forms = form(asked, *sides(module))
        assert forms is not None
        device = module.weight.device
        become(module, *(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in forms))  # type: ignore[arg-type]
    return report


def apply(model: nn.Module, asked: str | Quantization) -> QuantizationHandle:
    """Quantize the linear layers of ``model`` in place, one at a time.

    The handle keeps the weights as they were, so that ``remove`` is exact: this is for trials. To hold less memory,
    open the model quantized (``brim.load(..., quantization=...)``). Raises UsageError when the model is quantized or
    fitted already, ModelError for weights that are not finite, UnsupportedError where nothing can be quantized.
    """
    refuse_second(model)
    if _MARK in vars(model):
        raise UsageError(
            f"Cannot quantize {type(model).__name__}.",
            f"It is already ({vars(model)[_MARK]}).",
            "Call .remove() on that handle first.",
        )
    return QuantizationHandle(model, Quantization.of(asked))


class QuantizationHandle:
    """``report`` says what was done."""

    def __init__(self, model: nn.Module, asked: Quantization) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []
        layers = chosen(model, asked)
        self.report = _report(model, layers, asked)
        vars(model)[_MARK] = asked
        self._undo.append(lambda: vars(model).pop(_MARK))
        try:
            for path, module in layers.items():
                self._undo.append(become(module, *_quantized(path, module, asked)))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give the model its own weights back, as they were. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def _quantized(path: str, module: Any, asked: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    weight = module.weight.detach()
    try:
        return quantize(asked, weight.t() if is_transposed(module) else weight)
    except ValueError as error:
        raise ModelError(f"Cannot quantize {path}.weight.", f"{error}.", "Check the weights.") from error


def _report(model: nn.Module, layers: dict[str, nn.Module], asked: Quantization) -> Quantized:
    weights: Any = [module.weight for module in layers.values()]
    return Quantized(
        layers=len(layers),
        weights=sum(weight.numel() for weight in weights),
        total_weights=sum(p.numel() for p in model.parameters()),
        wide_bytes=sum(tensor_bytes(weight) for weight in weights),
        stored_bytes=sum(stored_bytes(asked, *sides(module)) for module in layers.values()),
    )


def stored_bytes(asked: Quantization, out: int, inside: int) -> int:
    """Codes and scales of a weight (out, in) that the scheme can hold."""
    forms = form(asked, out, inside)
    assert forms is not None
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in forms)
