"""What PyTorch's CPU kernels allocate besides their outputs, in the order in which they do.

Each rule names the file under aten/src/ATen/native that it follows. Scalars' few bytes are left out.
"""

from __future__ import annotations

from math import prod

import torch

from brim.predict.lowering.cpu import recurrent as cpu_recurrent
from brim.predict.lowering.kernel import Kernel, Rule, dense_or_channels_last, is_channels_last, nbytes

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def _contiguous_first(*names: str) -> Rule:
    """Kernels that copy these inputs into contiguous form before they make their outputs."""

    def rule(kernel: Kernel) -> None:
        for name in names:
            value = kernel.arg(name)
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                kernel.temp(nbytes(value))

    return rule


def _contiguous_after(*names: str) -> Rule:
    """As above, for kernels whose outputs are made by their meta function (structured kernels)."""
    before = _contiguous_first(*names)

    def rule(kernel: Kernel) -> None:
        kernel.emit()
        before(kernel)

    return rule


def _layer_norm(kernel: Kernel) -> None:
    """layer_norm.cpp: statistics are float32 where a half-precision input meets float32 weights."""
    _contiguous_first("input", "weight", "bias")(kernel)
    source, weight = kernel.arg("input"), kernel.arg("weight")
    mixed = weight is not None and weight.dtype != source.dtype
    rows = source.numel() // max(prod(kernel.arg("normalized_shape")), 1)
    kernel.emit(0)
    for index in range(1, len(kernel.outputs)):
        kernel.emit(index, bytes=rows * (4 if mixed else source.element_size()))


def _layer_norm_backward(kernel: Kernel) -> None:
    """layer_norm.cpp and cpu/layer_norm_kernel.cpp: one row of dgamma and of dbeta per thread."""
    _contiguous_first("grad_out", "input", "mean", "rstd", "weight")(kernel)
    source = kernel.arg("input")
    width = prod(kernel.arg("normalized_shape"))
    kernel.emit()
    if any(kernel.arg("output_mask")[1:]) and source.numel():
        kernel.temp(2 * torch.get_num_threads() * width * source.element_size())


def _group_norm(kernel: Kernel) -> None:
    """group_norm.cpp and cpu/group_norm_kernel.cpp: channels-last keeps two rows of sums per sample."""
    source, weight = kernel.arg("input"), kernel.arg("weight")
    last = is_channels_last(source)
    if not last:
        _contiguous_first("input", "weight", "bias")(kernel)
    mixed = weight is not None and weight.dtype != source.dtype
    kernel.emit(0)
    for index in range(1, len(kernel.outputs)):
        kernel.emit(index, bytes=kernel.arg("N") * kernel.arg("group") * (4 if mixed else source.element_size()))
    if last:
        kernel.temp(2 * kernel.arg("N") * kernel.arg("C") * (4 if source.dtype in _HALF else source.element_size()))


def _group_norm_backward(kernel: Kernel) -> None:
    """cpu/group_norm_kernel.cpp: the sums ds and db, one each per sample and channel, in the accumulation type."""
    source = kernel.arg("input")
    if not is_channels_last(source):
        _contiguous_first("grad_out", "input")(kernel)
    kernel.emit()
    size = 4 if source.dtype in _HALF else source.element_size()
    for _ in range(2):
        kernel.temp(kernel.arg("N") * kernel.arg("C") * size)


def _statistics(source: torch.Tensor, weight: torch.Tensor | None) -> int:
    """Bytes of one row of per-channel statistics, in Normalization.cpp's accumulation type for the CPU."""
    if source.dtype in _HALF:
        return source.size(1) * 4
    return source.size(1) * source.element_size()


def _batch_norm(kernel: Kernel) -> None:
    """Normalization.cpp: running statistics are updated through temporaries, alpha and beta are worked out first.

    Other layouts than those two are read element by element, which takes nothing.
    """
    source = kernel.arg("input")
    if not dense_or_channels_last(source):
        return
    row = _statistics(source, kernel.arg("weight"))
    kernel.emit(0)
    if kernel.arg("training"):
        for index in range(1, len(kernel.outputs)):
            kernel.emit(index, bytes=row)
        sums = [kernel.temp(row), kernel.temp(row)]
        if is_channels_last(source):
            sums.append(kernel.temp(torch.get_num_threads() * row))
        for handle in reversed(sums):
            kernel.free(handle)
    kernel.temp(row)
    kernel.temp(row)


def _batch_norm_backward(kernel: Kernel) -> None:
    """Normalization.cpp: the contiguous kernel works on a copy as large as the input; channels-last adds sums.

    In another layout the gradient's sum for each channel is all that is made.
    """
    source = kernel.arg("input")
    row = _statistics(source, kernel.arg("weight"))
    kernel.emit(0)
    for index in range(1, len(kernel.outputs)):
        kernel.emit(index)
    kernel.free(kernel.temp(nbytes(source) if dense_or_channels_last(source) else row))
    if is_channels_last(source):
        kernel.temp(2 * torch.get_num_threads() * row)


def _sort(kernel: Kernel) -> None:
    """Sorting.cpp: positions along the dimension, laid out once; cpu/SortingKernel.cpp for one long integer row."""
    source = kernel.args[0]
    kernel.emit()
    if source.dim():
        dim = kernel.arg("dim")
        kernel.free(kernel.temp(source.size(dim) * 8))
        row = source.dim() == 1 and source.numel() >= 32768 and not source.is_floating_point()
        if row and not kernel.arg("descending") and source.dtype != torch.bool:
            kernel.temp(nbytes(source))
            kernel.temp(source.numel() * 8)


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


