"""Allocations of PyTorch's CPU kernels besides their outputs, in order, for operators that models have many of.

Each rule names the file under aten/src/ATen/native that it follows. Scalars' few bytes are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from brim.predict.lowering.cpu import measured as cpu_measured
from brim.predict.lowering.kernel import Kernel, Rule, contiguous_after, contiguous_before, nbytes

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_KV_SPLIT = 512
_LEAST_WORK = 16 * 16 * 16  # multiplications up to which oneDNN is not asked


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


_PRODUCTS = {
    _aten.mm.default: ("self", "mat2"),
    _aten.addmm.default: ("mat1", "mat2"),
    _aten.bmm.default: ("self", "mat2"),
    _aten.baddbmm.default: ("batch1", "batch2"),
}
_RULES: dict[torch._ops.OpOverload, Rule] = {
    **dict.fromkeys(cpu_measured.OPERATORS, cpu_measured.rule),
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


def rule_for(func: torch._ops.OpOverload) -> Rule | None:
    """Return the rule of a CPU kernel; None: it allocates its outputs and nothing else."""
    rule = _RULES.get(func)
    return _promote if rule is None and torch.Tag.pointwise in func.tags else rule
