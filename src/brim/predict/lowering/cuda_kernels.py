"""What PyTorch's CUDA kernels and the libraries below them allocate besides their outputs.

Each rule names the file under aten/src/ATen that it follows. Convolutions have a file of their own.
"""

from __future__ import annotations

from math import ceil, prod

import torch

from brim.predict.lowering import cuda_convolution, cuda_norms, cuda_recurrent, cuda_reductions, cuda_sorting
from brim.predict.lowering.cpu_kernels import ctc_backward
from brim.predict.lowering.kernel import Kernel, Rule, dense_or_channels_last, nbytes

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_GEMM = (
    _aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm_.default, _aten.addmm.out, _aten.bmm.default,
    _aten.bmm.out, _aten.baddbmm.default, _aten.baddbmm_.default, _aten.mv.default, _aten.addmv.default,
    _aten.addmv_.default, _aten.dot.default, _aten.vdot.default, _aten.addbmm.default,
)  # fmt: skip


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuda/CublasHandlePool.cpp: ``:4096:2:16:8``, and 32 MiB on Hopper and Blackwell; cuBLASLt shares it."""
    return 32 << 20 if capability[0] in (9, 10, 12) else 4096 * 1024 * 2 + 16 * 1024 * 8


class Workspaces:
    """cuBLAS keeps one workspace per handle and stream; the forward and the backward thread have a handle each."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._bytes = cublas_workspace_bytes(capability)
        self._threads: set[bool] = set()

    def rule(self, kernel: Kernel) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        kernel.emit()
        if in_backward not in self._threads:
            self._threads.add(in_backward)
            kernel.keep(self._bytes, "cuBLAS")


def _statistics_in_float(kernel: Kernel) -> None:
    """cuda/layer_norm_kernel.cu, Normalization.cuh: statistics of half-precision inputs are float32."""
    kernel.emit(0)
    for index in range(1, len(kernel.outputs)):
        kernel.emit(index, bytes=kernel.outputs[index].numel() * max(4, kernel.outputs[index].element_size()))


def _batch_norm(kernel: Kernel) -> None:
    """Normalization.cpp, ``_batch_norm_impl_index``: cuDNN gets a copy of an input of another layout than its two."""
    source = kernel.arg("input")
    if not dense_or_channels_last(source):
        kernel.temp(nbytes(source))
    _statistics_in_float(kernel)


def _group_norm(kernel: Kernel) -> None:
    """cuda/group_norm_kernel.cu: a scale and a shift per sample and channel."""
    _statistics_in_float(kernel)
    for _ in range(2):
        kernel.temp(kernel.arg("N") * kernel.arg("C") * 4)


def _group_norm_backward(kernel: Kernel) -> None:
    """cuda/group_norm_kernel.cu: ds, db and c1 per sample and channel, c2 and c3 per sample and group."""
    kernel.emit()
    for _ in range(3):
        kernel.temp(kernel.arg("N") * kernel.arg("C") * 4)
    for _ in range(2):
        kernel.temp(kernel.arg("N") * kernel.arg("group") * 4)


def _structured_loss(kernel: Kernel) -> None:
    """Loss.cpp: the output is made at full size and then called a scalar: its storage stays as large."""
    if kernel.arg("reduction"):
        full = max(nbytes(kernel.args[0]), nbytes(kernel.args[1]))
        kernel.emit(0, bytes=full)
        kernel.temp(full)


def _elementwise_loss(kernel: Kernel) -> None:
    """Loss.cpp: the losses are written out before they are reduced."""
    if kernel.arg("reduction"):
        kernel.temp(max(nbytes(kernel.args[0]), nbytes(kernel.args[1])))
        kernel.emit()


def _contiguous_after(*names: str) -> Rule:
    def rule(kernel: Kernel) -> None:
        kernel.emit()
        for name in names:
            value = kernel.arg(name)
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                kernel.temp(nbytes(value))

    return rule


