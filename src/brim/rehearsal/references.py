"""Reference results of operators that have a CUDA kernel and none for the CPU, or one with other results.

Each function takes a generator, and the operator's arguments on the host by their names in its schema, in that order
and with its defaults. They are composed of CPU operators, in float32 or wider, for correctness and not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
    defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}

    def call(*arguments: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():
            generator = torch.Generator("cpu").manual_seed(seed() & (1 << 63) - 1)
            given = defaults | dict(zip(defaults, arguments, strict=False)) | named
            results = function(generator, **given)
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


def _keep_mask(generator: torch.Generator, like: Tensor, p: float) -> Tensor:
    """Mask of the elements that dropout retains."""
    return torch.rand(like.shape, generator=generator, device="cpu") >= p


@_of("native_dropout")
def _native_dropout(generator: torch.Generator, input: Tensor, p: float, train: bool | None) -> Any:
    if train is False:
        return input.clone(), torch.ones(input.shape, dtype=torch.bool, device="cpu")
    mask = _keep_mask(generator, input, p)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


@_of("_fused_dropout")
def _fused_dropout(own: torch.Generator, self: Tensor, p: float, generator: Any) -> Any:
    mask = torch.rand(self.shape, generator=own, device="cpu") < p  # here p is the retained share
    return self * mask / p, mask.to(torch.uint8)


@_of("_masked_scale")
def _masked_scale(_: Any, self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


@_of("log_sigmoid_backward")
def _log_sigmoid_backward(
    _: Any, grad_output: Tensor, self: Tensor, buffer: Tensor, grad_input: Tensor | None = None
) -> Tensor:
    gradient = (_wide(grad_output) * torch.sigmoid(-_wide(self))).to(self.dtype)
    return gradient if grad_input is None else grad_input.copy_(gradient)


# -------------------------------------------------------------------------------------------------------- attention


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


class _Attention:
    """Scaled dot-product attention over tensors of (batch, heads, length, width), with the state for backward."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, causal: bool, scale: float | None
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
        if causal:  # from the upper left corner
            row, column = (torch.arange(length, device="cpu") for length in scores.shape[-2:])
            scores = scores.masked_fill(column > row[:, None], -math.inf)
        self.scores = scores
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


def _seed(generator: torch.Generator, p: float) -> int:
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


