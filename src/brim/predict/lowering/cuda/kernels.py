"""Temporaries of PyTorch's CUDA kernels and of the libraries below them.

Each rule names the file under aten/src/ATen that it follows. Convolutions have a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from math import ceil

import torch

from brim.core.trace import TO_DEVICE
from brim.predict.lowering.cuda import convolution as cuda_convolution
from brim.predict.lowering.cuda import efficient_attention as cuda_efficient_attention
from brim.predict.lowering.cuda import indexing as cuda_indexing
from brim.predict.lowering.cuda import norms as cuda_norms
from brim.predict.lowering.cuda import recurrent as cuda_recurrent
from brim.predict.lowering.cuda import reductions as cuda_reductions
from brim.predict.lowering.cuda import sorting as cuda_sorting
from brim.predict.lowering.cuda.build_answers import (
    TEMPORARIES,
    answered_rule,
    naming_temporaries,
    takes_results_only,
)
from brim.predict.lowering.kernel import (
    Kernel,
    Rule,
    contiguous_after,
    dense_or_channels_last,
    has_channels_last,
    is_channels_last,
    nbytes,
)

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_CHUNK_BLOCK_BYTES = 128 * 16  # that a block of threads copies
_MOST_TRAINED_BY_CUDNN, _MOST_EVALUATED_BY_CUDNN = 880_801, 65_535  # samples of a batch norm
_MOST_ELEMENTS_OF_CUDNN = (1 << 31) - 1
_MOST_INDEXED_BYTES = 1 << 31
_LEAST_BLOCKS_OF_CHANNELS = 8  # fewer are not worth it: one block of threads does the work
_ALWAYS = (_aten.dot.default, _aten.vdot.default)  # they ask for cuBLAS whatever there is to multiply
_GEMM = (
    _aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm_.default, _aten.addmm.out, _aten.bmm.default,
    _aten.bmm.out, _aten.baddbmm.default, _aten.baddbmm_.default, _aten.mv.default, _aten.addmv.default,
    _aten.addmv_.default, _aten.dot.default, _aten.vdot.default, _aten.addbmm.default,
    _aten._addmm_activation.default, _aten._scaled_mm.default,
    _aten.mm.dtype, _aten.mm.dtype_out, _aten.addmm.dtype, _aten.addmm.dtype_out, _aten.bmm.dtype,
    _aten.bmm.dtype_out, _aten.baddbmm.dtype, _aten.baddbmm.dtype_out,
)  # fmt: skip
# Products that cuBLASLt makes together with what is added to them.
_LT_ALWAYS = (_aten._addmm_activation.default, _aten._scaled_mm.default)
_LT_WITH_VECTOR = (_aten.addmm.default, _aten.addmm.out)
# Where PyTorch has this module, Triton, which its CUDA builds bring, multiplies batches of a column by a row.
_OUTER_PRODUCTS_BY_TRITON = bool(find_spec("torch._native") and find_spec("torch._native.ops.bmm_outer_product"))
# PyTorch up to 2.11 gives cuBLASLt a workspace of its own, of 1,024 KiB; later it shares cuBLAS's.
_LT_BYTES = 1 << 20 if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12) else 0


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuda/CublasHandlePool.cpp: ``:4096:2:16:8``, and 32 MiB on Hopper and Blackwell."""
    return 32 << 20 if capability[0] in (9, 10, 12) else 4096 * 1024 * 2 + 16 * 1024 * 8


