"""Root mean square norms as CUDA runs them, in one kernel that keeps one number per row, and norms' backward passes.

Follows ``rms_norm_symint`` of aten/src/ATen/native/layer_norm.cpp and cuda/layer_norm_kernel.cu. PyTorch has that
kernel for CUDA alone; a fake tensor on the CPU would show the parts that it is made of elsewhere.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import torch

from brim.predict.lowering.cuda import reductions as cuda_reductions
from brim.predict.lowering.kernel import Kernel, Rule, contiguous_before, is_channels_last, nbytes

_aten = torch.ops.aten
_ROWS_OF_ONE_BLOCK = 64 * 1024
_SIDE, _MOST_BLOCKS = 32, 32 * 1024  # rows and columns of a block of threads


def rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """``torch.rms_norm`` of a tensor on the device."""
    if torch.is_autocast_enabled("cpu") and input.dtype != torch.float64:
        input, weight = input.float(), None if weight is None else weight.float()
    mixed = weight is not None and weight.dtype != input.dtype
    if mixed or input.is_complex() or is_channels_last(input):
        return torch.rms_norm(input, normalized_shape, weight, eps)
    needs = torch.is_grad_enabled() and (input.requires_grad or (weight is not None and weight.requires_grad))
    if not needs:
        return _fused(input, list(normalized_shape), weight, eps)[0]
    return _Fused.apply(input, weight, list(normalized_shape), eps)  # type: ignore[no-any-return,no-untyped-call]


def _fused(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel itself: autograd would take the CPU's parts in its place."""
    with torch._C._AutoDispatchBelowAutograd():
        outputs: tuple[torch.Tensor, torch.Tensor] = _aten._fused_rms_norm(*args)
        return outputs


class _Fused(torch.autograd.Function):
    """The backward formula of ``_fused_rms_norm`` in derivatives.yaml."""

    @staticmethod
    def forward(
        context: Any, input: torch.Tensor, weight: torch.Tensor | None, shape: list[int], eps: float | None
    ) -> torch.Tensor:
        result, root = _fused(input, shape, weight, eps)
        context.save_for_backward(input, root, weight)
        context.shape = shape
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        input, root, weight = context.saved_tensors
        output_mask = list(context.needs_input_grad[:2])
        first, second = _aten._fused_rms_norm_backward(gradient, input, context.shape, root, weight, output_mask)
        return first, second, None, None


def fake_forward(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (*input.shape[: input.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))
    exact = torch.float64 if input.dtype == torch.float64 else torch.float32
    return torch.empty(input.shape, dtype=input.dtype), torch.empty(rows, dtype=exact)


def fake_backward(
    gradient: torch.Tensor, input: torch.Tensor, normalized_shape: list[int], root: torch.Tensor,
    weight: torch.Tensor | None, wanted: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    first = torch.empty(input.shape, dtype=input.dtype) if wanted[0] else None
    return first, torch.empty(weight.shape, dtype=weight.dtype) if wanted[1] and weight is not None else None


def _backward(*dense: str) -> Rule:
    def rule(kernel: Kernel) -> None:
        """``LaunchGammaBetaBackwardCUDAKernel``: many rows leave parts of the weights' gradients, which it sums."""
        for name in dense:
            kernel.contiguous(kernel.arg(name))
        columns = prod(kernel.arg("normalized_shape"))
        rows = kernel.arg("input").numel() // max(columns, 1)
        multiprocessors, _ = cuda_reductions.multiprocessors_of(kernel.capability)
        if rows <= _ROWS_OF_ONE_BLOCK or columns // _SIDE >= multiprocessors // 2:
            kernel.emit()
            kernel.contiguous(kernel.arg("grad_out"))
            return
        first = int(kernel.arg("output_mask")[0])
        for index in range(first):
            kernel.emit(index)
        weights = kernel.outputs[first:]
        replaced = [kernel.temp(nbytes(weight)) for weight in weights]
        kernel.contiguous(kernel.arg("grad_out"))
        blocks = min(_MOST_BLOCKS // ceil(columns / _SIDE), ceil(rows / _SIDE))
        parts = [weight.new_empty(blocks, columns) for weight in weights]
        for part in parts:
            kernel.temp(nbytes(part))
        for index, (part, handle) in enumerate(zip(parts, replaced, strict=True), first):
            kernel.emit(index)
            cuda_reductions.take_workspaces(kernel, part, (0,), max(part.element_size(), 4))
            kernel.free(handle)

    return rule


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten._fused_rms_norm.default: contiguous_before("input", "weight"),
    _aten._fused_rms_norm_backward.default: _backward("input", "weight"),
    _aten.native_layer_norm_backward.default: _backward("input", "weight", "bias"),
}