def _elementwise_loss(kernel: Kernel) -> None:
    """Loss.cpp: the losses are written out before they are reduced."""
    if kernel.arg("reduction"):
        kernel.emit()
        kernel.temp(max(nbytes(kernel.args[0]), nbytes(kernel.args[1])))


def _structured_loss(kernel: Kernel) -> None:
    """Loss.cpp: the output is made at full size and then called a scalar: its storage stays as large."""
    if kernel.arg("reduction"):
        full = max(nbytes(kernel.args[0]), nbytes(kernel.args[1]))
        kernel.emit(0, bytes=full)
        kernel.temp(full)


def _im2col(kernel: Kernel) -> None:
    """Im2Col.cpp: a contiguous copy of the input is taken in any case."""
    kernel.temp(nbytes(kernel.args[0]))
    kernel.emit()


def _logsumexp(kernel: Kernel) -> None:
    """ReduceOps.cpp: maxima, then exp(self - maxima) as large as the input, summed into the result."""
    source = kernel.args[0]
    maxima = kernel.result.numel() * kernel.result.element_size()
    kernel.temp(maxima)
    kernel.temp(nbytes(source))
    kernel.emit()


def _safe_softmax(kernel: Kernel) -> None:
    """transformers/attention.cpp: which elements, and then rows, are minus infinity."""
    source = kernel.args[0]
    if kernel.arg("dtype") not in (None, source.dtype):
        kernel.temp(source.numel() * kernel.result.element_size())
    kernel.emit()
    kernel.temp(source.numel())
    kernel.temp(source.numel() // max(source.size(kernel.arg("dim")), 1))


def _softmax(kernel: Kernel) -> None:
    """SoftMax.cpp is structured: the copy of an input that is not contiguous follows the output."""
    _contiguous_after("self")(kernel)


def _roll(kernel: Kernel) -> None:
    """TensorTransformations.cpp: one dimension after the other, each a concatenation."""
    dims = len(kernel.arg("dims")) or 1
    source = kernel.args[0]
    previous = 0
    for index in range(dims - 1):
        now = kernel.temp(nbytes(source))
        if index:
            kernel.free(previous)
        previous = now
    kernel.emit()


def _isinf(kernel: Kernel) -> None:
    """UnaryOps / TensorCompare.cpp: ``abs() == inf``."""
    if kernel.args[0].is_floating_point():
        kernel.temp(nbytes(kernel.args[0]))
        kernel.emit()


def _upsampled(kernel: Kernel) -> None:
    """cpu/UpSampleKernel.cpp with few channels reads as it lies; otherwise through channels-last copies of both."""
    source = kernel.args[0]
    kernel.emit()
    if source.size(1) > 3 and source.is_contiguous() and kernel.func.overloadpacket is not _aten.upsample_bicubic2d:
        kernel.temp(nbytes(source))
        kernel.temp(nbytes(kernel.result))


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


def ctc_backward(kernel: Kernel) -> None:
    """LossCTC.cpp, cuda/LossCTC.cu: log beta, as large as log alpha."""
    kernel.emit()
    kernel.temp(nbytes(kernel.arg("log_alpha")))


def promote(kernel: Kernel) -> None:
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
    in_place = kernel.func._schema.is_mutable
    if in_place and tensors[0].dtype != common:
        kernel.temp(tensors[0].numel() * common.itemsize)
    for tensor in tensors:
        if tensor.dtype != common:
            kernel.temp(tensor.numel() * common.itemsize)


def _common_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    common = torch.result_type(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        common = torch.promote_types(common, tensor.dtype)
    return common


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.sort.default: _sort,
    _aten.sort.stable: _sort,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.sum.default: _reduce,
    _aten.sum.dim_IntList: _reduce,
    _aten.prod.default: _reduce,
    _aten.prod.dim_int: _reduce,
    _aten.mse_loss.default: _structured_loss,
    _aten.smooth_l1_loss.default: _structured_loss,
    _aten.im2col.default: _im2col,
    _aten.embedding.default: _contiguous_first("indices"),
    _aten.embedding_dense_backward.default: _contiguous_after("indices"),
    _aten.upsample_nearest2d.default: _upsampled,
    _aten.upsample_bilinear2d.default: _upsampled,
    _aten.upsample_bicubic2d.default: _upsampled,
    _aten.huber_loss.default: _elementwise_loss,
    _aten.soft_margin_loss.default: _elementwise_loss,
    _aten.binary_cross_entropy.default: _elementwise_loss,
    _aten.logsumexp.default: _logsumexp,
    _aten._safe_softmax.default: _safe_softmax,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _contiguous_after("grad_output", "output"),
    _aten._log_softmax_backward_data.default: _contiguous_after("grad_output", "output"),
    _aten.roll.default: _roll,
    _aten._ctc_loss_backward.Tensor: ctc_backward,
    _aten.lift_fresh.default: _lifted,
    _aten.isinf.default: _isinf,
    _aten.gather.default: _indexed,
    **cpu_recurrent.RULES,
    _aten.scatter.src: _indexed,
    _aten.scatter.value: _indexed,
    _aten.scatter_.src: _indexed,
    _aten.scatter_.value: _indexed,
    _aten.scatter_add.default: _indexed,
    _aten.scatter_add_.default: _indexed,
}
