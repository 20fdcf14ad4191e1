"""The global gradient norm where gradients are not all in memory, as ``torch.nn.utils.clip_grad_norm_`` has it.

The order of all sums is PyTorch's (torch/nn/utils/clip_grad.py): a norm per gradient, those of one device and dtype
together in the order of the parameters, then the norm of the norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from brim.techniques.offloaded_tensor import OffloadedTensor
from brim.techniques.optimizer_offload.gradients import Gradients
from brim.techniques.optimizer_offload.states import StateBlock


@torch.no_grad()
def clip(
    parameters: Sequence[nn.Parameter],
    blocks: Mapping[int, StateBlock],
    gradients: Gradients,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Clip in place what is in memory; what is away is scaled when it comes. Returns the norm before."""
    if not any(type(p.grad) is OffloadedTensor for p in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norms: dict[int, torch.Tensor] = {}
    parameter_ids = {id(p) for p in parameters}
    order = [i for i, block in blocks.items() if any(id(p) in parameter_ids for p in block.parameters)]
    for position, index in enumerate(order):
        with gradients.present(index) as present:
            gradients.expect(order[position + 1 : position + 3])
            for parameter, here in zip(blocks[index].parameters, present, strict=True):
                if here is not None and id(parameter) in parameter_ids:
                    norms[id(parameter)] = _norm(here[0], norm_type, foreach)
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in norms:
            norms[id(parameter)] = _norm(parameter.grad, norm_type, foreach)
    total = _total([p for p in parameters if p.grad is not None], norms, norm_type)
    if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
        # As PyTorch says it: it is its option.
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is not finite: nothing was clipped."
        )
    here_ = [p for p in parameters if p.grad is not None and type(p.grad) is not OffloadedTensor]
    torch.nn.utils.clip_grads_with_norm_(here_, max_norm, total, foreach)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for index in order:
        for number, parameter in enumerate(blocks[index].parameters):
            if type(parameter.grad) is OffloadedTensor and id(parameter) in parameter_ids:
                gradients.scale(index, number, factor.to("cpu"))
    return total


def _norm(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    if foreach is False or gradient.is_sparse:
        alone: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
        return alone
    return torch._foreach_norm([gradient], norm_type)[0]


def _total(parameters: Sequence[nn.Parameter], norms: Mapping[int, torch.Tensor], norm_type: float) -> torch.Tensor:
    marks = [torch.empty(0, dtype=p.dtype, device=p.device) for p in parameters]
    grouped = _group_tensors_by_device_and_dtype([marks], with_indices=True)  # type: ignore[list-item]
    order = [index for _, indices in grouped.values() for index in indices]
    device = parameters[0].device
    ordered = [norms[id(parameters[index])].to(device) for index in order]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    return norm
