"""A linear layer whose weight is stored in 8 or 4 bits, in plain tensors, and widened to be multiplied.

| scheme | ``codes`` | ``scale`` | the weight |
|---|---|---|---|
| ``int8`` | int8 (out, in) | float32 (out,) | codes * scale; the largest of a row is 127 |
| ``int4`` | uint8 (out / B, in, B / 2) | bfloat16 (in / group, out, 2) | (code - 8) * scale + zero |
| ``fp8`` | float8_e4m3fn (out, in) | float32 (1, 1) | codes * scale; the largest is 448 |

Two codes of ``int4`` share a byte: of B = 32 outputs (64 where the CPU has AVX-512) the first half has the low bits.
This layout, with scale beside zero, is that of PyTorch's CPU kernel (aten/src/ATen/native/cpu/int4mm_kernel.cpp).

The numerics are round-to-nearest, a few lines each: those of torchao's primitives for int8
(torchao/quantization/quant_primitives.py, symmetric per row), and for int4 its tinygemm form with a better fit of the
groups. torchao itself is not needed: it keeps weights in tensor subclasses, which a ring of flat buffers cannot hold,
and its primitives' names have changed from version to version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from brim.errors import UsageError
from brim.techniques.blocks import is_transposed
from brim.units import MIB

SCHEMES = ("int8", "int4", "fp8")
GROUPS = (32, 64, 128, 256)  # those of PyTorch's int4 kernels

_CPU = torch.device("cpu")
_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_FLOAT8_MULTIPLE = 16  # of both sides of a float8 product (aten/src/ATen/native/cuda/ScaledBlas.cpp)
_BLOCK = 32
_BLOCKS = {"AVX2": 32, "AVX512": 64}  # outputs that PyTorch's int4 kernel takes at once, by the CPU's capability
_INT8_STEP = 16  # inputs that its int8 kernel takes at once, without a remainder
_FUSED_ROWS = 16  # from this number of rows on int8 is widened once, not for every four rows
_ALIGNMENT_BYTES = 64
_FITS = 4
_PIECE_BYTES = 8 * MIB  # float32 bytes of a weight that are quantized at once
# Bytes that are widened at once: on a CPU they stay in the cache; on a GPU they fill it, and are few beside a model.
_WIDE_CPU_BYTES, _WIDE_BYTES = 2 * MIB, 32 * MIB


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The quantization of the weights of linear layers.

    Attributes:
        scheme: ``"int8"``, ``"int4"`` or ``"fp8"``.
        group: For ``"int4"``: the number of inputs that share a scale: 32, 64, 128 or 256.
        head: True if the output embeddings are quantized too.
    """

    scheme: str
    group: int = 64
    head: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UsageError(f"Unknown quantization {self.scheme!r}.", f"Known: {', '.join(SCHEMES)}.")
        if self.group not in GROUPS:
            raise UsageError(f"Cannot quantize in groups of {self.group} weights.", f"Known: {GROUPS}.")

    @classmethod
    def of(cls, quantization: str | Quantization) -> Quantization:
        """A quantization, or the defaults of a scheme by its name. Raises UsageError for an unknown name."""
        return quantization if isinstance(quantization, Quantization) else cls(scheme=quantization)

    def __str__(self) -> str:
        grouped = self.scheme == "int4" and self.group != Quantization.group
        return self.scheme + f" of {self.group}" * grouped + ", head too" * self.head


Form = tuple[tuple[torch.dtype, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]]


