"""Operators of other libraries in the parts of which they consist on the CPU: a trace has what these allocate.

bitsandbytes registers a kernel in Python for every device (bitsandbytes/backends/default/ops.py), and one of its own
for some (bitsandbytes/backends/cpu/ops.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

_NAMESPACE = "bitsandbytes"


@cache
def in_parts(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The function that runs the operator's parts; None for an operator that is not of such a library, or is one
    kernel."""
    if func.namespace != _NAMESPACE:
        return None
    if func._schema.name == f"{_NAMESPACE}::int8_vectorwise_quant":
        return _rounded_rows
    has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if has_kernel("CPU") or not has_kernel("CompositeExplicitAutograd"):
        return None
    return partial(func._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)


def _rounded_rows(
    source: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows in int8 and their scales. Columns with outliers are known at run time only: here all of them have some,
    the most that a run can allocate."""
    columns = None
    if threshold > 0.0:
        outliers = source.abs() >= threshold
        columns, replaced = source.new_empty(source.shape[-1], dtype=torch.int64), source.clone()
        del outliers, replaced
    largest = source.abs().max(dim=1).values.float()
    return torch.round(source * (127.0 / largest.unsqueeze(-1))).to(torch.int8), largest, columns
