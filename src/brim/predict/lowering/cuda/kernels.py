"""Rules of PyTorch's CUDA kernels: the temporaries that they and the libraries below them take.

Each rule names the file under aten/src/ATen that it follows. Products, convolutions, reductions, norms, indexing
and sorting, recurrent layers and memory-efficient attention have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from math import ceil

import torch
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._prims_common import suggest_memory_format

from brim.core.trace import TO_DEVICE
from brim.predict.lowering.cuda import convolution as cuda_convolution
from brim.predict.lowering.cuda import efficient_attention as cuda_efficient_attention
from brim.predict.lowering.cuda import indexing as cuda_indexing
from brim.predict.lowering.cuda import norms as cuda_norms
from brim.predict.lowering.cuda import products as cuda_products
from brim.predict.lowering.cuda import recurrent as cuda_recurrent
from brim.predict.lowering.cuda import reductions as cuda_reductions
from brim.predict.lowering.cuda.build_answers import any_kernel, asked_first, takes_results_only
from brim.predict.lowering.kernel import (
    Kernel,
    Rule,
    contiguous_after,
    copied_bytes,
    dense_or_channels_last,
    has_channels_last,
    is_channels_last,
    nbytes,
)

_aten = torch.ops.aten
_CHUNK_BLOCK_BYTES = 128 * 16  # that a block of threads copies
_MOST_TRAINED_BY_CUDNN, _MOST_EVALUATED_BY_CUDNN = 880_801, 65_535  # samples of a batch norm
_MOST_ELEMENTS_OF_CUDNN = (1 << 31) - 1
_LEAST_CHANNELS = 4  # that are worth a kernel of their own where they come last
_GROUP_BYTES, _GROUPS_OF_MULTIPROCESSOR_BYTES = 60, 512
_LEAST_BLOCKS_OF_CHANNELS = 8  # fewer are not worth it: one block of threads does the work


def _statistics_in_float(kernel: Kernel) -> None:
    """cuda/layer_norm_kernel.cu, Normalization.cuh: statistics of half-precision inputs are float32."""
    for name in ("input", "weight", "bias") if kernel.func is _aten.native_layer_norm.default else ():
        kernel.contiguous(kernel.arg(name))
    kernel.emit(0)
    for index in range(1, len(kernel.outputs)):
        kernel.emit(index, bytes=kernel.outputs[index].numel() * max(4, kernel.outputs[index].element_size()))


def _trains(kernel: Kernel) -> bool:
    names = {argument.name for argument in kernel.func._schema.arguments} & {"training", "train", "update"}
    return all(kernel.arg(name) for name in names)


def _batch_norm(kernel: Kernel) -> None:
    """Normalization.cpp, ``_batch_norm_impl_index``: cuDNN gets a copy of an input of another layout than its two.
    The others are PyTorch's own (cuda/Normalization.cu), which keep statistics of an evaluation as well."""
    source, trains = kernel.arg("input"), _trains(kernel)
    by_cudnn = _by_cudnn(kernel, trains=trains)
    if by_cudnn and not dense_or_channels_last(source):
        kernel.temp(nbytes(source))
    kernel.emit(0)
    for index in (1, 2):
        kernel.emit(index, bytes=_channel_bytes(source) if trains or not by_cudnn else 0)
    if trains and not by_cudnn and _channels_last_impl(source):
        _parts_of_channels(kernel, source, 4)


def _batch_norm_backward(kernel: Kernel) -> None:
    """cuda/Normalization.cu, ``batch_norm_backward_cuda``: one kernel does all, except for what lies by channels."""
    gradient, source, trains = kernel.arg("grad_out"), kernel.arg("input"), _trains(kernel)
    wants_source, *wants_others = kernel.arg("output_mask")
    by_cudnn = _by_cudnn(kernel, trains=trains)
    if trains and by_cudnn:
        if not (has_channels_last(gradient) if is_channels_last(source) else gradient.is_contiguous()):
            kernel.temp(nbytes(source))
        return
    by_channels = has_channels_last(source) or _channels_last_impl(source)
    if not (trains or any(wants_others)) or (wants_source and not by_channels):
        return
    if by_cudnn:  # it kept nothing of an evaluation
        kernel.temp(_channel_bytes(source))
    for _ in range(2):
        kernel.temp(_channel_bytes(source))
    for index in range(int(wants_source), len(kernel.outputs)):
        kernel.emit(index)
    if _channels_last_impl(source) and _channels_last_impl(gradient):
        _parts_of_channels(kernel, source, 2)
    kernel.emit()


