"""Which attention kernel CUDA would run, and what each saves for the backward pass.

Follows ``select_sdp_backend`` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; the kernels themselves are
called on fake tensors, which gives their outputs and autograd's use of them.
"""

from __future__ import annotations

import torch

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    capability: tuple[int, int],
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` of (batch, heads, tokens, head size) as CUDA does it."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) if t.dtype != torch.float64 else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    backend = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)
    if backend == "math":
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        kept, masked = (query.new_full((), number) for number in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, kept, masked)
    kernel = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient}[backend]
    return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    saves = _needs_grad(query, key, value)
    out: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, saves, dropout, causal, False, scale=scale
    )[0]
    return out


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Heads are padded to eight elements; ``mask`` is always None."""
    size = query.size(-1)
    scale = size**-0.5 if scale is None else scale
    query, key, value = (_pad_last(t, 8) for t in (query, key, value))
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return out[..., :size] if out.size(-1) != size else out


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    bias = None if mask is None else _aligned_bias(mask, query, key)
    out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, _needs_grad(query, key, value), dropout, causal, scale=scale
    )[0]
    return out


def _needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    gqa: bool,
    capability: tuple[int, int],
) -> str:
    """``flash``, ``cudnn``, ``efficient`` or ``math``, in the order in which PyTorch tries them."""
    inputs = (query, key, value)
    if any(t.dim() != 4 for t in inputs) or not all(t.stride(-1) == 1 for t in inputs):
        return "math"
    if _cudnn_takes(*inputs, gqa, capability):
        return "cudnn"
    if mask is None and _flash_takes(*inputs, dropout, causal, gqa, capability):
        return "flash"
    return "efficient" if _efficient_takes(*inputs, capability) else "math"


def with_sums(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]) -> str | None:
    """``flash`` or ``efficient``, whichever a program takes that calls one by itself, without mask and dropout; None
    where neither runs."""
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return None
    if query.size(-1) % 8 == 0 and _flash_takes(query, key, value, 0.0, False, True, capability):
        return "flash"
    keys, values = (tensor[:, :1].expand(-1, query.size(1), -1, -1) for tensor in (key, value))
    return "efficient" if _efficient_takes(query, keys, values, capability) else None


def _heads_fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gqa: bool) -> bool:
    heads = (query.size(1), key.size(1), value.size(1))
    return len(set(heads)) == 1 or (gqa and heads[0] % heads[1] == 0 and heads[1] == heads[2])


def _cudnn_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gqa: bool, capability: tuple[int, int]
) -> bool:
    """cuDNN comes first on Hopper and B200 with cuDNN > 9.15, which ships with CUDA 13 builds."""
    size, value_size = query.size(-1), value.size(-1)
    return (
        capability[0] in (9, 10)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and query.dtype in _HALF
        and size % 8 == 0
        and value_size % 8 == 0
        and max(size, value_size) <= 128
        and _heads_fit(query, key, value, gqa)
        and key.size(2) > 1
        and query.size(2) > 1
    )


def _flash_takes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    gqa: bool,
    capability: tuple[int, int],
) -> bool:
    size = query.size(-1)
    small_registers = capability in ((8, 6), (8, 9), (12, 0))
    return (
        capability >= (8, 0)
        and torch.backends.cuda.flash_sdp_enabled()
        and query.dtype in _HALF
        and size == key.size(-1) == value.size(-1)
        and size <= 256
        and _heads_fit(query, key, value, gqa)
        and not (causal and query.size(2) == 0 and key.size(2) != 0)
        and not (_needs_grad(query, key, value) and size > 192 and small_registers and dropout > 0)
    )


def _efficient_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]
) -> bool:
    align = (8 if query.dtype in _HALF else 4) if capability >= (7, 0) else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*_HALF, torch.float32)
        and query.size(1) == key.size(1) == value.size(1)
        and query.size(-1) == key.size(-1)
        and query.size(-1) % align == 0
        and value.size(-1) % align == 0
        and query.size(2) > 0
    )


def _pad_last(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``preprocess_mask`` of transformers/attention.cpp pads rows that do not begin at every 8th number."""
    columns = mask.size(-1)
    if mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if mask.stride(-1) != 1 or any(step % 8 for step in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, 8 - columns % 8))[..., :columns]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """``_scaled_dot_product_attention_math`` of transformers/attention.cpp: scale, product, softmax, product."""
    origin = query.dtype
    if origin in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    if causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    root = (query.size(-1) ** -0.5 if scale is None else scale) ** 0.5
    query = query * root
    if gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ (key * root).transpose(-2, -1)
    if mask is not None:
        scores = scores.add_(mask) if not torch.is_grad_enabled() else scores + mask.to(scores.dtype)
    weights = _aten._safe_softmax(scores, -1)
    if dropout > 0:
        weights = torch.native_dropout(weights, dropout, True)[0]
    mixed: torch.Tensor = (weights @ value).to(origin)
    return mixed
