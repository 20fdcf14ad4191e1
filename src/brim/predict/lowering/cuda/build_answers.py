"""Rules that play what PyTorch's CUDA build answers for a kernel.

Without such a build only results are counted, and kernels that may allocate more are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from brim.device.kernels import answers_for, described
from brim.predict.lowering.kernel import Kernel, Rule, Script
from brim.predict.side_effects import by_brim

TEMPORARIES = "its temporaries"  # not known here; PyTorch's CUDA build answers them
# Operators that allocate their results and nothing else.
_RESULTS_ONLY = frozenset(
    """_unsafe_view arange as_strided_ bernoulli_ cat clone constant_pad_nd empty empty_like empty_strided eye fill_
    full full_like gather index_select linspace masked_fill_ mse_loss_backward new_empty new_empty_strided new_full
    new_ones new_zeros normal_ ones ones_like rand rand_like randint randn randn_like repeat scalar_tensor scatter_
    select_backward slice_backward softplus_backward split_with_sizes_copy stack uniform_ zero_ zeros
    zeros_like""".split()  # noqa: SIM905
)
# Operators that do so in all samples of PyTorch's own tests (plain, grown, transposed, channels last).
_RESULTS_ONLY_IN_SAMPLES = frozenset(
    """_flash_attention_forward _pdist_forward _prelu_kernel _prelu_kernel_backward
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


def answered_rule(capability: tuple[int, int], keep: Callable[[Kernel], None], otherwise: Rule | None = None) -> Rule:
    """Return the rule of any kernel. ``keep`` takes cuBLAS's workspace once, ``otherwise`` is for no build."""

    def rule(kernel: Kernel) -> None:
        script = _script(kernel, capability)
        if script is not None:
            # As long as values say, which the device does not compute: there the result may be empty.
            kernel.play(script, keep, by_values=any(tag in kernel.func.tags for tag in _DEPENDS_ON_VALUES))
            if kernel.func in _CHOOSE_BY_VALUES:
                kernel.unknown = f"{kernel.func.overloadpacket}: temporaries that values decide on"
        elif otherwise is not None:
            otherwise(kernel)
        elif _may_take_more(kernel):
            kernel.unknown = f"{kernel.func.overloadpacket}: {TEMPORARIES}"

    return rule


def naming_temporaries(rule: Rule) -> Rule:
    """Return ``rule`` for a kernel that also allocates temporaries of unknown size."""

    def naming(kernel: Kernel) -> None:
        rule(kernel)
        kernel.unknown = f"{kernel.func.overloadpacket}: {TEMPORARIES}"

    return naming


@cache
def takes_results_only(func: torch._ops.OpOverload) -> bool:
    """Return True if an operator's kernel is known to allocate its results and nothing else."""
    name = func.overloadpacket.__name__
    if func.namespace != "aten" or func.is_view or name in _RESULTS_ONLY or name.startswith("_foreach_"):
        return True
    if torch.Tag.inplace_view in func.tags:
        return True
    return torch.Tag.pointwise in func.tags and name not in _POINTWISE_THAT_TAKES_MORE


def _may_take_more(kernel: Kernel) -> bool:
    name = kernel.func.overloadpacket.__name__
    if _COPY_WHAT_IS_NOT_DENSE.fullmatch(name):
        return not all(tensor.is_contiguous() for tensor in _tensors(kernel.args))
    return name not in _RESULTS_ONLY_IN_SAMPLES


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _script(kernel: Kernel, capability: tuple[int, int]) -> Script | None:
    call = described(kernel.func, kernel.args, kernel.kwargs)
    if call is None:
        return None
    with by_brim():
        answers = answers_for(capability)
        return None if answers is None else answers.script(call)
