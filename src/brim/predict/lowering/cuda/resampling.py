"""What ``interpolate`` takes on CUDA besides its result, where channels are last or elements lie in another order.

Follows cuda/UpSampleBilinear2d.cu, UpSampleNearest2d.cu and their like under aten/src/ATen/native: few of the kernels
know channels that are last, and only four of them or more; the others work on copies.
"""

from __future__ import annotations

import torch

from brim.predict.lowering.kernel import Kernel, Rule, has_channels_last, nbytes

_aten = torch.ops.aten
_FEWEST_CHANNELS_LAST = 4


def _copy(kernel: Kernel, tensor: torch.Tensor) -> None:
    kernel.temp(0 if tensor.is_contiguous() else nbytes(tensor))


def _on_copies(kernel: Kernel) -> None:
    kernel.emit()
    for output in kernel.outputs:
        _copy(kernel, output)
    _copy(kernel, kernel.args[0])


def _gradient_copied(kernel: Kernel) -> None:
    kernel.emit()
    _copy(kernel, kernel.arg("grad_output"))


def _both_gradients_copied(kernel: Kernel) -> None:
    kernel.emit()
    for output in kernel.outputs:
        _copy(kernel, output)
    _copy(kernel, kernel.arg("grad_output"))


def _unless_channels_are_last(rule: Rule) -> Rule:
    def chosen(kernel: Kernel) -> None:
        source = kernel.args[0]
        if source.size(1) >= _FEWEST_CHANNELS_LAST and has_channels_last(source):
            kernel.emit()
        else:
            rule(kernel)

    return chosen


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.upsample_nearest1d.default: _on_copies,
    _aten._upsample_nearest_exact1d.default: _on_copies,
    _aten.upsample_nearest2d.default: _unless_channels_are_last(_on_copies),
    _aten._upsample_nearest_exact2d.default: _unless_channels_are_last(_on_copies),
    _aten.upsample_nearest3d.default: _on_copies,
    _aten._upsample_nearest_exact3d.default: _on_copies,
    _aten._upsample_bilinear2d_aa.default: _on_copies,
    _aten._upsample_bicubic2d_aa.default: _on_copies,
    _aten.upsample_nearest2d_backward.default: _unless_channels_are_last(_both_gradients_copied),
    _aten._upsample_nearest_exact2d_backward.default: _unless_channels_are_last(_both_gradients_copied),
    _aten.upsample_bilinear2d_backward.default: _unless_channels_are_last(_both_gradients_copied),
    _aten.upsample_trilinear3d_backward.default: _both_gradients_copied,
    _aten.upsample_nearest3d_backward.default: _gradient_copied,
    _aten._upsample_nearest_exact3d_backward.default: _gradient_copied,
    _aten.upsample_bicubic2d_backward.default: _gradient_copied,
    _aten._upsample_bilinear2d_aa_backward.default: _gradient_copied,
    _aten._upsample_bicubic2d_aa_backward.default: _gradient_copied,
}
