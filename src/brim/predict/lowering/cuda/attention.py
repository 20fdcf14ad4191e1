"""The attention kernel that CUDA would run, and the tensors that it saves for the backward pass.

Follows ``select_sdp_backend`` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; the kernels themselves are
called on fake tensors, which gives their outputs and autograd's use of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from brim.catalog.cudnn import installed_cudnn_version

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # at::SDPBackend
_ORDER = ("flash", "efficient", "math", "cudnn")
_ORDER_WITH_CUDNN = ("cudnn", "flash", "efficient", "math")
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


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
    mask = attn_mask
    backend = choose(query, key, value, mask, dropout_p, is_causal, enable_gqa, capability)
    if backend == "math":
        return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    if mask is not None and mask.dtype == torch.bool:
        kept, masked = (query.new_full((), number) for number in (0.0, -torch.inf))
        mask = torch.where(mask, kept, masked)
    size, saves = query.size(-1), _needs_grad(query, key, value)
    out: torch.Tensor
    if backend == "cudnn":
        out = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, saves, dropout_p, is_causal, False, scale=scale
        )[0]
    elif backend == "efficient":
        bias = None if mask is None else _aligned_bias(mask, query, key)
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, saves, dropout_p, is_causal, scale=scale
        )[0]
    else:  # heads are padded to eight elements; there is no mask
        scale = size**-0.5 if scale is None else scale
        query, key, value = (_pad_last(t) for t in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[
            0
        ]
        out = out[..., :size] if out.size(-1) != size else out
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
    """``flash``, ``cudnn``, ``efficient`` or ``math``: the first of PyTorch's order that takes the call.

    Raises RuntimeError where none that is enabled does, as PyTorch.
    """
    call = _Call(query, key, value, mask, dropout, causal, gqa, capability)
    takes = {"cudnn": _cudnn_takes, "flash": _flash_takes, "efficient": _efficient_takes, "math": _math_takes}
    for backend in _order(capability):
        if takes[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def with_sums(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]) -> str | None:
    """``flash`` or ``efficient``, whichever a program takes that calls one by itself, without mask and dropout; None
    where neither runs."""
    call = _Call(query, key, value, None, 0.0, False, True, capability)
    if query.size(-1) % 8 == 0 and _flash_takes(call):
        return "flash"
    keys, values = (tensor[:, :1].expand(-1, query.size(1), -1, -1) for tensor in (key, value))
    return "efficient" if _efficient_takes(replace(call, key=keys, value=values)) else None


@dataclass(frozen=True)
class _Call:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    gqa: bool
    capability: tuple[int, int]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        return self.query.size(-1), self.key.size(-1), self.value.size(-1)

    @property
    def is_half(self) -> bool:
        """Return True if the dtype is a 16-bit type that the GPU's tensor cores take."""
        return self.query.dtype in (_HALF if self.capability >= (8, 0) else _HALF[:1])

    def is_dense(self, *, one_number_a_head: bool, grouped: bool) -> bool:
        """Return True if strides, lengths, batches and heads suit every fused kernel (``dense_constraints``).

        ``one_number_a_head``: strides of heads of one number do not matter. ``grouped``: knows grouped queries.
        """
        if any(tensor.dim() != 4 for tensor in self.tensors) or 0 in (self.query.size(2), self.key.size(2)):
            return False
        steps = all(tensor.stride(-1) == 1 for tensor in self.tensors)
        if not (steps or (one_number_a_head and self.query.size(-1) == 1)):
            return False
        if self.mask is not None and self.mask.stride(-1) != 1:
            return False
        return len({tensor.size(0) for tensor in self.tensors}) == 1 and self._heads_fit(grouped)

    def _heads_fit(self, grouped: bool) -> bool:
        queries, keys, values = (tensor.size(1) for tensor in self.tensors)
        return keys == values and (queries % keys == 0 if self.gqa and grouped else queries == keys)


def _order(capability: tuple[int, int]) -> tuple[str, ...]:
    """The order in which PyTorch asks: ``priority_order``, or what the program has set by ``sdpa_kernel``."""
    asked = tuple(_BACKENDS[number] for number in torch._C._get_sdp_priority_order() if number in _BACKENDS)
    if asked not in (_ORDER, _ORDER_WITH_CUDNN):
        return asked
    preferred = capability[0] in (9, 10) and installed_cudnn_version(_TORCH) > 91_500
    return _ORDER_WITH_CUDNN if preferred else _ORDER


