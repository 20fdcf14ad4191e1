"""Linear layers of 8 and 4 bits with the same storages, lasting and temporary, as in the libraries; for traces only.

``int8`` is LLM.int8 of bitsandbytes (Dettmers et al., arXiv 2208.07339): one float32 scale per row of the weight,
inputs rounded at every call, no input taken for an outlier. ``int4`` is its 4-bit layer as QLoRA has it (arXiv
2305.14314): two weights in a byte, a float32 scale per block of 64, scales themselves not quantized. Both follow
bitsandbytes 0.50, bitsandbytes/autograd/_functions.py and bitsandbytes/backends/cuda/ops.py. ``fp8`` is torchao's
(torchao 0.18) with one scale per tensor: torchao/float8/float8_linear.py to train, where weights and saved inputs
stay in bfloat16, and Float8DynamicActivationFloat8WeightConfig to generate, where weights take one byte.

Only memory and work are those of the libraries. The layers have no values and cannot compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from brim.errors import UnsupportedError, UsageError

_BLOCK = 64  # weights that share one scale of int4
_NESTED_BLOCK = 256  # scales that share one scale, with double quantization
_CODES = 16  # values that four bits can have
_FUSED_ROWS = 4  # up to so many rows int4's product reads packed weights; with more the choice is by GPU and shape
_OUTLIER = 6.0  # LLM.int8's threshold
_FLOAT8_ALIGNMENT = 16  # of both sides of a float8 product (aten/src/ATen/native/cuda/ScaledBlas.cpp)
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# -- kernels that PyTorch does not have ------------------------------------------------------------------------------


# Defined by hand: ``custom_op`` adds autograd and checks to every call.
_LIBRARY = torch.library.Library("brim", "FRAGMENT")


def define(schema: str, on_fake_tensors: Callable[..., torch.Tensor]) -> None:
    """Define an operator of the namespace ``brim`` that exists for traces only."""
    _LIBRARY.define(schema)
    torch.library.register_fake(f"brim::{schema.partition('(')[0]}", on_fake_tensors, lib=_LIBRARY)


define(
    "dequantize_4bit(Tensor packed, Tensor absmax, SymInt[] shape, Tensor like) -> Tensor",
    lambda packed, absmax, shape, like: like.new_empty(shape),
)
define(
    "gemm_4bit(Tensor input, Tensor packed, Tensor absmax, int width) -> Tensor",
    lambda input, packed, absmax, width: input.new_empty((*input.shape[:-1], width)),
)


@register_flop_formula(torch.ops.brim.gemm_4bit, get_raw=True)
def _gemm_4bit_flops(input: torch.Tensor, packed: object, absmax: object, width: int, **_: object) -> int:
    return 2 * input.numel() * width


def _set_parameters(layer: nn.Module, parts: Mapping[str, torch.Tensor]) -> None:
    """Set parameters of the names and shapes that a layer of a checkpoint has (models/prequantized.py)."""
    for name, tensor in parts.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


# -- int4 -----------------------------------------------------------------------------------------------------------


class Linear4bit(nn.Linear):
    """``weight``: (in * out / 2, 1) bytes; ``weight_absmax``: a float32 per block; ``weight_quant_map``: 16 values.

    With double quantization a byte per block, and a float32 per 256 of them with their 256 values and their offset.
    """

    weight_absmax: torch.Tensor

    def take_over(self, nested: bool = False) -> None:
        count = self.in_features * self.out_features
        blocks = ceil(count / _BLOCK)
        parts = {
            "weight": torch.empty(ceil(count / 2), 1, dtype=torch.uint8),
            "weight_absmax": torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32),
            "weight_quant_map": torch.empty(_CODES),
        }
        if nested:
            parts["weight_nested_absmax"] = torch.empty(ceil(blocks / _NESTED_BLOCK))
            parts["weight_nested_quant_map"] = torch.empty(_NESTED_BLOCK)
            self.register_buffer("weight_offset", torch.empty(()))
        _set_parameters(self, parts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            output: torch.Tensor = _Product4bit.apply(  # type: ignore[no-untyped-call]
                input, self.weight, self.weight_absmax, self.bias, self.out_features
            )
            return output
        return _product_4bit(input, self.weight, self.weight_absmax, self.bias, self.out_features)


def _product_4bit(
    input: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None, width: int
) -> torch.Tensor:
    inside, absmax = input.shape[-1], _scales(absmax)
    if input.numel() <= _FUSED_ROWS * inside and inside % _BLOCK == 0:
        output: torch.Tensor = torch.ops.brim.gemm_4bit(input, packed, absmax, width)  # adds the bias itself
        return output
    weight = torch.ops.brim.dequantize_4bit(packed, absmax, [width, inside], input)
    return nn.functional.linear(input, weight, bias)


def _scales(absmax: torch.Tensor) -> torch.Tensor:
    """Return float32 scales: those of double quantization are made of their bytes at every call."""
    return (
        absmax
        if absmax.dtype is torch.float32
        else torch.ops.brim.dequantize_4bit(
            absmax, absmax, list(absmax.shape), absmax.new_empty((), dtype=torch.float32)
        )
    )


class _Product4bit(torch.autograd.Function):
    """Keeps the packed weight alone: weights do not train, so the input is not needed again."""

    @staticmethod
    def forward(ctx: Any, input: Any, packed: Any, absmax: Any, bias: Any, width: int) -> torch.Tensor:
        ctx.weight, ctx.shape = (packed, absmax), (width, input.shape[-1])
        return _product_4bit(input, packed, absmax, bias, width)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        packed, absmax = ctx.weight
        weight = torch.ops.brim.dequantize_4bit(packed, _scales(absmax), list(ctx.shape), grad)
        return torch.matmul(grad, weight), None, None, None, None


# -- int8 -----------------------------------------------------------------------------------------------------------


class Linear8bit(nn.Linear):
    """``weight``: (out, in) bytes; ``SCB``: (out,) float32."""

    SCB: torch.Tensor

    def take_over(self) -> None:
        weight = torch.empty(self.out_features, self.in_features, dtype=torch.int8)
        _set_parameters(self, {"weight": weight, "SCB": torch.empty(self.out_features)})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Product8bit.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.SCB, self.bias
        )
        return output


class _Product8bit(torch.autograd.Function):
    """Keeps its input as a plain attribute, which is freed with the graph only."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, scale: Any, bias: Any) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        rounded, _scale = _rounded_rows(rows.to(torch.float16))
        output = _rescaled(torch._int_mm(rounded, weight.t()), bias, rows.dtype)
        ctx.weight, ctx.scale, ctx.dtype, ctx.shape = weight, scale, input.dtype, input.shape
        if ctx.needs_input_grad[0]:
            ctx.rows = rows
        return output.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        weight = ctx.weight.to(ctx.dtype, copy=True).mul_(ctx.scale.unsqueeze(1).mul(1 / 127))
        return torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape), None, None, None


