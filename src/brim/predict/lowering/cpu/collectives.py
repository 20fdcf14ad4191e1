"""What gloo takes beside its operands (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).

It has no reduce-scatter: a copy of the whole input is all-reduced, and a part of it copied out.
"""

from __future__ import annotations

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes


def _reduce_scatter(position: int) -> Rule:
    def rule(kernel: Kernel) -> None:
        kernel.emit()
        kernel.temp(nbytes(kernel.args[position]))

    return rule


RULES: dict[torch._ops.OpOverload, Rule] = (
    {
        torch.ops.c10d._reduce_scatter_base_.default: _reduce_scatter(1),
        torch.ops._c10d_functional.reduce_scatter_tensor.default: _reduce_scatter(0),
    }
    if torch.distributed.is_available()
    else {}
)
