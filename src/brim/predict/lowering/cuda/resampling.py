"""What ``interpolate`` takes on CUDA besides its result, where channels are last or elements lie in another order.

Follows cuda/UpSampleBilinear2d.cu, UpSampleNearest2d.cu and their like under aten/src/ATen/native: few of the kernels
know channels that are last, and only four of them or more; the others work on copies.
"""

from __future__ import annotations

import torch

from brim.predict.lowering.kernel import Kernel, Rule, contiguous_after, has_channels_last

_aten = torch.ops.aten
_FEWEST_CHANNELS_LAST = 4


def _on_copies(kernel: Kernel) -> None:
    """Of what is read, which is the first argument, and of what is written."""
    kernel.emit()
    for output in kernel.outputs:
        kernel.contiguous(output)
    kernel.contiguous(kernel.args[0])


def _on_copies_of_few_channels(kernel: Kernel) -> None:
    source = kernel.args[0]
    if source.size(1) >= _FEWEST_CHANNELS_LAST and has_channels_last(source):
        kernel.emit()
    else:
        _on_copies(kernel)


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.upsample_nearest1d.default: _on_copies,
    _aten._upsample_nearest_exact1d.default: _on_copies,
    _aten.upsample_nearest2d.default: _on_copies_of_few_channels,
    _aten._upsample_nearest_exact2d.default: _on_copies_of_few_channels,
    _aten.upsample_nearest3d.default: _on_copies,
    _aten._upsample_nearest_exact3d.default: _on_copies,
    _aten._upsample_bilinear2d_aa.default: _on_copies,
    _aten._upsample_bicubic2d_aa.default: _on_copies,
    _aten.upsample_nearest2d_backward.default: _on_copies_of_few_channels,
    _aten._upsample_nearest_exact2d_backward.default: _on_copies_of_few_channels,
    _aten.upsample_bilinear2d_backward.default: _on_copies_of_few_channels,
    _aten.upsample_trilinear3d_backward.default: _on_copies,
    _aten.upsample_nearest3d_backward.default: contiguous_after("grad_output"),
    _aten._upsample_nearest_exact3d_backward.default: contiguous_after("grad_output"),
    _aten.upsample_bicubic2d_backward.default: contiguous_after("grad_output"),
    _aten._upsample_bilinear2d_aa_backward.default: contiguous_after("grad_output"),
    _aten._upsample_bicubic2d_aa_backward.default: contiguous_after("grad_output"),
}