def _rounded_rows(half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = half.new_empty(half.shape[0], dtype=torch.float32)
    rounded = torch.empty_like(half, dtype=torch.int8)
    outliers = half.abs() >= _OUTLIER
    outliers.any()
    return rounded, scale


def _rescaled(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    output = torch.zeros_like(product, dtype=torch.float16)  # the kernel writes float16 whatever the type
    if bias is not None and bias.dtype != torch.float16:
        output.add_(bias)
    return output.to(dtype)


# -- fp8 ------------------------------------------------------------------------------------------------------------


class Float8Linear(nn.Linear):
    """For training: the weight is not rounded; the inputs of each of the three products are."""

    def take_over(self) -> None:
        """Return the weight unchanged."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // input.shape[-1]
        if torch.is_grad_enabled() and rows % _FLOAT8_ALIGNMENT:
            raise UsageError(
                f"Cannot train in fp8 with {rows:,} rows in a linear layer.",
                f"Products in float8 take multiples of {_FLOAT8_ALIGNMENT}.",
                "Choose batch and sequence length so that their product is a multiple.",
            )
        output: torch.Tensor = _ProductFloat8.apply(input, self.weight.t())  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _ProductFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Any, weight_t: Any) -> torch.Tensor:
        ctx.save_for_backward(input, weight_t)
        first, second = _float8(input, _E4M3), _float8(weight_t, _E4M3)
        return _mm_float8(first.reshape(-1, input.shape[-1]), second, input.dtype).reshape(
            *input.shape[:-1], weight_t.shape[-1]
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        input, weight_t = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        first, second = _float8(rows, _E5M2), _float8(weight_t, _E4M3)
        grad_input = _mm_float8(first, second.t(), rows.dtype).reshape(input.shape)
        first_again, third = _float8(rows, _E5M2), _float8(input.reshape(-1, input.shape[-1]), _E4M3)
        return grad_input, _mm_float8(first_again.t(), third, rows.dtype).t()


class Float8WeightLinear(nn.Linear):
    """For generation: ``weight`` (out, in) of one byte each and one scale; inputs are rounded at every call."""

    scale: torch.Tensor

    def take_over(self) -> None:
        _set_parameters(self, {"weight": torch.empty(self.out_features, self.in_features, dtype=_E4M3)})
        self.register_buffer("scale", torch.empty(1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        scale = rows.abs().amax().div(torch.finfo(_E4M3).max).float().reshape(1, 1)
        rounded = _rounded_float8(rows, scale)
        output = torch._scaled_mm(
            rounded, self.weight.t(), scale_a=scale, scale_b=self.scale, bias=self.bias, out_dtype=input.dtype
        )
        return output.reshape(*input.shape[:-1], self.out_features)


def _rounded_float8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """torchao's _quantize_affine_float8 holds three float32 copies until it returns."""
    wide = rows.float()
    scaled = wide / scale
    return scaled.clamp(-1, 1).to(_E4M3)


def _float8(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    amax = torch.max(torch.abs(tensor))
    scale = (1 / torch.clamp(amax.double(), min=1e-12)).float()
    scaled = tensor.float() * scale
    return scaled.clamp(-1, 1).to(dtype)


def _mm_float8(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cuBLASLt multiplies rows with columns: an operand in the other layout is copied (float8_ops.py)."""
    if first.stride(0) < first.stride(1):
        first = first.contiguous()
    if second.stride(0) > second.stride(1):
        second = second.t().contiguous().t()
    scale = first.new_empty((), dtype=torch.float32)
    return torch._scaled_mm(first, second, scale_a=scale, scale_b=scale, out_dtype=dtype)


# -- which layers ---------------------------------------------------------------------------------------------------


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _fits_float8(layer: nn.Module) -> bool:
    """Return whether torchao replaces a layer: it leaves GPT-2's Conv1D as it is."""
    return type(layer) is nn.Linear and not any(size % _FLOAT8_ALIGNMENT for size in layer.weight.shape)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The library that implements a precision, and its layers for training and generation."""

    description: str
    to_train: type[nn.Linear]
    to_generate: type[nn.Linear]
    replaces: Callable[[nn.Module], bool] = is_linear  # among those that transformers does not skip


SCHEMES = {
    "int8": Scheme(
        description="bitsandbytes' LLM.int8, a float32 scale per row, no outliers", to_train=Linear8bit,
        to_generate=Linear8bit,
    ),
    "int4": Scheme(
        description=f"bitsandbytes' NF4, a float32 scale per {_BLOCK} weights", to_train=Linear4bit,
        to_generate=Linear4bit,
    ),
    "fp8": Scheme(
        description="torchao's float8, one scale per tensor, not compiled", to_train=Float8Linear,
        to_generate=Float8WeightLinear, replaces=_fits_float8,
    ),
}  # fmt: skip


def quantize(model: nn.Module, precision: str, *, training: bool) -> str:
    """Replace linear layers by those of ``SCHEMES[precision]``, and describe the result in one line.

    Not replaced: the layers that transformers skips (output embeddings, tied weights, the last module), and weights
    outside of linear layers (embeddings, norms, convolutions, experts in one tensor). Raises UnsupportedError if
    no layer can be replaced.
    """
    scheme = SCHEMES[precision]
    kind = scheme.to_train if training else scheme.to_generate
    linear, chosen = {name: layer for name, layer in model.named_modules() if is_linear(layer)}, choice(model)
    layers: list[Any] = [layer for name, layer in linear.items() if chosen(name) and scheme.replaces(layer)]
    if not layers:
        raise UnsupportedError(
            f"Cannot use precision={precision} for {type(model).__name__}.",
            f"None of its {len(linear)} linear layers can be quantized; the last two never are.",
            "Use bf16.",
        )
    total = sum(p.numel() for p in model.parameters())
    replaced = 0
    for layer in layers:
        replaced += layer.weight.numel()
        become(layer, kind)
    return f"{scheme.description}: in {len(layers):,} linear layers with {replaced:,} of {total:,} parameters"


def choice(model: nn.Module, skipped: Sequence[str] | None = None) -> Callable[[str], bool]:
    """Return a function that says by a layer's name whether it is replaced, as transformers decides it.

    ``skipped``: patterns of the names of layers that are not. None: those that transformers skips by default.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return lambda name: True
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    by_default = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]
    patterns = by_default if skipped is None else list(skipped)
    return lambda name: should_convert_module(name, patterns)


def become(module: Any, kind: type[nn.Linear], *form: Any) -> None:
    """Turn a linear layer into another kind in place: a new one would leave the old one's tensors behind."""
    shape = tuple(module.weight.shape)
    outside, inside = reversed(shape) if type(module).__name__ == "Conv1D" else shape
    module.__class__ = kind
    module.in_features, module.out_features = inside, outside
    module.take_over(*form)


# -- under LoRA -----------------------------------------------------------------------------------------------------


def lora_layers() -> dict[type[nn.Module], type[nn.Module]]:
    """PEFT's layers for bitsandbytes (peft/tuners/lora/bnb.py): they cast the addend, not the sum."""
    from peft.tuners.lora.layer import Linear as LoraLinear

    class _Lora8bit(LoraLinear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = self._own(self.base_layer(x, *args, **kwargs))
            for name in self.active_adapters:
                down: Any = self.lora_A[name]
                up: Any = self.lora_B[name]
                x = self._cast_input_dtype(x, down.weight.dtype)
                output = up(down(self.lora_dropout[name](x))) * self.scaling[name]
                result = result + output.to(result.dtype)
            return result

        def _own(self, result: torch.Tensor) -> torch.Tensor:
            return result

    class _Lora4bit(_Lora8bit):
        def _own(self, result: torch.Tensor) -> torch.Tensor:
            return result.clone()

    return {Linear8bit: _Lora8bit, Linear4bit: _Lora4bit}