def _expected_distinct(draws: int, values: int) -> int:
    """How many different values are seen in so many uniform draws."""
    return ceil(values * (1 - (1 - 1 / values) ** draws)) if values else 0


def _embedding_backward(kernel: Kernel) -> None:
    """cuda/Embedding.cu, EmbeddingBackwardKernel.cu: above 3,072 indices are sorted and summed in segments."""
    grad, indices, weights = kernel.args[0], kernel.args[1], kernel.args[2]
    count, width = indices.numel(), grad.size(-1)
    kernel.emit()
    if count <= 3072 and not kernel.arg("scale_grad_by_freq"):
        return
    kernel.temp(nbytes(indices))
    kernel.temp(nbytes(indices))
    segments = min(count, _expected_distinct(count, weights))
    partial = segments + count // 10
    kernel.temp(count * indices.element_size())
    kernel.temp(partial * indices.element_size())
    kernel.temp(partial * width * 4)


def _index_put(kernel: Kernel) -> None:
    """cuda/Indexing.cu: to accumulate, positions are linearised and sorted."""
    kernel.emit()
    if not kernel.arg("accumulate"):
        return
    indices = [i for i in kernel.arg("indices") if i is not None]
    count = prod(torch.broadcast_shapes(*(i.shape for i in indices))) if indices else 0
    values = kernel.arg("values")
    if not values.is_contiguous():
        kernel.temp(nbytes(values))
    for _ in range(5):  # linear, sorted and original positions; the sort's own copies of two
        kernel.temp(count * 8)


def _softmax_backward(kernel: Kernel) -> None:
    """cuda/SoftMax.cu: ``grad * output`` is made first (the logarithm's backward needs no such product)."""
    _contiguous_after("grad_output", "output")(kernel)
    grad, output = kernel.arg("grad_output"), kernel.arg("output")
    kernel.temp(grad.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize)