def _math_takes(call: _Call) -> bool:
    return bool(torch.backends.cuda.math_sdp_enabled())


def _cudnn_takes(call: _Call) -> bool:
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (8, 0) <= call.capability <= (12, 1)
        and not _must_be_deterministic()
        and call.is_half
        and call.is_dense(one_number_a_head=True, grouped=True)
        and _cudnn_takes_mask(call)
        and (_TORCH < (2, 12) or (call.dropout * 16).is_integer())
        and _cudnn_takes_heads(call)
        and call.key.size(2) > 1
        and not (call.query.size(2) == 1 and _cudnn_needs_queries(call))
    )


def _cudnn_needs_queries(call: _Call) -> bool:
    """More than one a sequence."""
    return call.dropout > 0 or (_TORCH >= (2, 14) and call.capability[0] == 10)


def _must_be_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _cudnn_takes_mask(call: _Call) -> bool:
    """``check_attn_mask_shape``."""
    mask = call.mask
    if mask is None:
        return True
    batch, heads, tokens = call.query.shape[:3]
    fits = mask.size(-2) in (tokens, 1) and mask.size(-1) in (call.key.size(2), 1)
    if mask.dim() == 4:
        fits = fits and mask.size(0) in (1, batch) and mask.size(1) in (1, heads)
    return fits and mask.dim() in (2, 4) and not mask.requires_grad


def _cudnn_takes_heads(call: _Call) -> bool:
    """``check_cudnn_tensor_shapes``, ``check_cudnn_d256_bprop_head_dim``."""
    sizes = size, value_size = call.query.size(-1), call.value.size(-1)
    if size % 8 or value_size % 8 or max(sizes) <= 128:
        return not (size % 8 or value_size % 8)
    hopper, blackwell = call.capability == (9, 0), call.capability[0] == 10
    if _TORCH < (2, 14):
        return hopper and max(sizes) <= 256
    if not (hopper or blackwell) or max(sizes) > 256:
        return False
    trains = _needs_grad(*call.tensors)
    knows_256 = installed_cudnn_version(_TORCH) > 92_200
    return sizes == (192, 128) or (knows_256 and (not trains or sizes == (256, 256)))


def _flash_takes(call: _Call) -> bool:
    sizes = call.head_sizes
    few_registers = (8, 6) <= call.capability <= (8, 9) or call.capability in ((12, 0), (12, 1))
    trains = _needs_grad(*call.tensors) and few_registers
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and (8, 0) <= call.capability <= (12, 1)
        and call.mask is None
        and call.is_half
        and call.is_dense(one_number_a_head=True, grouped=True)
        and len(set(sizes)) == 1
        and sizes[0] <= 256
        and not (trains and (192 < sizes[0] <= 224 or (sizes[0] > 192 and call.dropout > 0)))
        and not (call.causal and call.query.size(2) != call.key.size(2))
    )


def _efficient_takes(call: _Call) -> bool:
    size, key_size, value_size = call.head_sizes
    # ``minimum_gemm_alignment``: 16 bytes where tensor cores multiply.
    align = 8 if call.query.dtype in _HALF else 4
    align = align if call.capability >= (8, 0) or (align == 8 and call.capability >= (7, 0)) else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and (5, 0) <= call.capability <= (12, 1)
        and (call.is_half or call.query.dtype == torch.float32)
        and call.is_dense(one_number_a_head=False, grouped=_TORCH >= (2, 14))
        and size == key_size
        and size > 0
        and value_size > 0
        and size % align == 0
        and value_size % align == 0
        and (
            _TORCH < (2, 13)
            or call.capability < (8, 0)
            or all(tensor.numel() == 0 or tensor.storage_offset() % align == 0 for tensor in call.tensors)
        )
    )


def _pad_last(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.size(-1) % 8
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
    # One name for scores and weights, as there: what it held is freed as soon as the next is made.
    weights = query @ (key * root).transpose(-2, -1)
    if mask is not None:
        plain = torch._C._functorch.peek_interpreter_stack() is None
        weights = weights.add_(mask) if plain else weights + mask
    weights = _aten._safe_softmax(weights, -1)
    if dropout > 0:
        weights = torch.native_dropout(weights, dropout, True)[0]
    returned = weights.to(origin)  # made before the product; nobody who calls the function gets it
    mixed: torch.Tensor = (weights @ value).to(origin)
    del returned
    return mixed
