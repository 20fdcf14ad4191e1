"""Quantization of weights: linear layers in int8, int4 or float8, moved as they are stored, widened to multiply.

They take a quarter to an eighth of float32's bytes to store and to move, for some arithmetic and some quality: it is
never lossless. Inputs are not quantized (weight-only). Embeddings and the output layer ("head") are left out by
default: quantizing a table for look-ups saves no traffic, and errors of the head directly change the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.techniques.base import refuse_second
from brim.techniques.blocks import is_transposed, tensor_bytes
from brim.techniques.quantization.linear import (
    GROUPS,
    SCHEMES,
    Quantization,
    QuantizedLinear,
    become,
    expand,
    form,
    quantize,
    sides,
)

__all__ = ["GROUPS", "SCHEMES", "Quantization", "QuantizationHandle", "Quantized", "QuantizedLinear"]
__all__ += ["apply", "expand", "quantize", "quantize_meta", "quantized_layers", "stored_bytes"]

_MARK = "brim_quantization"


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """The counts of quantized layers and weights, of all weights, and the bytes before and after."""

    layers: int
    weights: int
    total_weights: int
    wide_bytes: int
    stored_bytes: int

    def __str__(self) -> str:
        return f"{self.layers:,} linear layers with {self.weights:,} of {self.total_weights:,} weights"


def quantized_layers(model: nn.Module, quantization: str | Quantization) -> dict[str, nn.Module]:
    """The linear layers to quantize, by path.

    Not quantized are shared weights, modules that transformers leaves out (the output embeddings unless ``head``, the
    last module), sizes that the scheme does not support, and layers that are not linear (such as fused experts).
    Raises UnsupportedError if no layer can be quantized.
    """
    quantization = Quantization.of(quantization)
    linears = {path: module for path, module in model.named_modules() if _is_linear(module)}
    is_selected = _selector(model, quantization)
    layers = {
        path: m for path, m in linears.items() if is_selected(path) and form(quantization, *sides(m)) is not None
    }
    if not layers:
        raise UnsupportedError(
            f"Cannot use quantization={quantization} for {type(model).__name__}.",
            f"None of its {len(linears)} linear layers can be quantized.",
            "Use bf16.",
        )
    return layers


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def _selector(model: nn.Module, quantization: Quantization) -> Callable[[str], bool]:
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    shared = {path for path, m in model.named_modules() if owners.get(id(m._parameters.get("weight")), 0) > 1}
    head, skipped = _skipped(model)
    if quantization.head and head:
        shared.discard(head)
        skipped = [path for path in skipped if path != head]

    def is_selected(path: str) -> bool:
        from transformers.quantizers.quantizers_utils import should_convert_module

        return path not in shared and bool(should_convert_module(path, skipped))

    return is_selected


def _skipped(model: Any) -> tuple[str, list[str]]:
    """The path of the output embeddings, and transformers' patterns of modules that it does not quantize."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return "", []
    from transformers.quantizers.base import get_keys_to_not_convert

    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head = next((path for path, module in model.named_modules() if module is output), "")
    return head, get_keys_to_not_convert(model)


def quantize_meta(model: nn.Module, quantization: str | Quantization) -> Quantized:
    """Give a model without values (meta or fake) the parameters of a quantized one, for plans and predictions."""
    quantization = Quantization.of(quantization)
    layers = quantized_layers(model, quantization)
    report = _report(model, layers, quantization)
    for module in layers.values():
        forms = form(quantization, *sides(module))
        assert forms is not None
        device = module.weight.device
        become(module, *(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in forms))  # type: ignore[arg-type]
    return report


def apply(model: nn.Module, quantization: str | Quantization) -> QuantizationHandle:
    """Quantize the linear layers of ``model`` in place, one at a time.

    The handle keeps the old weights, so that ``remove`` is exact: this is for trials. To take less memory, open the
    model quantized (``brim.load(..., quantization=...)``). Raises UsageError if the model is quantized or fitted
    already, ModelError for weights that are not finite, UnsupportedError if no layer can be quantized.
    """
    refuse_second(model)
    if _MARK in vars(model):
        raise UsageError(
            f"Cannot quantize {type(model).__name__}.",
            f"It is quantized already ({vars(model)[_MARK]}).",
            "Call .remove() on that handle first.",
        )
    return QuantizationHandle(model, Quantization.of(quantization))


class QuantizationHandle:
    """The handle. ``report`` has the counts of layers and weights."""

    def __init__(self, model: nn.Module, quantization: Quantization) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []
        layers = quantized_layers(model, quantization)
        self.report = _report(model, layers, quantization)
        vars(model)[_MARK] = quantization
        self._undo.append(lambda: vars(model).pop(_MARK))
        try:
            for path, module in layers.items():
                self._undo.append(become(module, *_quantized(path, module, quantization)))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give the model its own weights back, as they were. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def _quantized(path: str, module: Any, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    weight = module.weight.detach()
    try:
        return quantize(quantization, weight.t() if is_transposed(module) else weight)
    except ValueError as error:
        raise ModelError(f"Cannot quantize {path}.weight.", f"{error}.", "Check the weights.") from error


def _report(model: nn.Module, layers: dict[str, nn.Module], quantization: Quantization) -> Quantized:
    weights: Any = [module.weight for module in layers.values()]
    return Quantized(
        layers=len(layers),
        weights=sum(weight.numel() for weight in weights),
        total_weights=sum(p.numel() for p in model.parameters()),
        wide_bytes=sum(tensor_bytes(weight) for weight in weights),
        stored_bytes=sum(stored_bytes(quantization, *sides(module)) for module in layers.values()),
    )


def stored_bytes(quantization: Quantization, out: int, inside: int) -> int:
    """The bytes of codes and scales of a weight (out, in) that the scheme supports."""
    forms = form(quantization, out, inside)
    assert forms is not None
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in forms)
