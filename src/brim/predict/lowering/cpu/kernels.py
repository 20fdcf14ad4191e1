"""Allocations of PyTorch's CPU kernels besides their outputs, in order, for operators that models have many of.

Each rule names the file under aten/src/ATen/native that it follows. Scalars' few bytes are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from brim.predict.flops import op_flops
from brim.predict.lowering.kernel import Kernel, Rule, Script, contiguous_after, contiguous_before, nbytes

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_KV_SPLIT = 512
_LEAST_WORK = 16 * 16 * 16  # multiplications up to which oneDNN is not asked
_MOST_FLOPS = 4e11  # some seconds on two cores
_MOST_BYTES = 2**30  # of operands and results together
_CHANNELS_OF_BLOCK = 16  # of oneDNN's layouts, the largest
_CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_backward.default)
# Allocations of these depend on shapes alone, and no value of an operand is an index.
_MEASURED = (
    *_CONVOLUTIONS, _aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default,
    _aten.native_batch_norm.default, _aten.native_batch_norm_backward.default,
    _aten.native_group_norm.default, _aten.native_group_norm_backward.default, _aten.sort.default, _aten.sort.stable,
    _aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default, _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default, _aten.im2col.default, _aten.upsample_nearest2d.default,
    _aten.upsample_bilinear2d.default, _aten.upsample_bicubic2d.default, _aten.logsumexp.default,
    _aten._safe_softmax.default, _aten.roll.default, _aten.isinf.default,
)  # fmt: skip
_scripts: dict[Hashable, Script | None] = {}  # None: it could not be measured


def _layer_norm(kernel: Kernel) -> None:
    """layer_norm.cpp: statistics are float32 where a half-precision input meets float32 weights."""
    for name in ("input", "weight", "bias"):
        kernel.contiguous(kernel.arg(name))
    source, weight = kernel.arg("input"), kernel.arg("weight")
    mixed = weight is not None and weight.dtype != source.dtype
    rows = source.numel() // max(prod(kernel.arg("normalized_shape")), 1)
    kernel.emit(0)
    for index in range(1, len(kernel.outputs)):
        kernel.emit(index, bytes=rows * (4 if mixed else source.element_size()))


def _layer_norm_backward(kernel: Kernel) -> None:
    """layer_norm.cpp and cpu/layer_norm_kernel.cpp: one row of dgamma and of dbeta per thread."""
    contiguous_before("grad_out", "input", "mean", "rstd", "weight")(kernel)
    source = kernel.arg("input")
    if any(kernel.arg("output_mask")[1:]) and source.numel():
        width = prod(kernel.arg("normalized_shape"))
        kernel.temp(2 * torch.get_num_threads() * width * source.element_size())


def _mean(kernel: Kernel) -> None:
    """ReduceOps.cpp: half precision is summed as float32, from a float32 copy."""
    source = kernel.args[0]
    if source.dtype in _HALF and kernel.arg("dtype") in (None, *_HALF):
        kernel.emit()
        kernel.temp(kernel.outputs[0].numel() * 4 if kernel.outputs else 4)
        kernel.temp(source.numel() * 4)


def _reduce(kernel: Kernel) -> None:
    """ReduceOpsUtils.h: the CPU converts the input to the dtype in which it reduces."""
    source, result = kernel.args[0], kernel.result
    kernel.emit()
    if isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor) and source.dtype != result.dtype:
        kernel.temp(source.numel() * result.element_size())


def _indexed(kernel: Kernel) -> None:
    """TensorAdvancedIndexing.cpp: 32-bit indices are widened."""
    kernel.emit()
    index = kernel.arg("index")
    if index.dtype == torch.int32:
        kernel.temp(index.numel() * 8)


def _lifted(kernel: Kernel) -> None:
    """utils/tensor_numpy.cpp: a tensor made from a NumPy array lies in the array's memory."""
    if not kernel.args[0].untyped_storage().resizable():
        kernel.drop(kernel.result)


def _ctc_backward(kernel: Kernel) -> None:
    """LossCTC.cpp: log beta, as large as log alpha."""
    kernel.emit()
    kernel.temp(nbytes(kernel.arg("log_alpha")))


def _attention(kernel: Kernel) -> None:
    """cpu/FlashAttentionKernel.cpp: scores, their maxima and sums, and the mix of values, for each thread."""
    query, value = kernel.args[0], kernel.args[2]
    rows, columns = _splits(query, value)
    threads = torch.get_num_threads()
    kernel.emit()
    kernel.temp(threads * (rows * columns + 2 * rows + rows * query.size(3)) * _sum_bytes(query))
    if query.dtype in _HALF:
        kernel.temp(threads * rows * columns * query.element_size())