def _attended(
    generator: torch.Generator, query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, is_causal: bool,
    scale: float | None, attn_bias: Tensor | None = None, **unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, the log-sum-exp of each row, and the seed of dropout."""
    attention = _Attention(query, key, value, bias=attn_bias, causal=is_causal, scale=scale)
    seed = torch.tensor(_seed(generator, dropout_p), device="cpu")
    return attention.output(_dropped(seed, attention, dropout_p)).to(query.dtype), attention.logsumexp, seed


@_of("_scaled_dot_product_flash_attention")
def _flash(generator: torch.Generator, **call: Any) -> Any:
    out, sums, seed = _attended(generator, **call)
    return out, sums, *[UNUSED] * 4, torch.stack((seed, torch.zeros_like(seed))), UNUSED, UNUSED


@_of("_scaled_dot_product_efficient_attention")
def _efficient(generator: torch.Generator, *, query: Tensor, compute_log_sumexp: bool, **call: Any) -> Any:
    out, sums, seed = _attended(generator, query=query, **call)
    length = (query.shape[2] + 31) // 32 * 32 if compute_log_sumexp else 0
    sums = _padded(sums, length) if length else sums[..., :0]
    return out, sums, seed, torch.zeros_like(seed)


@_of("_scaled_dot_product_cudnn_attention")
def _cudnn(generator: torch.Generator, *, compute_log_sumexp: bool, **call: Any) -> Any:
    out, sums, seed = _attended(generator, **call)
    return out, sums[..., None] if compute_log_sumexp else UNUSED, *[UNUSED] * 4, seed, UNUSED, UNUSED


def _gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, philox_seed: Tensor, scale: float | None, attn_bias: Tensor | None = None,
    out: Tensor | None = None, **unused: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of query, key, value and, in the shape of the scores, bias."""
    attention = _Attention(query, key, value, bias=attn_bias, causal=is_causal, scale=scale)
    if out is not None:
        attention.as_part(out, logsumexp)
    *gradients, of_scores = attention.gradients(grad_out, _dropped(philox_seed, attention, dropout_p))
    return [*(gradient.to(query.dtype) for gradient in gradients), of_scores]


@_of("_scaled_dot_product_flash_attention_backward")
def _flash_backward(_: Any, **call: Any) -> Any:
    return tuple(_gradients(**call)[:3])


@_of("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(_: Any, *, out: Tensor, **call: Any) -> Any:
    return tuple(_gradients(**call)[:3])


@_of("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(
    _: Any, *, grad_out_: Tensor, attn_bias: Tensor | None, grad_input_mask: list[bool], **call: Any
) -> Any:
    *gradients, of_scores = _gradients(grad_out_, attn_bias=attn_bias, **call)
    of_bias: Any = UNUSED
    if attn_bias is not None and grad_input_mask[3]:
        of_bias = of_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype)
    return (*gradients, of_bias)


# ------------------------------------------------------------------------------------------------ products, in parts


@_of("mm.dtype", "bmm.dtype")
def _mm_dtype(_: Any, self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (_wide(self) @ _wide(mat2)).to(out_dtype)


@_of("addmm.dtype", "baddbmm.dtype")
def _addmm_dtype(
    _: Any, self: Tensor, *, out_dtype: torch.dtype, beta: float, alpha: float, **factors: Tensor
) -> Tensor:
    left, right = factors.values()
    return (beta * _wide(self) + alpha * (_wide(left) @ _wide(right))).to(out_dtype)


@_of("_grouped_mm")
def _grouped_mm(
    _: Any, self: Tensor, mat2: Tensor, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype | None
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
    _: Any, grad_out: Tensor, input: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Tensor | None,
    output_mask: list[bool],
) -> Any:  # fmt: skip
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
def _cudnn_batch_norm(_: Any, **call: Any) -> Any:
    return *torch.ops.aten.native_batch_norm(*call.values()), UNUSED


@_of("cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(_: Any, input: Tensor, grad_output: Tensor, **call: Any) -> Any:
    *others, epsilon, _ = call.values()  # the reserve is not used
    return torch.ops.aten.native_batch_norm_backward(grad_output, input, *others, True, epsilon, [True] * 3)


@_of("_batch_norm_with_update")
def _batch_norm_with_update(_: Any, *, momentum: float, eps: float, **call: Any) -> Any:
    return *torch.ops.aten.native_batch_norm(*call.values(), True, momentum, eps), UNUSED


@_of("batch_norm_backward")
def _batch_norm_backward(_: Any, *, reserve: Tensor, **call: Any) -> Any:
    return torch.ops.aten.native_batch_norm_backward(*call.values())


# ------------------------------------------------------------------------------------------------------ convolutions


@_of("cudnn_convolution", "cudnn_convolution_transpose", "_conv_depthwise2d", "conv_depthwise3d")
def _convolution(
    _: Any, self: Tensor, weight: Tensor, *, stride: list[int], padding: list[int], dilation: list[int],
    bias: Tensor | None = None, output_padding: list[int] | None = None, groups: int = 0, **unused: Any,
) -> Tensor:  # fmt: skip
    """Depthwise convolutions have no argument for their groups."""
    output: Tensor = torch.ops.aten.convolution(
        self, weight, bias, stride, padding, dilation, output_padding is not None,
        output_padding or [0] * len(padding), groups or self.shape[1],
    )  # fmt: skip
    return output


# ----------------------------------------------------------------------------------------------------------- integers


@_of("histc")
def _histc(_: Any, self: Tensor, bins: int, min: float, max: float) -> Tensor:
    """Histogram of integers too, which the CPU refuses: a mixture's tokens per expert are counted so."""
    if self.dtype in (torch.float32, torch.float64):
        return torch.histc(self, bins, min, max)
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


# ----------------------------------------------------------------------------------------------- recurrent networks


@_of("_thnn_fused_lstm_cell")
def _lstm_cell(
    _: Any, input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None,
    hidden_bias: Tensor | None,
) -> Any:  # fmt: skip
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
