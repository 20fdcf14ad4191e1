"""Dtypes that CUDA kernels refuse: fake kernels take what PyTorch's for the CPU would take, or anything.

Follows the checks and the lists of dtypes (``AT_DISPATCH_...``) of the kernels under aten/src/ATen/native/cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

Check = Callable[[OpOverload, Sequence[Any]], str | None]

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = {*_HALVES, torch.float32, torch.float64, torch.complex64, torch.complex128}
_SOLVED = _FLOATS - {*_HALVES}


def check(func: OpOverload, args: Sequence[Any]) -> None:
    """Raises RuntimeError, as PyTorch does, where CUDA refuses these dtypes. ``func`` is in ``CHECKS``."""
    for one in CHECKS[func]:
        if said := one(func, args):
            raise RuntimeError(said)


def check_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> None:
    """transformers/attention.cpp, ``validate_sdpa_input``."""
    if not query.dtype == key.dtype == value.dtype:
        named = _named((query, key, value))
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {named}")
    if isinstance(mask, torch.Tensor) and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match the query's, but got {_named((mask, query))}"
        )


def _alike(*places: int) -> Check:
    """Operands at these places have one dtype, where they are given."""

    def why(func: OpOverload, args: Sequence[Any]) -> str | None:
        operands = [args[place] for place in places if place < len(args) and isinstance(args[place], torch.Tensor)]
        if len({operand.dtype for operand in operands}) < 2:
            return None
        return f"{func} expects operands of one dtype on CUDA, but got {_named(operands)}"

    return why


def _among(dtypes: set[torch.dtype], place: int = 0) -> Check:
    """The operand at this place is of one of these."""

    def why(func: OpOverload, args: Sequence[Any]) -> str | None:
        if args[place].dtype in dtypes or not args[place].numel():
            return None
        return f"{func} is not implemented for {args[place].dtype} on CUDA"

    return why


def _wide_statistics(func: OpOverload, args: Sequence[Any]) -> str | None:
    """A batch norm of half precision takes a weight of float32 as well (cuda/Normalization.cu)."""
    return _alike(0, 1)(func, args) if args[0].dtype not in _HALVES else None


def _named(operands: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(operand.dtype) for operand in operands)


_MULTIPLIED = (_aten.mm, _aten.bmm, _aten.mv, _aten.dot, _aten.vdot)
_ADDED_TO = (_aten.addmm, _aten.baddbmm, _aten.addbmm, _aten.addmv, _aten._addmm_activation)
_OF_FLOATS = (
    _aten._softmax, _aten._log_softmax, _aten.gelu, _aten.silu, _aten.glu, _aten.max_pool2d_with_indices,
    _aten.avg_pool2d, _aten._adaptive_avg_pool2d, _aten.im2col, _aten.upsample_bilinear2d, _aten.upsample_bicubic2d,
    _aten.multinomial,
)  # fmt: skip
_SOLVERS = (
    _aten.linalg_qr, _aten.geqrf, _aten.linalg_cholesky_ex, _aten._linalg_svd, _aten.linalg_lu_factor_ex,
    _aten._linalg_solve_ex, _aten._linalg_det, _aten.linalg_inv_ex, _aten._linalg_eigh, _aten._cdist_forward,
)  # fmt: skip
CHECKS: dict[OpOverload, tuple[Check, ...]] = {
    _aten.convolution.default: (_alike(0, 1, 2), _among(_FLOATS)),
    _aten.native_layer_norm.default: (_alike(0, 2, 3),),
    _aten.native_group_norm.default: (_alike(0, 1, 2),),
    _aten.native_batch_norm.default: (_wide_statistics,),
    _aten.grid_sampler_2d.default: (_alike(0, 1),),
    _aten.grid_sampler_3d.default: (_alike(0, 1),),
    _aten.binary_cross_entropy.default: (_alike(0, 1, 2),),
    _aten.nll_loss_forward.default: (_alike(0, 2), _among({torch.int64, torch.uint8}, 1)),
    _aten.nll_loss2d_forward.default: (_alike(0, 2), _among({torch.int64}, 1)),
}
CHECKS |= {overload: (_among(_FLOATS),) for overload in (_aten.std.correction, _aten.var.correction)}
CHECKS |= {packet.default: (_alike(0, 1), _among(_FLOATS)) for packet in _MULTIPLIED}
CHECKS |= {packet.default: (_alike(0, 1, 2), _among(_FLOATS, 1)) for packet in _ADDED_TO}
CHECKS |= {packet.default: (_among(_FLOATS),) for packet in _OF_FLOATS}
CHECKS |= {packet.default: (_among(_SOLVED),) for packet in _SOLVERS}