def _safe_softmax(kernel: Kernel) -> None:
    """transformers/attention.cpp: which elements, and then rows, are minus infinity."""
    source = kernel.args[0]
    kernel.emit()
    kernel.temp(source.numel())
    kernel.temp(source.numel() // max(source.size(kernel.arg("dim")), 1))


def _logsumexp(kernel: Kernel) -> None:
    """ReduceOps.cpp: maxima, then exp(self - maxima) as large as the input, summed into the result."""
    kernel.temp(kernel.result.numel() * kernel.result.element_size())
    kernel.temp(nbytes(kernel.args[0]))
    kernel.emit()


def _flash_backward(kernel: Kernel) -> None:
    """transformers/cuda/flash_attn/flash_api.cpp: row sums and the query's gradient in float32, in 128-row blocks."""
    query, key = kernel.arg("query"), kernel.arg("key")
    batch, heads, rows, size = query.shape
    padded_rows = ceil(rows / 128) * 128
    padded_size = ceil(size / 32) * 32 if size <= 192 else 256
    if key.size(1) != heads:  # grouped queries: gradients per query head first
        for _ in range(2):
            kernel.temp(batch * key.size(2) * heads * size * query.element_size())
    kernel.emit()
    kernel.temp(batch * heads * padded_rows * 4)
    kernel.temp(batch * padded_rows * heads * padded_size * 4)


def _cudnn_attention(kernel: Kernel) -> None:
    """transformers/cuda/attention.cu, cudnn/MHA.cpp: seed and offset come first."""
    for index in (2, 3, 0, 1):
        kernel.emit(index)


def _cudnn_attention_backward(kernel: Kernel) -> None:
    """cudnn-frontend's scaled_dot_product_flash_attention: the query's gradient and row sums in float32."""
    kernel.emit()
    batch, heads, rows, size = kernel.arg("query").shape
    kernel.temp(batch * heads * rows * (size + 1) * 4)


def _binary_cross_entropy(kernel: Kernel) -> None:
    """cuda/Loss.cu: the losses' own storage takes their sum."""
    if kernel.arg("reduction"):
        kernel.emit(0, bytes=nbytes(kernel.arg("self")))
        kernel.temp(kernel.arg("self").element_size())


def _layer_norm_backward(kernel: Kernel) -> None:
    """cuda/layer_norm_kernel.cu reads a gradient and an input that are contiguous."""
    for name in ("grad_out", "input"):
        if not kernel.arg(name).is_contiguous():
            kernel.temp(nbytes(kernel.arg(name)))
    kernel.emit()


def _index(kernel: Kernel) -> None:
    """TensorAdvancedIndexing.cpp: several indices that lie differently once they are broadcast are all made dense."""
    _broadcast_indices(kernel)
    kernel.emit()


def _broadcast_indices(kernel: Kernel) -> None:
    indices = [index for index in kernel.arg("indices") if index is not None and index.dtype.itemsize > 1]
    if len(indices) < 2:
        return
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    strides = [_broadcast_stride(index, shape) for index in indices]
    if len(set(strides)) == 1:
        return
    dense = torch._prims_common.make_contiguous_strides_for(shape)
    for index, stride in zip(indices, strides, strict=True):
        if any(own != wanted and size > 1 for own, wanted, size in zip(stride, dense, shape, strict=True)):
            kernel.temp(prod(shape) * index.element_size())


def _broadcast_stride(index: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    missing = len(shape) - index.dim()
    own = zip(index.shape, index.stride(), shape[missing:], strict=True)
    return (*(0 for _ in range(missing)), *(0 if size == 1 != wanted else step for size, step, wanted in own))


def _efficient_forward(kernel: Kernel) -> None:
    """transformers/cuda/attention.cu: without dropout there is no seed and no offset."""
    if not kernel.arg("dropout_p"):
        for output in kernel.result[2:]:
            kernel.drop(output)
    kernel.emit()


def _efficient_backward(kernel: Kernel) -> None:
    """transformers/cuda/attention_backward.cu: row sums; in half precision the query's gradient in float32."""
    query = kernel.arg("query")
    batch, heads, rows, size = query.shape
    kernel.emit()
    kernel.temp(batch * heads * rows * 4)
    if query.dtype in _HALF:
        kernel.temp(batch * heads * ceil(rows / 64) * 64 * ceil(size / 32) * 32 * 4)


RULES: dict[torch._ops.OpOverload, Rule] = {
    **cuda_convolution.RULES,
    **cuda_norms.RULES,
    **cuda_recurrent.RULES,
    **cuda_sorting.RULES,
    _aten.native_layer_norm.default: _statistics_in_float,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.mse_loss.default: _structured_loss,
    _aten.smooth_l1_loss.default: _structured_loss,
    _aten.huber_loss.default: _elementwise_loss,
    _aten.soft_margin_loss.default: _elementwise_loss,
    _aten.binary_cross_entropy.default: _binary_cross_entropy,
    _aten._softmax.default: _contiguous_after("self"),
    _aten._log_softmax.default: _contiguous_after("self"),
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _contiguous_after("grad_output", "output"),
    _aten._safe_softmax.default: _safe_softmax,
    _aten._ctc_loss_backward.Tensor: ctc_backward,
    _aten.logsumexp.default: _logsumexp,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index.Tensor: _index,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
    _aten.index_put_.default: _index_put,
    _aten.index_put.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}


def rules(capability: tuple[int, int]) -> dict[torch._ops.OpOverload, Rule]:
    """The rules for one trace; cuBLAS's workspaces are remembered from operation to operation."""
    workspaces = Workspaces(capability)
    reductions = dict.fromkeys(cuda_reductions.OPERATIONS, cuda_reductions.rule_of(capability))
    return {**RULES, **reductions, **dict.fromkeys(_GEMM, workspaces.rule)}