class Workspaces:
    """cuBLAS keeps one workspace per handle and stream; the forward and the backward thread have a handle each."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._bytes = cublas_workspace_bytes(capability)
        self._taken: set[tuple[str, bool, bool, int]] = set()  # library, on the device, in backward, which stream

    def rule(self, kernel: Kernel) -> None:
        """Operands that cuBLAS cannot read as they lie are copied (Blas.cpp, ``prepare_matrix_for_cublas``)."""
        kernel.emit()
        operands = [tensor for tensor in kernel.args if isinstance(tensor, torch.Tensor)]
        if kernel.func not in _ALWAYS and not all(tensor.numel() for tensor in operands):  # nothing is computed
            return
        if _OUTER_PRODUCTS_BY_TRITON and kernel.func is _aten.bmm.default and _is_outer_product(*operands):
            return
        for tensor in operands:
            if not _readable(tensor):
                kernel.temp(nbytes(tensor))
        self.keep(kernel)
        if _LT_BYTES and _by_cublaslt(kernel):
            self._keep(kernel, "cuBLASLt", _LT_BYTES)

    def keep(self, kernel: Kernel) -> None:
        self._keep(kernel, "cuBLAS", self._bytes)

    def _keep(self, kernel: Kernel, library: str, bytes: int) -> None:
        place = (library, kernel.on_device, torch._C._current_graph_task_id() != -1, kernel.stream)
        if place not in self._taken:
            self._taken.add(place)
            kernel.keep(bytes, library)


def _is_outer_product(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.size(2) == 1 and not (first.is_complex() or second.is_complex())


def _by_cublaslt(kernel: Kernel) -> bool:
    """Blas.cpp, ``isInputCompliesAddmmCudaLt``: a dense vector is added once to more than a row or column."""
    if kernel.func in _LT_ALWAYS:
        return True
    if kernel.func not in _LT_WITH_VECTOR or kernel.arg("beta") != 1:
        return False
    added, matrix = kernel.arg("self"), kernel.arg("mat2")
    return bool(added.dim() == 1 and added.is_contiguous() and min(matrix.shape) > 1)


def _readable(tensor: torch.Tensor) -> bool:
    """Return True if cuBLAS reads the operand in place: one of the last two dimensions is dense, none is repeated."""
    if tensor.dim() < 2:
        return tensor.dim() == 0 or tensor.numel() <= 1 or tensor.stride(0) != 0
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return bool((column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)))


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
        if not _lies_as(gradient, source):
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


def _lies_as(gradient: torch.Tensor, source: torch.Tensor) -> bool:
    return has_channels_last(gradient) if is_channels_last(source) else gradient.is_contiguous()


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
        kernel.free(kernel.temp(ceil(channels / wide) * 4))
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
        kept = torch._prims_common.is_non_overlapping_and_dense_or_false(source)
        dense = target.shape == source.shape and (dense or not kept)  # the layout of what is dense is kept
    if not dense:
        kernel.temp(target.numel() * (target if converts else source).element_size())


def _lie_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors are dense, and their elements in one order."""
    if first.numel() == 1:
        return second.numel() == 1
    strides = [[s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (first, second)]
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(first)
    return first.shape == second.shape and strides[0] == strides[1] and dense


def _group_norm(kernel: Kernel) -> None:
    """cuda/group_norm_kernel.cu: a scale and a shift per sample and channel."""
    _statistics_in_float(kernel)
    for _ in range(2):
        kernel.temp(kernel.arg("N") * kernel.arg("C") * 4)


def _group_norm_backward(kernel: Kernel) -> None:
    """cuda/group_norm_kernel.cu: ds and db per sample and channel, c2 and c3 per sample and group, then c1."""
    kernel.emit()
    for numbers in ("C", "C", "group", "group", "C"):
        kernel.temp(kernel.arg("N") * kernel.arg(numbers) * 4)


def _structured_loss_of(capability: tuple[int, int]) -> Rule:
    def rule(kernel: Kernel) -> None:
        """Loss.cpp: the output is made at full size and then called a scalar: its storage stays as large."""
        if kernel.arg("reduction"):
            losses = max(kernel.args[:2], key=nbytes)
            kernel.emit(0, bytes=nbytes(losses))
            kernel.temp(nbytes(losses))
            part_bytes = max(losses.element_size(), 4)
            cuda_reductions.take_workspaces(kernel, losses, range(losses.dim()), part_bytes, capability)

    return rule


def _softmax_backward(kernel: Kernel) -> None:
    """cuda/SoftMax.cu: ``grad * output`` is made first (the logarithm's backward needs no such product)."""
    contiguous_after("grad_output", "output")(kernel)
    grad, output = kernel.arg("grad_output"), kernel.arg("output")
    kernel.temp(grad.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize)


def _safe_softmax(kernel: Kernel) -> None:
    """transformers/attention.cpp: which elements, and then rows, are minus infinity."""
    source = kernel.args[0]
    kernel.emit()
    kernel.free(kernel.contiguous(source))
    kernel.temp(source.numel())
    kernel.temp(source.numel() // max(source.size(kernel.arg("dim")), 1))
    kernel.temp(source.element_size())  # a zero, which takes the place of those rows


def _logsumexp(kernel: Kernel) -> None:
    """ReduceOps.cpp: maxima, then exp(self - maxima) as large as the input, summed into the result."""
    if kernel.args[0].dim() == 0:
        kernel.unknown = f"{kernel.func.overloadpacket}: {TEMPORARIES}"
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


def _roll(kernel: Kernel) -> None:
    """TensorTransformations.cpp: one dimension after the other; cuda/TensorTransformations.cu reads dense ones."""
    source = kernel.arg("self")
    temporaries = [] if source.is_contiguous() else [kernel.temp(nbytes(source))]
    for number in range(len(kernel.arg("dims")) - 1):
        rolled = kernel.temp(nbytes(source))
        if temporaries and not number:
            kernel.free(temporaries[0])
        temporaries.append(rolled)
    kernel.emit()


def _chunk_cat(kernel: Kernel) -> None:
    """cuda/TensorShape.cu: of each tensor four numbers, where its bytes and its blocks begin, with their ends, and to
    which each block of threads belongs. Tensors that lie otherwise are padded first (TensorShape.cpp)."""
    tensors, chunks, dim = kernel.arg("tensors"), kernel.arg("num_chunks"), kernel.arg("dim")
    if not all(tensor.is_contiguous() for tensor in tensors):
        for tensor in tensors:
            padded = ceil(tensor.size(dim) / chunks) * chunks
            if padded != tensor.size(dim) or not tensor.is_contiguous():
                kernel.temp(nbytes(tensor) // max(tensor.size(dim), 1) * padded)
        kernel.emit()
        return
    kernel.emit()
    rows = [nbytes(tensor) // max(tensor.size(dim), 1) * ceil(tensor.size(dim) / chunks) for tensor in tensors]
    blocks = sum(ceil(bytes / _CHUNK_BLOCK_BYTES) for bytes in rows)
    kernel.temp(8 * (4 * len(tensors) + 2 * (len(tensors) + 1) + blocks))


# The device cannot be asked where a copy's ends lie, or what cuDNN is given and asks for.
_BY_RULE: dict[torch._ops.OpOverload, Rule] = {
    _aten.native_batch_norm.default: _batch_norm,
    _aten._batch_norm_with_update.default: _batch_norm,
    _aten.batch_norm_backward.default: _batch_norm_backward,
    _aten._native_batch_norm_legit.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten._to_copy.default: _copy,
    _aten.copy_.default: _copy,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
}
_ASKED: dict[torch._ops.OpOverload, Rule] = {
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    _aten._chunk_cat.default: _chunk_cat,
    **cuda_sorting.RULES,
    _aten.native_layer_norm.default: _statistics_in_float,
    _aten.native_dropout.default: _dropout,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._softmax.default: contiguous_after("self"),
    _aten._log_softmax.default: contiguous_after("self"),
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: contiguous_after("grad_output", "output"),
    _aten._safe_softmax.default: _safe_softmax,
    _aten.logsumexp.default: _logsumexp,
    _aten.roll.default: _roll,
    _aten.nll_loss_forward.default: contiguous_after("self"),
    _aten.nll_loss_backward.default: contiguous_after("self"),
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}


def rules(capability: tuple[int, int]) -> Callable[[torch._ops.OpOverload], Rule | None]:
    """The rules for one trace; cuBLAS's workspaces are remembered from operation to operation.

    PyTorch's own answer goes first, except for libraries, which the device has no answers of, for copies to and from
    the host, for indices, which values decide on, and for reductions, whose workspace is followed to other sizes.
    """
    workspaces = Workspaces(capability)
    reduction = cuda_reductions.rule_of(capability)
    large_reduction = answered_rule(capability, workspaces.keep, naming_temporaries(reduction))
    multiprocessors = cuda_reductions.multiprocessors_of(capability)[0]
    asked = {
        **_ASKED,
        **cuda_norms.rules(capability),
        _aten.mse_loss.default: _structured_loss_of(capability),
        **cuda_efficient_attention.rules(capability),
        **cuda_indexing.embeddings(multiprocessors),
    }
    asked = {func: answered_rule(capability, workspaces.keep, rule) for func, rule in asked.items()}
    anything = answered_rule(capability, workspaces.keep)

    def reduce(kernel: Kernel) -> None:
        # TensorIterator cuts what 32 bits cannot index into parts, each with a workspace of its own.
        (large_reduction if nbytes(kernel.args[0]) >= _MOST_INDEXED_BYTES else reduction)(kernel)

    known = {
        **asked,
        **_BY_RULE,
        **cuda_indexing.rules(multiprocessors),
        **cuda_convolution.rules(capability, anything),
        **cuda_recurrent.rules(),
        **dict.fromkeys(cuda_reductions.OPERATIONS, reduce),
        **dict.fromkeys(_GEMM, workspaces.rule),
    }

    def rule_for(func: torch._ops.OpOverload) -> Rule | None:
        return known.get(func) or (None if takes_results_only(func) else anything)

    return rule_for
