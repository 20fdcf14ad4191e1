"""Allocations inside the target's kernels, and results that differ from those of a fake CPU tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from brim.predict.lowering.cpu import kernels as cpu_kernels
from brim.predict.lowering.cuda import kernels as cuda_kernels
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

__all__ = ["Kernel", "Rule", "nbytes", "rules_for"]

_COLLECTIVES = ("c10d", "_c10d_functional")


def rules_for(target: str, capability: tuple[int, int]) -> Callable[[torch._ops.OpOverload], Rule | None]:
    """The rules of ``target``'s kernels for one trace, looked up by operation."""
    if target == "cpu":
        return cpu_kernels.rule_for
    kernels = cuda_kernels.rules(capability)
    return lambda func: _collective if func.namespace in _COLLECTIVES else kernels(func)


def _collective(kernel: Kernel) -> None:
    kernel.unknown = f"{kernel.func.overloadpacket}: NCCL's buffers"
