"""Rules that play what PyTorch's CUDA build answers for a kernel.

Without such a build only results are counted, and kernels that may allocate more are named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from brim.device.kernels import Call, answers_for
from brim.model_inputs import tensors_in
from brim.predict.lowering.cuda.products import keep_workspace
from brim.predict.lowering.kernel import Kernel, Rule
from brim.predict.side_effects import by_brim

# Operators that allocate their results and nothing else.
_RESULTS_ONLY = frozenset(
    """_unsafe_view arange as_strided_ bernoulli_ cat clone constant_pad_nd empty empty_like empty_strided eye fill_
    full full_like gather index_select linspace masked_fill_ mse_loss_backward new_empty new_empty_strided new_full
    new_ones new_zeros normal_ ones ones_like rand rand_like randint randn randn_like repeat scalar_tensor scatter_
    select_backward slice_backward softplus_backward split_with_sizes_copy stack uniform_ where zero_ zeros
    zeros_like""".split()  # noqa: SIM905
)
# Operators that do so in all samples of PyTorch's own tests (plain, grown, transposed, channels last).
_RESULTS_ONLY_IN_SAMPLES = frozenset(
    """_flash_attention_forward _pdist_forward _prelu_kernel _prelu_kernel_backward _thnn_fused_gru_cell
    _thnn_fused_lstm_cell
    _scaled_dot_product_flash_attention _scaled_dot_product_fused_attention_overrideable
    adaptive_max_pool3d_backward addr alias_copy as_strided_copy as_strided_scatter bernoulli
    binary_cross_entropy_backward block_diag bucketize cauchy_ channel_shuffle col2im complex diag_embed
    diagonal_backward diagonal_copy diagonal_scatter elu_backward empty_permuted expand_copy exponential_ fill
    flip floor_divide fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d
    fractional_max_pool3d_backward geometric_ glu glu_backward grid_sampler_2d grid_sampler_2d_backward
    grid_sampler_3d grid_sampler_3d_backward hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward hash_tensor histc huber_loss huber_loss_backward im2col index_add
    index_add_ index_copy index_fill index_fill_ leaky_relu_backward linalg_cholesky_ex linalg_cross
    linalg_ldl_factor_ex linalg_lu_factor_ex log_normal_ log_sigmoid_backward logspace mish_backward
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward
    nansum narrow_copy nonzero_static norm normal permute_copy polar put put_ randint_like reflection_pad1d
    reflection_pad1d_backward replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward rot90 rrelu_with_noise rrelu_with_noise_backward rsub scatter scatter_add
    scatter_add_ searchsorted select_scatter sgn slice_scatter smooth_l1_loss_backward softshrink_backward
    squeeze_ squeeze_copy std_mean t_copy take trace transpose_ transpose_copy tril tril_ tril_indices triu
    triu_indices unbind_copy unfold_copy unsafe_split unsqueeze_ unsqueeze_copy view_copy""".split()  # noqa: SIM905
)
_POINTWISE_THAT_TAKES_MORE = {"isinf", "sgn"}
_COPY_WHAT_IS_NOT_DENSE = re.compile(r"_?(upsample|adaptive_avg_pool|avg_pool|max_pool)\w+")
_CHOOSE_BY_VALUES = (torch.ops.aten.linalg_matrix_exp.default,)  # by norms, how many powers are made
_DEPENDS_ON_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def described(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """The call as ``KernelAnswers.script`` takes it; None where an argument has no description."""
    try:
        namespace, name = operator._schema.name.split("::")
        return {
            "op": f"{namespace}.{name}.{operator._overloadname}",
            "args": [_described(arg) for arg in args],
            "kwargs": {key: _described(value) for key, value in kwargs.items()},
            "default": _described(torch.get_default_dtype()),
        }
    except TypeError:
        return None


def _described(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (int, float, bool, str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError("only strided tensors are described")
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [list(value.shape), list(value.stride()), value.storage_offset(), dtype, "cuda"]}
    if kind in (list, tuple) or isinstance(value, torch.Size):
        return [_described(part) for part in value]
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is torch.device:
        return {"device": "cuda"}
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return {"constant": str(value).removeprefix("torch.")}
    raise TypeError(f"{kind.__name__} has no description")


def ask(kernel: Kernel, func: OpOverload | None = None, args: Sequence[Any] | None = None) -> bool:
    """Play what PyTorch answers for the kernel, or for another operator that is a part of it.

    Returns False where there is no build, or no answer.
    """
    whole = func is None
    call = described(kernel.func, kernel.args, kernel.kwargs) if func is None else described(func, args or (), {})
    if call is None:
        return False
    with by_brim():
        answers = answers_for(kernel.capability)
        script = None if answers is None else answers.script(call)
    if script is None:
        return False
    if not whole:  # its result is the kernel's
        script = tuple(entry for entry in script if entry[0] != "out")
    # As long as values say, which the device does not compute: there the result may be empty.
    kernel.play(script, keep_workspace, by_values=any(tag in kernel.func.tags for tag in _DEPENDS_ON_VALUES))
    if kernel.func in _CHOOSE_BY_VALUES:
        kernel.name("temporaries that values decide on")
    return True


def asked_first(otherwise: Rule) -> Rule:
    """Return a rule that plays PyTorch's answer. ``otherwise`` is for machines without a build."""

    def rule(kernel: Kernel) -> None:
        if not ask(kernel):
            otherwise(kernel)

    return rule


@asked_first
def any_kernel(kernel: Kernel) -> None:
    """Name kernels that may take more than their results."""
    name = kernel.func.overloadpacket.__name__
    if _COPY_WHAT_IS_NOT_DENSE.fullmatch(name):
        tensors = tensors_in(kernel.args)
        known = all(tensor.is_contiguous() for tensor in tensors)
    else:
        known = name in _RESULTS_ONLY_IN_SAMPLES
    if not known:
        kernel.name()


@cache
def takes_results_only(func: OpOverload) -> bool:
    """Return True if an operator's kernel is known to allocate its results and nothing else."""
    name = func.overloadpacket.__name__
    if func.namespace != "aten" or func.is_view or name in _RESULTS_ONLY or name.startswith("_foreach_"):
        return True
    return torch.Tag.inplace_view in func.tags or (
        torch.Tag.pointwise in func.tags and name not in _POINTWISE_THAT_TAKES_MORE
    )
