"""Matrix products: operands that are copied, and the workspaces that cuBLAS keeps.

Follows cuda/Blas.cpp under aten/src/ATen/native.

The forward and the backward thread have a handle each, with a workspace for each stream.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_ALWAYS = (_aten.dot.default, _aten.vdot.default)  # they ask for cuBLAS whatever there is to multiply
# Products that cuBLASLt makes together with what is added to them.
_LT_ALWAYS = (_aten._addmm_activation.default, _aten._scaled_mm.default)
_LT_WITH_VECTOR = (_aten.addmm.default, _aten.addmm.out)
# Where PyTorch has this module, Triton, which its CUDA builds bring, multiplies batches of a column by a row.
_OUTER_PRODUCTS_BY_TRITON = bool(find_spec("torch._native") and find_spec("torch._native.ops.bmm_outer_product"))
# PyTorch up to 2.11 gives cuBLASLt a workspace of its own, of 1,024 KiB; later it shares cuBLAS's.
_LT_BYTES = 1 << 20 if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12) else 0


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuda/CublasHandlePool.cpp: ``:4096:2:16:8``, and 32 MiB on Hopper and Blackwell."""
    return 32 << 20 if capability[0] in (9, 10, 12) else 4096 * 1024 * 2 + 16 * 1024 * 8


def keep_workspace(kernel: Kernel) -> None:
    """Take cuBLAS's workspace, where this thread and stream have none yet."""
    _keep(kernel, "cuBLAS", cublas_workspace_bytes(kernel.capability))


def _keep(kernel: Kernel, library: str, bytes: int) -> None:
    kernel.keep(bytes, library, torch._C._current_graph_task_id() != -1, kernel.stream)


def _multiply(kernel: Kernel) -> None:
    """Operands that cuBLAS cannot read in place are copied (``prepare_matrix_for_cublas``)."""
    kernel.emit()
    operands = [tensor for tensor in kernel.args if isinstance(tensor, torch.Tensor)]
    if kernel.func not in _ALWAYS and not all(tensor.numel() for tensor in operands):  # nothing is computed
        return
    if _OUTER_PRODUCTS_BY_TRITON and kernel.func is _aten.bmm.default and _is_outer_product(*operands):
        return
    for tensor in operands:
        if not _readable(tensor):
            kernel.temp(nbytes(tensor))
    keep_workspace(kernel)
    if _LT_BYTES and _by_cublaslt(kernel):
        _keep(kernel, "cuBLASLt", _LT_BYTES)


def _is_outer_product(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.size(2) == 1 and not (first.is_complex() or second.is_complex())


def _by_cublaslt(kernel: Kernel) -> bool:
    """``isInputCompliesAddmmCudaLt``: a dense vector is added once to more than a row or column."""
    if kernel.func in _LT_ALWAYS:
        return True
    if kernel.func not in _LT_WITH_VECTOR or kernel.arg("beta") != 1:
        return False
    added, matrix = kernel.arg("self"), kernel.arg("mat2")
    return bool(added.dim() == 1 and added.is_contiguous() and min(matrix.shape) > 1)


def _readable(tensor: torch.Tensor) -> bool:
    """Return True if cuBLAS reads the operand in place: one of the last two dimensions is dense, none is repeated."""
    if tensor.dim() < 2:
        return tensor.dim() == 0 or tensor.numel() <= 1 or tensor.stride(0) != 0
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return bool((column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)))


RULES: dict[torch._ops.OpOverload, Rule] = {
    getattr(packet, overload): _multiply
    for packet, overloads in {
        _aten.mm: "default out dtype dtype_out", _aten.bmm: "default out dtype dtype_out",
        _aten.addmm: "default out dtype dtype_out", _aten.baddbmm: "default dtype dtype_out",
        _aten.addmm_: "default", _aten.baddbmm_: "default", _aten.addbmm: "default", _aten.mv: "default",
        _aten.addmv: "default", _aten.addmv_: "default", _aten.dot: "default", _aten.vdot: "default",
        _aten._addmm_activation: "default", _aten._scaled_mm: "default",
    }.items()
    for overload in overloads.split()
}  # fmt: skip
