"""Reference results of operators that have a CUDA kernel and none for the CPU, or one with other results.

Each function takes a generator (None for deterministic ones) and the operator's arguments on the host. They are
composed of CPU operators, in float32 or wider, for correctness and not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

Reference = Callable[..., Any]
UNUSED = object()  # a result that is never read, and left uninitialised
_references: dict[str, Reference] = {}
_WITH_OUT = frozenset({"log_sigmoid_backward"})


def overloads() -> Iterator[tuple[OpOverload, Reference]]:
    """Every overload with a reference."""
    for name, function in _references.items():
        packet, _, overload = name.partition(".")
        operators = getattr(torch.ops.aten, packet, None)  # other versions of PyTorch may not have it
        if operators is None:
            continue
        for overload_name in [overload] if overload else operators.overloads():
            if overload_name in operators.overloads() and not (
                overload_name.endswith("out") and packet not in _WITH_OUT
            ):
                yield getattr(operators, overload_name), function


def bound(overload: OpOverload, function: Reference, seed: Callable[[], int]) -> Callable[..., Any]:
    """The reference in the form for the dispatcher: with a generator of ``seed``, and blanks for unused results."""
    types = [str(returned.type) for returned in overload._schema.returns]

    def call(*arguments: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():
            generator = torch.Generator("cpu").manual_seed(seed() & (1 << 63) - 1)
            results = function(generator, *arguments, **named)
        if not isinstance(results, tuple):
            return results
        blank = {"Tensor": None}
        return tuple(
            blank.get(kind, 0) if result is UNUSED else result for result, kind in zip(results, types, strict=True)
        )

    return call


def _of(*names: str) -> Callable[[Reference], Reference]:
    def put(function: Reference) -> Reference:
        for name in names:
            _references[name] = function
        return function

    return put


# ---------------------------------------------------------------------------------------------------------- dropout


def _keep_mask(generator: torch.Generator | None, like: Tensor, p: float) -> Tensor:
    """Mask of the elements that dropout retains."""
    return torch.rand(like.shape, generator=generator, device="cpu") >= p


@_of("native_dropout")
def _native_dropout(generator: torch.Generator | None, input: Tensor, p: float, train: bool | None) -> Any:
    if train is False:
        return input.clone(), torch.ones(input.shape, dtype=torch.bool, device="cpu")
    mask = _keep_mask(generator, input, p)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


@_of("_fused_dropout")
def _fused_dropout(generator: torch.Generator | None, input: Tensor, p: float, given: Any = None) -> Any:
    mask = torch.rand(input.shape, generator=generator, device="cpu") < p  # here p is the retained share
    return input * mask / p, mask.to(torch.uint8)


@_of("_masked_scale")
def _masked_scale(_: Any, input: Tensor, mask: Tensor, scale: float) -> Tensor:
    return input * mask * scale


@_of("log_sigmoid_backward")
def _log_sigmoid_backward(_: Any, grad_output: Tensor, self: Tensor, buffer: Tensor, **out: Tensor) -> Tensor:
    gradient = (_wide(grad_output) * torch.sigmoid(-_wide(self))).to(self.dtype)
    return out["grad_input"].copy_(gradient) if out else gradient


# -------------------------------------------------------------------------------------------------------- attention


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


class _Attention:
    """Scaled dot-product attention over tensors of (batch, heads, length, width), with the state for backward."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Tensor | None,
        causal: int,
        scale: float | None,
        window: tuple[int, int] = (-1, -1),
    ) -> None:
        self.query, self.key, self.value = _wide(query), _wide(key), _wide(value)
        self.groups = query.shape[1] // key.shape[1]
        if self.groups > 1:
            self.key = self.key.repeat_interleave(self.groups, 1)
            self.value = self.value.repeat_interleave(self.groups, 1)
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = self.query @ self.key.transpose(-1, -2) * self.scale
        if bias is not None:
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + _wide(bias)
        rows, columns = scores.shape[-2:]
        row, column = torch.arange(rows, device="cpu")[:, None], torch.arange(columns, device="cpu")[None]
        shift = columns - rows if causal == 2 else 0  # 1: from the upper left corner; 2: from the lower right one
        hidden = torch.zeros(rows, columns, dtype=torch.bool, device="cpu")
        if causal:
            hidden |= column > row + shift
        if window[0] >= 0:
            hidden |= column < row + columns - rows - window[0]
        if window[1] >= 0:
            hidden |= column > row + columns - rows + window[1]
        self.scores = scores = scores.masked_fill(hidden, -math.inf)
        self.out: Tensor | None = None
        self.logsumexp = torch.logsumexp(scores, -1)
        self.weights = torch.exp(scores - self.logsumexp[..., None]).nan_to_num(0.0)

    def output(self, dropped: Tensor | float = 1.0) -> Tensor:
        return (self.weights * dropped) @ self.value

    def as_part(self, out: Tensor, logsumexp: Tensor) -> _Attention:
        """This as a part of a larger attention (a ring's), whose output and log-sum-exp are given to backward."""
        self.logsumexp, self.out = _wide(logsumexp[..., : self.scores.shape[-2]]), _wide(out)
        self.weights = torch.exp(self.scores - self.logsumexp[..., None]).nan_to_num(0.0)
        return self

    def gradients(self, gradient: Tensor, dropped: Tensor | float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of query, key, value and bias (in the shape of the scores)."""
        wide = _wide(gradient)
        of_value = (self.weights * dropped).transpose(-1, -2) @ wide
        of_weights = (wide @ self.value.transpose(-1, -2)) * dropped
        out = self.output(dropped) if self.out is None else self.out
        of_scores = self.weights * (of_weights - (wide * out).sum(-1, keepdim=True))
        of_query = of_scores @ self.key * self.scale
        of_key = of_scores.transpose(-1, -2) @ self.query * self.scale
        return of_query, self._summed(of_key), self._summed(of_value), of_scores

    def _summed(self, gradient: Tensor) -> Tensor:
        if self.groups == 1:
            return gradient
        batch, heads, length, width = gradient.shape
        return gradient.view(batch, heads // self.groups, self.groups, length, width).sum(2)


def _seed(generator: torch.Generator | None, p: float) -> int:
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu")) if p > 0 else 0


def _dropped(seed: Tensor, attention: _Attention, p: float) -> Tensor | float:
    """Dropout's factors of the weights, drawn again in backward from the seed of forward."""
    if p <= 0:
        return 1.0
    again = torch.Generator("cpu").manual_seed(int(seed.reshape(-1)[0]))
    return _keep_mask(again, attention.weights, p) / (1 - p)


def _padded(values: Tensor, length: int) -> Tensor:
    """Pad as the device pads its log-sum-exp, to full tiles."""
    return torch.nn.functional.pad(values, (0, length - values.shape[-1]), value=math.inf)


@_of("_scaled_dot_product_flash_attention")
def _flash(
    generator: torch.Generator | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    attention = _Attention(query, key, value, bias=None, causal=int(is_causal), scale=scale)
    seed = torch.tensor([_seed(generator, dropout_p), 0], device="cpu")
    out = attention.output(_dropped(seed, attention, dropout_p)).to(query.dtype)
    return out, attention.logsumexp, UNUSED, UNUSED, UNUSED, UNUSED, seed, UNUSED, UNUSED


@_of("_scaled_dot_product_flash_attention_backward")
def _flash_backward(
    _: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    attention = _Attention(query, key, value, bias=None, causal=int(is_causal), scale=scale).as_part(out, logsumexp)
    gradients = attention.gradients(grad_out, _dropped(philox_seed, attention, dropout_p))
    return tuple(gradient.to(query.dtype) for gradient in gradients[:3])


@_of("_scaled_dot_product_efficient_attention")
def _efficient(
    generator: torch.Generator | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    attention = _Attention(query, key, value, bias=attn_bias, causal=int(is_causal), scale=scale)
    seed = torch.tensor(_seed(generator, dropout_p), device="cpu")
    out = attention.output(_dropped(seed, attention, dropout_p)).to(query.dtype)
    length = (query.shape[2] + 31) // 32 * 32 if compute_log_sumexp else 0
    sums = _padded(attention.logsumexp, length) if length else attention.logsumexp[..., :0]
    return out, sums, seed, torch.zeros_like(seed)


@_of("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(
    _: Any,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    attention = _Attention(query, key, value, bias=attn_bias, causal=int(is_causal), scale=scale)
    attention = attention.as_part(out, logsumexp)
    gradients = attention.gradients(grad_out_, _dropped(philox_seed, attention, dropout_p))
    of_bias: Any = UNUSED
    if attn_bias is not None and grad_input_mask[3]:
        of_bias = gradients[3].sum_to_size(attn_bias.shape).to(attn_bias.dtype)
    return (*(gradient.to(query.dtype) for gradient in gradients[:3]), of_bias)


@_of("_scaled_dot_product_cudnn_attention")
def _cudnn(
    generator: torch.Generator | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    attention = _Attention(query, key, value, bias=attn_bias, causal=int(is_causal), scale=scale)
    seed = torch.tensor(_seed(generator, dropout_p), device="cpu")
    out = attention.output(_dropped(seed, attention, dropout_p)).to(query.dtype)
    sums = attention.logsumexp[..., None] if compute_log_sumexp else UNUSED
    return out, sums, UNUSED, UNUSED, UNUSED, UNUSED, seed, UNUSED, UNUSED


@_of("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(
    _: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    attention = _Attention(query, key, value, bias=attn_bias, causal=int(is_causal), scale=scale)
    gradients = attention.gradients(grad_out, _dropped(philox_seed, attention, dropout_p))
    return tuple(gradient.to(query.dtype) for gradient in gradients[:3])


def _pieces(cumulative: Tensor | None, batch: int, length: int) -> list[tuple[int, int]]:
    if cumulative is None:
        return [(row * length, length) for row in range(batch)]
    edges = cumulative.tolist()
    return [(start, end - start) for start, end in pairwise(edges)]


# ------------------------------------------------------------------------------------------------ products, in parts


@_of("mm.dtype")
def _mm_dtype(_: Any, self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (_wide(self) @ _wide(mat2)).to(out_dtype)


@_of("bmm.dtype")
def _bmm_dtype(_: Any, self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (_wide(self) @ _wide(mat2)).to(out_dtype)


@_of("addmm.dtype", "baddbmm.dtype")
def _addmm_dtype(
    _: Any, self: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return (beta * _wide(self) + alpha * (_wide(left) @ _wide(right))).to(out_dtype)


@_of("_grouped_mm")
def _grouped_mm(
    _: Any,
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups of rows (2-D by 3-D), of columns (3-D by 2-D) or of both inner sides (2-D by 2-D)."""
    dtype = out_dtype or self.dtype
    if offs is None:
        return (_wide(self) @ _wide(mat2)).to(dtype)
    groups = [(start, end) for start, end in zip([0, *offs.tolist()], offs.tolist(), strict=False)]
    left, right = _wide(self), _wide(mat2)
    if left.dim() == 2 and right.dim() == 3:
        output = torch.zeros(left.shape[0], right.shape[-1], dtype=left.dtype, device="cpu")
        for number, (start, end) in enumerate(groups):
            output[start:end] = left[start:end] @ right[number]
    elif left.dim() == 3:
        output = torch.zeros(left.shape[1], right.shape[-1], dtype=left.dtype, device="cpu")
        for number, (start, end) in enumerate(groups):
            output[:, start:end] = left[number] @ right[:, start:end]
    else:
        output = torch.stack([left[:, start:end] @ right[start:end] for start, end in groups])
    return output.to(dtype)


# ---------------------------------------------------------------------------------------------------- normalization


@_of("_fused_rms_norm")
def _rms_norm(_: Any, input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
    wide = _wide(input)
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    scale = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    out = wide * scale if weight is None else wide * scale * _wide(weight)
    return out.to(input.dtype), scale


@_of("_fused_rms_norm_backward")
def _rms_norm_backward(
    _: Any,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> Any:
    wide, gradient, scale = _wide(input), _wide(grad_out), _wide(rstd)
    dims = tuple(range(-len(normalized_shape), 0))
    weighted = gradient if weight is None else gradient * _wide(weight)
    normal = wide * scale
    of_input = scale * (weighted - normal * (weighted * normal).mean(dims, keepdim=True))
    of_weight: Any = UNUSED
    if weight is not None and output_mask[1]:
        of_weight = (gradient * normal).sum_to_size(weight.shape).to(weight.dtype)
    return of_input.to(input.dtype) if output_mask[0] else UNUSED, of_weight


@_of("cudnn_batch_norm")
def _cudnn_batch_norm(
    _: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> Any:
    out, mean, scale = torch.ops.aten.native_batch_norm(
        input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
    )
    return out, mean, scale, UNUSED


@_of("cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(
    _: Any,
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
    reserveSpace: Tensor,
) -> Any:
    return torch.ops.aten.native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, [True] * 3
    )


@_of("_batch_norm_with_update")
def _batch_norm_with_update(
    _: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    outputs = torch.ops.aten.native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*outputs, UNUSED)


@_of("batch_norm_backward")
def _batch_norm_backward(
    _: Any,
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: list[bool],
    reserve: Tensor,
) -> Any:
    return torch.ops.aten.native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


# ------------------------------------------------------------------------------------------------------ convolutions


@_of("cudnn_convolution")
def _cudnn_convolution(
    _: Any,
    self: Tensor,
    weight: Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    benchmark: bool = False,
    deterministic: bool = False,
    allow_tf32: bool = False,
) -> Tensor:
    output: Tensor = torch.ops.aten.convolution(
        self, weight, None, stride, padding, dilation, False, [0] * len(padding), groups
    )
    return output


@_of("cudnn_convolution_transpose")
def _cudnn_convolution_transpose(
    _: Any,
    self: Tensor,
    weight: Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *rest: bool,
) -> Tensor:
    output: Tensor = torch.ops.aten.convolution(
        self, weight, None, stride, padding, dilation, True, output_padding, groups
    )
    return output


@_of("_conv_depthwise2d")
def _conv_depthwise2d(
    _: Any,
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    output: Tensor = torch.ops.aten.convolution(
        self, weight, bias, stride, padding, dilation, False, [0, 0], self.shape[1]
    )
    return output


@_of("conv_depthwise3d")
def _conv_depthwise3d(
    _: Any,
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    output: Tensor = torch.ops.aten.convolution(
        self, weight, bias, stride, padding, dilation, False, [0, 0, 0], self.shape[1]
    )
    return output


# ----------------------------------------------------------------------------------------------------------- integers


@_of("histc")
def _histc(_: Any, input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Histogram of integers too, which the CPU refuses: a mixture's tokens per expert are counted so."""
    if input.dtype in (torch.float32, torch.float64):
        return torch.histc(input, bins, min, max)
    return torch.histc(input.double(), bins, min, max).to(input.dtype)


# ----------------------------------------------------------------------------------------------- recurrent networks


@_of("_thnn_fused_lstm_cell")
def _lstm_cell(
    _: Any,
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    entered, forgotten, cell, left = gates.chunk(4, 1)
    entered, forgotten, cell, left = entered.sigmoid(), forgotten.sigmoid(), cell.tanh(), left.sigmoid()
    new = forgotten * cx + entered * cell
    return left * new.tanh(), new, torch.cat([entered, forgotten, cell, left], 1)


@_of("_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(
    _: Any, grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Any:
    entered, forgotten, cell, left = workspace.chunk(4, 1)
    bent = cy.tanh()
    of_hidden = torch.zeros_like(cy) if grad_hy is None else grad_hy
    of_cell = of_hidden * left * (1 - bent * bent) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat(
        [
            of_cell * cell * entered * (1 - entered),
            of_cell * cx * forgotten * (1 - forgotten),
            of_cell * entered * (1 - cell * cell),
            of_hidden * bent * left * (1 - left),
        ],
        1,
    )
    return gates, of_cell * forgotten, gates.sum(0) if has_bias else UNUSED