def _attention_backward(kernel: Kernel) -> None:
    grad, query, value = kernel.args[0], kernel.args[1], kernel.args[3]
    rows, columns = _splits(query, value)
    threads = torch.get_num_threads()
    kernel.emit()
    kernel.contiguous(grad.transpose(1, 2))
    kernel.temp(threads * 2 * rows * columns * _sum_bytes(query))
    if query.dtype in _HALF:
        kernel.temp(threads * 2 * rows * columns * query.element_size())
    kernel.temp(rows * _sum_bytes(query))


def _splits(query: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """Return the rows of queries and of keys that one thread works on at once."""
    queries = query.size(2)
    split = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(split, queries), min(_KV_SPLIT, value.size(2))


def _sum_bytes(tensor: torch.Tensor) -> int:
    return 8 if tensor.dtype == torch.float64 else 4


def _product(kernel: Kernel) -> None:
    """mkldnn/Matmul.cpp: oneDNN blocks matrices of bfloat16 into buffers that a search chooses."""
    left, right = (kernel.arg(name) for name in _PRODUCTS[kernel.func])
    if left.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return
    if left.numel() * right.size(-1) > _LEAST_WORK and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kernel.unknown = f"{kernel.func.overloadpacket}: oneDNN's buffers for bfloat16"


def _reduce_scatter(position: int) -> Rule:
    """ProcessGroupGloo.cpp all-reduces a copy of the input, as gloo has no reduce-scatter, and copies a part out."""

    def rule(kernel: Kernel) -> None:
        kernel.emit()
        kernel.temp(nbytes(kernel.args[position]))

    return rule


def _promote(kernel: Kernel) -> None:
    """TensorIterator.cpp: where dtypes differ the CPU converts each operand first (CUDA does so in registers)."""
    tensors = [t for t in kernel.args if isinstance(t, torch.Tensor)]
    if len(tensors) < 2 or len({t.dtype for t in tensors}) < 2:
        return
    if kernel.func.overloadpacket in (_aten.where, _aten.masked_fill, _aten.masked_fill_):
        tensors = tensors[1:] if kernel.func.overloadpacket is _aten.where else []
    if not tensors:
        return
    common = tensors[0].dtype if len(tensors) == 1 else _common_dtype(tensors)
    kernel.emit()
    if kernel.func._schema.is_mutable and tensors[0].dtype != common:
        kernel.temp(tensors[0].numel() * common.itemsize)
    for tensor in tensors:
        if tensor.dtype != common:
            kernel.temp(tensor.numel() * common.itemsize)


def _common_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    common = torch.result_type(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        common = torch.promote_types(common, tensor.dtype)
    return common


def _measured(kernel: Kernel) -> None:
    """Run the operator once in a process, and record its allocations by PyTorch's legacy profiler
    (torch/csrc/autograd/profiler_legacy.cpp), on tensors of these sizes whose values do not matter.

    oneDNN chooses its kernels, blocked layouts and scratchpads by the processor's instructions, its caches, the
    number of threads and a search of its own. Other operators here are too rare to be worth a rule. An operator that
    would take long, or cannot run here, is named as not modelled; a convolution also gets a bound.
    """
    script = _script_of(kernel) if _is_affordable(kernel) else None
    if script is not None:
        kernel.play(script)
        return
    kernel.unknown = f"{kernel.func.overloadpacket}: its buffers on the CPU, which were not measured"
    if kernel.func in _CONVOLUTIONS:
        kernel.temp(_bound_bytes(kernel))


def _tensors(kernel: Kernel) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((kernel.args, kernel.kwargs, kernel.result))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_affordable(kernel: Kernel) -> bool:
    if sum(nbytes(tensor) for tensor in _tensors(kernel)) > _MOST_BYTES:
        return False
    return op_flops(kernel.func, kernel.args, kernel.kwargs, kernel.result) <= _MOST_FLOPS


def _script_of(kernel: Kernel) -> Script | None:
    described = pytree.tree_map(_described, (tuple(kernel.args), dict(kernel.kwargs)))
    key = (kernel.func, repr(described), torch.is_grad_enabled(), torch.get_num_threads())
    if key not in _scripts:
        try:
            _scripts[key] = _run(kernel)
        except (RuntimeError, MemoryError, AttributeError):  # no such kernel, no memory, or no such profiler
            _scripts[key] = None
    return _scripts[key]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return leaf


def _run(kernel: Kernel) -> Script:
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        args, kwargs = pytree.tree_map(_real, (tuple(kernel.args), dict(kernel.kwargs)))
        if kernel.func is _aten.mkldnn_rnn_layer_backward.default:
            args = (*args[:-1], _rnn_workspace(kernel, args))
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        torch._C._autograd._enable_profiler_legacy(config)
        try:
            result = kernel.func(*args, **kwargs)
        finally:
            records = torch._C._autograd._disable_profiler_legacy()
    events: list[Any] = [event for thread in records for event in thread]
    sizes = [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
    return _as_script(sizes, pytree.tree_leaves(result))


def _rnn_workspace(kernel: Kernel, args: tuple[Any, ...]) -> torch.Tensor:
    """Return oneDNN's workspace of the forward pass, whose size a fake tensor does not have."""
    names = (
        "reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first",
        "train",
    )  # fmt: skip
    with torch.enable_grad():
        outputs = _aten.mkldnn_rnn_layer(*args[:7], *(kernel.arg(name) for name in names))
    workspace: torch.Tensor = outputs[3]
    return workspace


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


def _as_script(sizes: list[int], results: list[Any]) -> Script:
    """Return allocations (positive sizes) and frees as a script, where storages that remain are the results.

    Which of two allocations of one size a free means, and which of two is a result, makes no difference.
    """
    script: list[tuple[str, int, int]] = []
    places_by_size: dict[int, list[int]] = {}  # bytes -> places in the script
    for size in sizes:
        if size > 0:
            places_by_size.setdefault(size, []).append(len(script))
            script.append(("alloc", len(script), size))
        elif places_by_size.get(-size):
            script.append(("free", places_by_size[-size].pop(), 0))
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    for position, tensor in enumerate(tensors):
        size = tensor.untyped_storage().nbytes()
        if places := places_by_size.get(size):
            script[places.pop(0)] = ("out", position, size)
    return tuple(script)


def _bound_bytes(kernel: Kernel) -> int:
    """Return copies of all operands and results, with channels filled up to a block, and each thread's columns."""
    backward = kernel.func is _aten.convolution_backward.default
    image, weight = (kernel.args[0], kernel.args[2]) if backward else (kernel.result, kernel.args[1])
    groups = int(kernel.arg("groups"))
    copies = sum(nbytes(tensor) * _filled_up(tensor, groups) for tensor in _tensors(kernel))
    columns = prod(weight.shape[1:]) * prod(image.shape[2:]) * weight.element_size() * torch.get_num_threads()
    return int(copies + columns)


def _filled_up(tensor: torch.Tensor, groups: int) -> float:
    """Return how many times the channels of a tensor are those of a group, filled up to a block of channels."""
    if tensor.dim() < 2:
        return 1.0
    channels = max(1, tensor.size(1) // groups)
    return -(-channels // _CHANNELS_OF_BLOCK) * _CHANNELS_OF_BLOCK / channels


_PRODUCTS = {
    _aten.mm.default: ("self", "mat2"),
    _aten.addmm.default: ("mat1", "mat2"),
    _aten.bmm.default: ("self", "mat2"),
    _aten.baddbmm.default: ("batch1", "batch2"),
}
_RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys(_MEASURED, _measured),
    **dict.fromkeys(_PRODUCTS, _product),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.sum.default: _reduce,
    _aten.sum.dim_IntList: _reduce,
    _aten.prod.default: _reduce,
    _aten.prod.dim_int: _reduce,
    _aten.embedding.default: contiguous_before("indices"),
    _aten.embedding_dense_backward.default: contiguous_after("indices"),
    _aten._softmax.default: contiguous_after("self"),
    _aten._log_softmax.default: contiguous_after("self"),
    _aten._softmax_backward_data.default: contiguous_after("grad_output", "output"),
    _aten._log_softmax_backward_data.default: contiguous_after("grad_output", "output"),
    _aten._ctc_loss_backward.Tensor: _ctc_backward,
    _aten.lift_fresh.default: _lifted,
    _aten.gather.default: _indexed,
    _aten.scatter.src: _indexed,
    _aten.scatter.value: _indexed,
    _aten.scatter_.src: _indexed,
    _aten.scatter_.value: _indexed,
    _aten.scatter_add.default: _indexed,
    _aten.scatter_add_.default: _indexed,
}
if torch.distributed.is_available():
    _RULES[torch.ops.c10d._reduce_scatter_base_.default] = _reduce_scatter(1)
    _RULES[torch.ops._c10d_functional.reduce_scatter_tensor.default] = _reduce_scatter(0)


def rule_for(func: OpOverload) -> Rule | None:
    """Return the rule of a CPU kernel; None: it allocates its outputs and nothing else."""
    rule = _RULES.get(func)
    return _promote if rule is None and torch.Tag.pointwise in func.tags else rule


# bitsandbytes registers a kernel in Python for every device (bitsandbytes/backends/default/ops.py), and one of its
# own for some (bitsandbytes/backends/cpu/ops.py).
_NAMESPACE = "bitsandbytes"


@cache
def in_parts(func: OpOverload) -> Callable[..., Any] | None:
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
