"""CUDA's autocast, op by op, in the place of the CPU's (aten/src/ATen/autocast_mode.h).

The fake tensors lie on the CPU, so PyTorch would consult the CPU's lists. While a trace runs, the kernels of the
CPU's autocast key are replaced by these, and put back after.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

LOWER_PRECISION = (
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "_convolution", "prelu", "addmm", "addmv", "addr",
    "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul",
    "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
)  # fmt: skip
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
FP32_OUT = ("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList",
            "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord")  # fmt: skip
WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
          "scatter_add")  # fmt: skip


@contextmanager
def cuda_lists() -> Iterator[None]:
    """Replace the CPU's autocast kernels by CUDA's for the duration."""
    library = torch.library.Library("aten", "IMPL")
    cache = _Cache()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden is the purpose
            _fall_through(library)
            _install(library, cache)
        with mock.patch.object(torch, "clear_autocast_cache", cache.clear):
            yield
    finally:
        library._destroy()


def _install(library: torch.library.Library, cache: _Cache) -> None:
    for names, make in ((LOWER_PRECISION, cache.lower), (FP32, _to_fp32), (FP32_OUT, _with_dtype), (WIDEST, _widest)):
        for name in names:
            op = _overload(name)
            library.impl(op, make(op), "AutocastCPU", allow_override=True)


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def _fall_through(library: torch.library.Library) -> None:
    """Operations that only the CPU's lists name run as they are."""
    listed = {_overload(name).name() for name in (*LOWER_PRECISION, *FP32, *FP32_OUT, *WIDEST)}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
        if name.startswith("aten::") and name not in listed:
            library.impl(
                name.removeprefix("aten::"), torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True
            )


def _eligible(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if _eligible(value) else value
    if isinstance(value, (tuple, list)):  # from the last to the first, as the C++ compiler evaluates arguments
        return type(value)(reversed([_each(item, change) for item in reversed(value)]))
    return value


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return function(*args, **kwargs)

    return kernel


class _Cache:
    """Lower-precision copies of leaf weights, kept until the outermost autocast region ends."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        self._copies.clear()

    def lower(self, op: torch._ops.OpOverload) -> Callable[..., Any]:
        @_without_autocast
        def kernel(*args: Any, **kwargs: Any) -> Any:
            named = {name: _each(value, self._cast) for name, value in reversed(kwargs.items())}
            return op(*_each(list(args), self._cast), **named)

        return kernel

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        if tensor.dtype == dtype:
            return tensor
        cached = (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not cached:
            return tensor.to(dtype)
        copy_there = self._copies.get(id(tensor))
        if copy_there is not None and copy_there[0]() is tensor:
            return copy_there[1]
        copy = tensor.to(dtype)
        self._copies[id(tensor)] = (weakref.ref(tensor), copy)
        return copy


def _to_fp32(op: torch._ops.OpOverload) -> Callable[..., Any]:
    @_without_autocast
    def kernel(*args: Any, **kwargs: Any) -> Any:
        changed = _each(list(args), lambda t: t.float())
        return op(*changed, **{name: _each(value, lambda t: t.float()) for name, value in kwargs.items()})

    return kernel


def _with_dtype(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """``fp32_set_opt_dtype``: the result is float32, and nothing is cast for that beforehand."""
    halves = _FROM_HALF.get(op)

    @_without_autocast
    def kernel(*args: Any, **kwargs: Any) -> Any:
        chosen = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
        if chosen is not None or not _eligible(args[0]):
            return op(*args, **kwargs)
        if halves is not None and args[0].dtype == torch.float16:
            return halves(args[0], args[1] if len(args) > 1 else kwargs["dim"], True)
        return op(*args, **(kwargs | {"dtype": torch.float32}))

    return kernel


# Of float16 these write float32 at once on CUDA (SoftMax.cpp); of bfloat16 they take a copy in float32.
_FROM_HALF = {
    torch.ops.aten.softmax.int: torch.ops.aten._softmax.default,
    torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax.default,
}


def _widest(op: torch._ops.OpOverload) -> Callable[..., Any]:
    @_without_autocast
    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_wide = any(leaf.dtype == torch.float32 for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return op(*(_each(list(args), lambda t: t.float()) if is_wide else args), **kwargs)

    return kernel
