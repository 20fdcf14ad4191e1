"""Products of matrices of bfloat16, which oneDNN blocks into buffers where the CPU multiplies bfloat16.

Which blocks it takes is a search that is not followed here, so a trace names the operation as not modelled. Follows
``use_mkldnn_bf16_matmul`` of aten/src/ATen/native/mkldnn/Matmul.cpp.
"""

from __future__ import annotations

import torch

from brim.predict.lowering.kernel import Kernel, Rule

_aten = torch.ops.aten
_LEAST_WORK = 16 * 16 * 16  # multiplications up to which oneDNN is not asked


def _product(kernel: Kernel) -> None:
    left, right = (kernel.arg(name) for name in _OPERANDS[kernel.func])
    if left.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return
    if left.numel() * right.size(-1) > _LEAST_WORK and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kernel.unknown = f"{kernel.func.overloadpacket}: oneDNN's buffers for bfloat16"


_OPERANDS = {
    _aten.mm.default: ("self", "mat2"),
    _aten.addmm.default: ("mat1", "mat2"),
    _aten.bmm.default: ("self", "mat2"),
    _aten.baddbmm.default: ("batch1", "batch2"),
}
RULES: dict[torch._ops.OpOverload, Rule] = dict.fromkeys(_OPERANDS, _product)