def form(quantization: Quantization, out: int, inside: int) -> Form | None:
    """The dtypes and shapes of ``codes`` and ``scale`` for a weight (out, in); None if the scheme has none."""
    if quantization.scheme == "int8":
        return (torch.int8, (out, inside)), (torch.float32, (out,))
    if quantization.scheme == "fp8":
        fits = out % _FLOAT8_MULTIPLE == 0 and inside % _FLOAT8_MULTIPLE == 0
        return ((_E4M3, (out, inside)), (torch.float32, (1, 1))) if fits else None
    group = next((g for g in reversed(GROUPS) if g <= quantization.group and inside % g == 0), None)
    if group is None or out % _BLOCK:
        return None
    block = _fused_block() if _fused_block() and out % _fused_block() == 0 else _BLOCK
    codes = (torch.uint8, (out // block, inside, block // 2))
    return codes, (torch.bfloat16, (inside // group, out, 2))


@cache
def _fused_block() -> int:
    """The outputs per block of PyTorch's int4 kernel on this CPU; 0 where it is not vectorized."""
    return _BLOCKS.get(torch.backends.cpu.get_cpu_capability(), 0)


# -- to codes -------------------------------------------------------------------------------------------------------

Rows = Callable[[int, int], torch.Tensor]  # first and last row -> that part of the weight


def quantize(quantization: Quantization, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scale of ``weight`` (out, in), of any floating dtype."""
    out, inside = weight.shape
    return quantize_rows(quantization, out, inside, lambda start, stop: weight[start:stop], weight.device)


def quantize_rows(
    quantization: Quantization, out: int, inside: int, rows: Rows, device: torch.device = _CPU
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scale of a weight that is read some rows at a time. Raises ValueError if it is not finite."""
    forms = form(quantization, out, inside)
    assert forms is not None, "only layers with a quantized form are quantized"
    codes, scale = (torch.empty(shape, dtype=dtype, device=device) for dtype, shape in forms)
    step = max(64, _PIECE_BYTES // (4 * inside) // 64 * 64)
    pieces = [(start, min(start + step, out)) for start in range(0, out, step)]
    if quantization.scheme == "fp8":
        scale.fill_(_divided(torch.stack([_largest(rows(*piece)).amax() for piece in pieces]).amax(), _E4M3_MAX))
    for start, stop in pieces:
        wide = rows(start, stop).float()
        if quantization.scheme == "fp8":
            codes[start:stop] = (wide / scale).clamp_(-_E4M3_MAX, _E4M3_MAX)
        elif quantization.scheme == "int8":
            scale[start:stop] = _divided(_largest(wide).squeeze(1), 127)
            codes[start:stop] = (wide / scale[start:stop, None]).round_().clamp_(-127, 127)
        else:
            block = 2 * codes.shape[-1]
            codes[start // block : stop // block] = _to_int4(wide, scale[:, start:stop], block)
    return codes, scale


def _largest(weight: torch.Tensor) -> torch.Tensor:
    largest = weight.abs().amax(1, keepdim=True).float()
    if not bool(largest.isfinite().all()):
        raise ValueError("It has values that are not finite")
    return largest


def _divided(largest: torch.Tensor, codes: float) -> torch.Tensor:
    """The scale that maps ``largest`` to the largest code; 1 for a row of zeros."""
    return torch.where(largest > 0, largest / codes, 1.0)


def _to_int4(wide: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """The codes of some rows. Fills their ``scale`` (in / group, rows, 2): the step, and the value of code 8."""
    _largest(wide)
    groups = wide.view(len(wide), len(scale), -1)  # (rows, in / group, group)
    step, zero = (fitted.to(scale.dtype) for fitted in _fitted(groups))
    scale[..., 0], scale[..., 1] = step.squeeze(-1).t(), zero.squeeze(-1).t()
    codes = _nearest(groups, step.float(), zero.float()).add_(8)
    tiles = codes.to(torch.uint8).view(-1, block, wide.shape[1]).transpose(1, 2)
    return tiles[..., : block // 2] | tiles[..., block // 2 :] << 4


def _fitted(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step and zero of each group (rows, in / group, 1): from its least and largest values, then a few rounds of
    least squares over the codes, which clip outliers (the error is a tenth less than without)."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = torch.where(high > low, (high - low) / 15, 1.0)
    zero = torch.where(high > low, low + 8 * step, low)
    mean = groups.mean(-1, keepdim=True)
    for _ in range(_FITS):
        codes = _nearest(groups, step, zero)
        center = codes.mean(-1, keepdim=True)
        codes -= center
        slope = (codes * (groups - mean)).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True)
        better = slope > 0  # False if all codes are equal, which gives NaN
        step = torch.where(better, slope, step)
        zero = torch.where(better, mean - slope * center, zero)
    return step, zero


def _nearest(groups: torch.Tensor, step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (groups - zero).div_(step).round_().clamp_(-8, 7)


# -- from codes -----------------------------------------------------------------------------------------------------


def expand(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out, in) of ``codes`` and ``scale``."""
    if codes.dtype != torch.uint8:
        wide = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        _widen_bytes(codes, wide)
        return wide.mul_(scale[:, None] if scale.dim() == 1 else scale).to(dtype)
    tiles = torch.empty(*codes.shape[:2], 2 * codes.shape[2], dtype=torch.float32, device=codes.device)
    _widen_int4(codes, scale, 0, tiles)
    return tiles.transpose(1, 2).reshape(-1, codes.shape[1]).to(dtype)


def _widen_bytes(codes: torch.Tensor, wide: torch.Tensor) -> None:
    if codes.dtype != _E4M3 or codes.device.type != "cpu":
        wide.copy_(codes)
        return
    # PyTorch converts float8 one by one (50 million a second). Its seven bits of magnitude, shifted to the first bits
    # of a float16, are a number 2**8 times smaller, subnormal ones included: the exponents' biases are 7 and 15.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    wide.copy_(bits.view(torch.float16)).mul_(256)


def _widen_int4(codes: torch.Tensor, scale: torch.Tensor, first: int, tiles: torch.Tensor) -> None:
    """Fill ``tiles`` (tiles, in, B) with the weights of ``codes``, whose first output is ``first``."""
    count, inside, block = tiles.shape
    tiles[..., : block // 2] = codes & 15
    tiles[..., block // 2 :] = codes >> 4
    part = scale[:, first : first + count * block].to(tiles.dtype).view(len(scale), count, block, 2).transpose(0, 1)
    step, zero = part[..., 0].unsqueeze(2), part[..., 1].unsqueeze(2)  # (tiles, groups, 1, B)
    tiles.view(count, len(scale), inside // len(scale), block).sub_(8).mul_(step).add_(zero)


def _outputs(codes: torch.Tensor, scale: torch.Tensor) -> int:
    return scale.shape[1] if codes.dtype == torch.uint8 else codes.shape[0]


@torch.library.custom_op("brim::quantized_mm", mutates_args=("scratch",))
def quantized_mm(rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The product (rows, out) of ``rows`` (rows, in) and the weight, without a scale per output.

    The weight is widened in ``scratch``, a part at a time, to the dtype of ``rows``; PyTorch's CPU kernels do it in
    registers, and ``scratch`` is empty.
    """
    if not scratch.numel():
        return _fused(rows, codes, scale)
    return (_by_tiles if codes.dtype == torch.uint8 else _by_rows)(rows, codes, scale, scratch)


@quantized_mm.register_fake
def _(rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], _outputs(codes, scale))


@register_flop_formula(torch.ops.brim.quantized_mm, get_raw=True)
def _flops(rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * rows.numel() * _outputs(codes, scale)


def _fused(rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, codes = _aligned(rows.contiguous()), _aligned(codes)
    if codes.dtype == torch.int8:
        return torch._weight_int8pack_mm(rows, codes, torch.ones(len(codes), dtype=rows.dtype))
    out, group = scale.shape[1], rows.shape[1] // scale.shape[0]
    return torch._weight_int4pack_mm_for_cpu(rows, codes.view(out, -1), group, scale.to(rows.dtype))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """An aligned copy if needed: the kernels load vectors without a check of their alignment."""
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()


def _by_rows(rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    out, inside = codes.shape
    product, step = rows.new_empty(rows.shape[0], out), scratch.numel() // inside
    for start in range(0, out, step):
        part = codes[start : start + step]
        wide = scratch[: part.numel()].view(part.shape)
        _widen_bytes(part, wide)
        torch.mm(rows, wide.t(), out=product[:, start : start + step])
    return product


def _by_tiles(rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    count, inside, half = codes.shape
    block = 2 * half
    product, step = rows.new_empty(rows.shape[0], count * block), scratch.numel() // (inside * block)
    for start in range(0, count, step):
        part = codes[start : start + step]
        tiles = scratch[: 2 * part.numel()].view(len(part), inside, block)
        _widen_int4(part, scale, start * block, tiles)
        products = torch.matmul(rows, tiles)  # (tiles, rows, B)
        product[:, start * block : start * block + len(part) * block].view(-1, len(part), block).copy_(
            products.transpose(0, 1)
        )
    return product


# -- the layer ------------------------------------------------------------------------------------------------------


class QuantizedLinear(nn.Linear):
    """A linear layer with ``codes`` and ``scale`` as parameters, which are streamed as they are stored.

    ``weight`` is widened at every access: code that reads it instead of calling the layer is slow, not wrong.
    Gradients flow to the input (through the wide weight), not to the codes.
    """

    codes: nn.Parameter
    scale: nn.Parameter
    wide_dtype: torch.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return expand(self.codes, self.scale, self.wide_dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)
        rows = input.reshape(-1, self.in_features)
        dtype, wide = self._product_dtype(rows)
        scratch = rows.new_empty(wide, dtype=dtype)
        output: torch.Tensor = quantized_mm(rows.to(dtype), self.codes, self.scale, scratch)
        del scratch, rows
        if self.codes.dtype != torch.uint8:
            output = output * self.scale.reshape(-1)
        output = output.to(input.dtype)
        if self.bias is not None:
            output = output + self.bias
        return output.reshape(*input.shape[:-1], self.out_features)

    def _product_dtype(self, rows: torch.Tensor) -> tuple[torch.dtype, int]:
        """The dtype of the product, and the number of weights to widen at once: 0 where a kernel does it itself.

        The CPU's kernels take bfloat16: the error of rounding the input is a fifth of that of int8, and less of
        int4's.
        """
        if rows.device.type == "cpu" and self._is_fused(rows.shape[0]):
            return torch.bfloat16, 0
        # A CPU without native bfloat16 is faster in float32.
        on_cpu = rows.device.type == "cpu"
        # Codes without their scale exceed the range of float16; those of groups are scaled already.
        over = rows.dtype == torch.float16 and self.codes.dtype != torch.uint8
        dtype = torch.float32 if on_cpu else torch.bfloat16 if over else rows.dtype
        wide = (_WIDE_CPU_BYTES if on_cpu else _WIDE_BYTES) // dtype.itemsize
        unit = self.in_features * (2 * self.codes.shape[-1] if self.codes.dtype == torch.uint8 else 1)
        return dtype, min(max(wide // unit, 1) * unit, self.in_features * self.out_features)

    def _is_fused(self, rows: int) -> bool:
        if self.codes.dtype == torch.uint8:
            return 2 * self.codes.shape[-1] == _fused_block()
        fits = self.codes.dtype == torch.int8 and self.in_features % _INT8_STEP == 0
        return fits and bool(_fused_block()) and rows <= _FUSED_ROWS


def sides(linear: nn.Module) -> tuple[int, int]:
    """The sizes (out, in) of an ``nn.Linear`` or of transformers' ``Conv1D``, whose weight is transposed."""
    weight: Any = linear.weight
    return (weight.shape[1], weight.shape[0]) if is_transposed(linear) else (weight.shape[0], weight.shape[1])


def become(linear: Any, codes: torch.Tensor, scale: torch.Tensor) -> Callable[[], None]:
    """Turn ``linear``, with its hooks, into a QuantizedLinear. Returns the function that undoes it."""
    kind, parameters, before = type(linear), dict(linear._parameters), dict(vars(linear))
    dtype = linear.weight.dtype
    out, inside = sides(linear)
    linear._parameters.clear()
    linear.__class__ = QuantizedLinear
    linear.in_features, linear.out_features, linear.wide_dtype = inside, out, dtype
    linear.codes = nn.Parameter(codes, requires_grad=False)
    linear.scale = nn.Parameter(scale, requires_grad=False)
    linear.register_parameter("bias", parameters.get("bias"))

    def undo() -> None:
        linear.__class__ = kind
        linear._parameters.clear()
        linear._parameters.update(parameters)
        for name in ("in_features", "out_features", "wide_dtype"):
            vars(linear).pop(name)
            if name in before:
                vars(linear)[name] = before[name]

    return undo
