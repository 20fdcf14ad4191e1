"""PyTorch's fused attention kernels with the log-sum-exp of their scores, so that what several of them gave can be
put together, and gone back through piece by piece.

A piece's backward pass takes the output and the log-sum-exp over all pieces: the share of each score in the whole
follows from these (Dao et al., arXiv 2205.14135, section 3.1; Liu et al., "Ring Attention", arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional as F

from brim.predict.lowering.cuda import attention as cuda_attention
from brim.predict.pretend import pretended_capability

_aten = torch.ops.aten
_ALIGNED = 32  # rows of a log-sum-exp as the memory-efficient kernel keeps it (attention.cu, kAlignLSE)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernel(Protocol):
    """Of queries (batch, heads, tokens, width), keys and values (batch, heads, keys, width). ``grouped``: whether
    several heads of queries share one of keys and values."""

    grouped: bool

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the log-sum-exp (batch, heads, tokens) of each query's scores."""

    def backward(
        self, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        output: torch.Tensor, sums: torch.Tensor, causal: bool, scale: float | None,
    ) -> Three:  # fmt: skip
        """Gradients of queries, keys and values; ``output`` and ``sums`` are those over all pieces."""


class OnCpu:
    grouped = False

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs: tuple[torch.Tensor, torch.Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return outputs

    def backward(
        self, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        output: torch.Tensor, sums: torch.Tensor, causal: bool, scale: float | None,
    ) -> Three:  # fmt: skip
        gradients: Three = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, sums, 0.0, causal, scale=scale
        )
        return gradients


class Flash:
    """CUDA's flash attention."""

    grouped = True

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return outputs[0], outputs[1]

    def backward(
        self, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        output: torch.Tensor, sums: torch.Tensor, causal: bool, scale: float | None,
    ) -> Three:  # fmt: skip
        state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
        gradients: Three = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output, sums.contiguous(), None, None, query.shape[2], key.shape[2], 0.0,
            causal, state, state, scale=scale,
        )  # fmt: skip
        return gradients


class Efficient:
    """CUDA's memory-efficient attention, of float32 too."""

    grouped = False

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return outputs[0], outputs[1][..., : query.shape[2]]

    def backward(
        self, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        output: torch.Tensor, sums: torch.Tensor, causal: bool, scale: float | None,
    ) -> Three:  # fmt: skip
        state = torch.zeros((), dtype=torch.int64, device=query.device)
        aligned = F.pad(sums, (0, -sums.shape[-1] % _ALIGNED), value=torch.inf).contiguous()
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, output, aligned, state, state, 0.0, (True, True, True, False), causal,
            scale=scale,
        )  # fmt: skip
        return gradients[0], gradients[1], gradients[2]


def chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    """The kernel for these on their device, or the one that a trace pretends; None where there is none."""
    if query.shape[-1] != value.shape[-1] or query.dtype not in _FLOATS:
        return None
    capability = pretended_capability()
    if capability is not None:
        return _of_name(cuda_attention.with_sums(query, key, value, capability))
    if query.device.type == "cuda":
        return _on_cuda(query, key, value)
    return OnCpu() if query.device.type == "cpu" else None


def _on_cuda(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    make: Any = SDPAParams
    if query.shape[-1] % 8 == 0 and can_use_flash_attention(make(query, key, value, None, 0.0, False, True)):
        return Flash()
    many = query.shape[1]
    whole = [tensor[:, :1].expand(-1, many, -1, -1) for tensor in (key, value)]
    return Efficient() if can_use_efficient_attention(make(query, *whole, None, 0.0, False, False)) else None


def _of_name(name: str | None) -> Kernel | None:
    if name is None:
        return None
    return Flash() if name == "flash" else Efficient()