def _by_cudnn(kernel: Kernel, *, trains: bool) -> bool:
    """Normalization.cpp, ``_select_batch_norm_backend``."""
    if kernel.func.overloadpacket is _aten._native_batch_norm_legit:
        return False
    source, weight = kernel.arg("input"), kernel.arg("weight")
    known_types = source.dtype is not torch.bfloat16 and weight is not None and weight.dtype is not torch.bfloat16
    if not known_types or (source.dtype is torch.float16 and weight.dtype is not torch.float32):
        return False
    most = _MOST_TRAINED_BY_CUDNN if trains else _MOST_EVALUATED_BY_CUDNN
    statistics = trains or kernel.arg("running_mean") is not None
    return statistics and source.dim() >= 3 and source.size(0) <= most and source.numel() < _MOST_ELEMENTS_OF_CUDNN


def _channel_bytes(source: torch.Tensor) -> int:
    """A number for each channel, as wide as sums are."""
    return source.size(1) * max(4, source.element_size())


def _channels_last_impl(tensor: torch.Tensor) -> bool:
    """``batch_norm_choose_impl``: whether channels lie side by side, as those of rows do."""
    return tensor.stride(1) == 1 if tensor.is_contiguous() else is_channels_last(tensor)


def _parts_of_channels(kernel: Kernel, source: torch.Tensor, numbers: int) -> None:
    """``flexible_launch_configs``: several blocks of threads for each channel leave their parts in memory."""
    channels = source.size(1)
    rows = source.numel() // max(channels, 1)
    if not rows:
        return
    wide = min(1 << (channels.bit_length() - 1), 32)
    high = min(1 << (ceil(rows / 16).bit_length() - 1), 512 // wide)
    wide = min(1 << (channels.bit_length() - 1), 512 // high)
    blocks = min(ceil(rows / (high * 16)), 128)
    if blocks >= _LEAST_BLOCKS_OF_CHANNELS:
        parts = kernel.temp(numbers * blocks * _channel_bytes(source))
        kernel.passing(ceil(channels / wide) * 4)
        kernel.free(parts)


def _dropout(kernel: Kernel) -> None:
    """cuda/Dropout.cu makes the mask first."""
    kernel.emit(1)
    kernel.emit(0)


def _copy(kernel: Kernel) -> None:
    """cuda/Copy.cu, ``copy_kernel_cuda``: only what is of one type and lies alike goes to or from the host as it is.

    The GPU converts where nobody waits for the copy, the host where somebody does; either side makes it dense.
    """
    kernel.emit()
    if kernel.crossing is None:
        return
    target, source = (kernel.result, kernel.args[0]) if kernel.func is _aten._to_copy.default else kernel.args[:2]
    same_type = source.dtype is target.dtype
    if same_type and _lie_alike(target, source):
        return
    converts = bool(kernel.arg("non_blocking")) and not same_type
    if kernel.crossing == TO_DEVICE:
        if converts or not target.is_contiguous():
            kernel.temp(target.numel() * (source if converts else target).element_size())
        return
    dense = source.expand(target.shape).is_contiguous()
    if converts:
        kernel.temp(source.numel() * target.element_size())
        dense = target.shape == source.shape and (dense or not is_dense(source))  # whose layout would be kept
    if not dense:
        kernel.temp(target.numel() * (target if converts else source).element_size())


def _lie_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors are dense, and their elements in one order."""
    if first.numel() == 1:
        return second.numel() == 1
    strides = [[s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (first, second)]
    return first.shape == second.shape and strides[0] == strides[1] and is_dense(first)


def _group_norm(kernel: Kernel) -> None:
    """cuda/group_norm_kernel.cu: a scale and a shift per sample and channel."""
    _statistics_in_float(kernel)
    kernel.temp(kernel.arg("N") * kernel.arg("C") * 4)
    kernel.temp(kernel.arg("N") * kernel.arg("C") * 4)


def _group_norm_backward(kernel: Kernel) -> None:
    """cuda/group_norm_kernel.cu: ds and db per sample and channel, c2 and c3 per sample and group, then c1."""
    kernel.emit()
    for numbers in ("C", "C", "group", "group", "C"):
        kernel.temp(kernel.arg("N") * kernel.arg(numbers) * 4)


def _squared_error(kernel: Kernel) -> None:
    """Loss.cpp: the output is made at full size and then called a scalar: its storage stays as large."""
    if kernel.arg("reduction"):
        losses = max(kernel.args[:2], key=nbytes)
        kernel.emit(0, bytes=nbytes(losses))
        kernel.temp(nbytes(losses))
        cuda_reductions.take_workspaces(kernel, losses, range(losses.dim()), max(losses.element_size(), 4))


def _softmax_backward(kernel: Kernel) -> None:
    """cuda/SoftMax.cu: ``grad * output`` is made first (the logarithm's backward needs no such product)."""
    contiguous_after("grad_output", "output")(kernel)
    grad, output = kernel.arg("grad_output"), kernel.arg("output")
    kernel.temp(grad.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize)


def _safe_softmax(kernel: Kernel) -> None:
    """transformers/attention.cpp: the elements, and then the rows, that are minus infinity."""
    source = kernel.args[0]
    kernel.emit()
    kernel.free(kernel.contiguous(source))
    kernel.temp(source.numel())
    kernel.temp(source.numel() // max(source.size(kernel.arg("dim")), 1))
    kernel.temp(source.element_size())  # a zero, which takes the place of those rows


def _logsumexp(kernel: Kernel) -> None:
    """ReduceOps.cpp: maxima, then exp(self - maxima) as large as the input, summed into the result."""
    if kernel.args[0].dim() == 0:
        kernel.name()
    kernel.temp(nbytes(kernel.result))
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
    """transformers/cuda/attention.cu, cudnn/MHA.cpp: seed and offset come first, row sums only to train."""
    for index in (2, 3, 0):
        kernel.emit(index)
    kernel.emit(1, bytes=-1 if kernel.arg("compute_log_sumexp") else 0)


def _cudnn_attention_backward(kernel: Kernel) -> None:
    """cudnn-frontend's scaled_dot_product_flash_attention: the query's gradient and row sums in float32.

    cudnn/MHA.cpp copies a gradient first whose heads are not laid out number by number.
    """
    grad = kernel.arg("grad_out")
    if grad.stride(-1) != 1:
        kernel.temp(grad.numel() * grad.element_size())
    kernel.emit()
    batch, heads, rows, size = kernel.arg("query").shape
    kernel.temp(batch * heads * rows * (size + 1) * 4)


def _log_sigmoid(kernel: Kernel) -> None:
    """cuda/ActivationLogSigmoidKernel.cu: only the CPU keeps a buffer for the backward pass."""
    kernel.emit(0)
    kernel.emit(1, bytes=0)


def _nearest(source_name: str) -> Rule:
    def rule(kernel: Kernel) -> None:
        """cuda/UpSampleNearest2d.cu: four channels or more may come last, else source and result are dense."""
        source, result = kernel.arg(source_name), kernel.result
        kernel.emit()
        if (
            suggest_memory_format(source) is torch.channels_last
            and source.size(1) >= _LEAST_CHANNELS
            and has_channels_last(result)
        ):
            kernel.temp(copied_bytes(source))
        else:
            kernel.contiguous(result)
            kernel.contiguous(source)

    return rule


def _roll(kernel: Kernel) -> None:
    """TensorTransformations.cpp: one dimension after the other; cuda/TensorTransformations.cu reads dense ones."""
    source = kernel.arg("self")
    dense = kernel.contiguous(source)
    for number in range(len(kernel.arg("dims")) - 1):
        kernel.temp(nbytes(source))
        if not number:
            kernel.free(dense)
    kernel.emit()


def _chunk_cat(kernel: Kernel) -> None:
    """cuda/TensorShape.cu: of each tensor four numbers, where its bytes and its blocks begin, with their ends, and to
    which each block of threads belongs. Tensors that lie otherwise are padded first (TensorShape.cpp)."""
    tensors, chunks, dim = kernel.arg("tensors"), kernel.arg("num_chunks"), kernel.arg("dim")
    kernel.emit()
    if not all(tensor.is_contiguous() for tensor in tensors):
        kernel.name()
        return
    rows = [nbytes(tensor) // max(tensor.size(dim), 1) * ceil(tensor.size(dim) / chunks) for tensor in tensors]
    blocks = sum(ceil(bytes / _CHUNK_BLOCK_BYTES) for bytes in rows)
    kernel.temp(8 * (4 * len(tensors) + 2 * (len(tensors) + 1) + blocks))


def _multiply_groups(kernel: Kernel) -> None:
    """cuda/GroupMM.cu: one kernel of CUTLASS multiplies all groups in bfloat16 where the GPU is a Hopper. It reads
    what describes each group's matrices, and every multiprocessor writes down how to address them. (On Blackwell
    that takes more or less by the shapes.)"""
    kernel.emit()
    matrices, offsets = kernel.arg("self"), kernel.arg("offs")
    if matrices.dtype is not torch.bfloat16 or kernel.capability[0] not in (9, 10):
        return
    if kernel.capability[0] == 10:
        kernel.name()
    kernel.temp(_GROUP_BYTES * (matrices if offsets is None else offsets).size(0))
    kernel.temp(_GROUPS_OF_MULTIPROCESSOR_BYTES * cuda_reductions.multiprocessors_of(kernel.capability)[0])


# Nobody can be asked for libraries, copies to and from the host, or what values decide on. Reductions are followed to
# other sizes.
NOT_ASKED: dict[OpOverload, Rule] = {
    _aten.native_batch_norm.default: _batch_norm,
    _aten._batch_norm_with_update.default: _batch_norm,
    _aten.batch_norm_backward.default: _batch_norm_backward,
    _aten._native_batch_norm_legit.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten._to_copy.default: _copy,
    _aten.copy_.default: _copy,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
    **cuda_indexing.RULES,
    **cuda_convolution.RULES,
    **cuda_recurrent.RULES,
}
_FOLLOWED = cuda_products.RULES | cuda_reductions.RULES
_ASKED: dict[OpOverload, Rule] = {
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    _aten._chunk_cat.default: _chunk_cat,
    _aten._grouped_mm.default: _multiply_groups,
    _aten.native_layer_norm.default: _statistics_in_float,
    _aten.native_dropout.default: _dropout,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._softmax.default: contiguous_after("self"),
    _aten._log_softmax.default: contiguous_after("self"),
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._safe_softmax.default: _safe_softmax,
    _aten._log_softmax_backward_data.default: contiguous_after("grad_output", "output"),
    _aten.logsumexp.default: _logsumexp,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten.upsample_nearest2d.default: _nearest("self"),
    _aten.upsample_nearest2d_backward.default: _nearest("grad_output"),
    _aten.roll.default: _roll,
    _aten.nll_loss_forward.default: contiguous_after("self"),
    _aten.nll_loss_backward.default: contiguous_after("self"),
    _aten.mse_loss.default: _squared_error,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    **cuda_norms.RULES,
    **cuda_efficient_attention.RULES,
    **cuda_indexing.ASKED,
}


@cache
def _rule(func: OpOverload) -> Rule | None:
    if func in _ASKED:
        return asked_first(_ASKED[func])
    own = NOT_ASKED.get(func) or _FOLLOWED.get(func)
    return own or (None if takes_results_only(func) else any_kernel)


def rules(capability: tuple[int, int]) -> Callable[[OpOverload], Rule | None]:
    """The rules for one trace; libraries' workspaces are remembered from operation to operation."""
    workspaces: set[Hashable] = set()

    def rule_for(func: OpOverload) -> Rule | None:
        rule = _rule(func)
        if rule is None:
            return None

        def run(kernel: Kernel) -> None:
            kernel.capability, kernel.workspaces = capability, workspaces
            rule(kernel)

        return run

    return rule_for
