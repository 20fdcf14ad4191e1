"""Fake kernels where PyTorch has none, or one that refuses what the real kernel takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from brim.predict.lowering.cuda import efficient_attention as cuda_efficient_attention
from brim.predict.lowering.cuda import norms as cuda_norms
from brim.predict.lowering.cuda import recurrent as cuda_recurrent
from brim.predict.lowering.kernel import dense_or_channels_last
from brim.predict.values.known import known

_aten = torch.ops.aten
_ON_EVERY_DEVICE = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
_LARGEST = 2  # of a bag, as embedding_bag numbers how it is reduced


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shapes of aten/src/ATen/native/GroupedMMUtils.h: rows of the output are padded to 16 bytes."""
    dtype = out_dtype or first.dtype
    shape: tuple[int, ...]
    if first.dim() == 2 and second.dim() == 2:
        assert offs is not None
        shape = (offs.size(0), first.size(0), second.size(1))
    elif first.dim() == 2:
        shape = (first.size(0), second.size(-1))
    elif second.dim() == 2:
        shape = (first.size(1), second.size(1))
    else:
        shape = (first.size(0), first.size(1), second.size(-1))
    align = 16 // dtype.itemsize
    row = -(-shape[-1] // align) * align
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype)


def _layer_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """layer_norm.cpp and layer_norm_kernel.cu make contiguous gradients whatever the input's strides."""
    likes = (input, weight, bias)
    return tuple(
        torch.empty(like.shape, dtype=like.dtype) if is_needed and like is not None else None
        for like, is_needed in zip(likes, output_mask, strict=True)
    )


def _batch_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Normalization.cpp, cudnn/BatchNorm.cpp: results are dense or channels last; here they took over any strides."""
    output, mean, variance = _aten.native_batch_norm.default(input, *args, **kwargs)
    if not dense_or_channels_last(input):
        output = torch.empty(input.shape, dtype=output.dtype)
    return output, mean, variance


def _histc(source: torch.Tensor, bins: int = 100, *args: object, **kwargs: object) -> torch.Tensor:
    """CUDA counts integers too; the fake kernel speaks for the CPU, which does not."""
    return torch.empty(bins, dtype=source.dtype)


def _fused(*args: object, **kwargs: object) -> None:
    """A fused optimizer step writes over its arguments and allocates nothing."""


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
    *options: object, **named: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """LossCTC.cpp: the losses, and log alpha of (batch, time, 2 * longest target + 1). Lengths have to be known."""
    lengths = known(target_lengths)
    if lengths is None:
        raise DynamicOutputShapeException(_aten._ctc_loss.Tensor)
    with _disable_current_modes():
        longest = int(lengths.value.max())
    time, batch = log_probs.size(0), log_probs.size(1) if log_probs.dim() == 3 else 1
    alpha = torch.empty(batch, time, 2 * longest + 1, dtype=log_probs.dtype)
    return torch.empty(batch, dtype=log_probs.dtype), alpha


def _embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False,
    mode: int = 0, sparse: bool = False, per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """cuda/EmbeddingBag.cu: the bags, each row's bag, each bag's size, and where its largest numbers are."""
    bags = offsets.size(0) - int(include_last_offset)
    largest = (bags, weight.size(1)) if mode == _LARGEST else (0,)
    return (
        torch.empty(bags, weight.size(1), dtype=weight.dtype),
        torch.empty(indices.shape, dtype=indices.dtype),
        torch.empty(offsets.shape, dtype=indices.dtype),
        torch.empty(largest, dtype=indices.dtype),
    )


def _like_second(grad: torch.Tensor, source: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
    """The gradient of what comes after the result's."""
    return torch.empty(source.shape, dtype=source.dtype)


def _geqrf(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BatchLinearAlgebra.cpp: factors and reflections in one, by columns, and what each reflection is scaled by."""
    *batch, rows, columns = matrices.shape
    factors = torch.empty(*batch, columns, rows, dtype=matrices.dtype).mT
    return factors, torch.empty(*batch, min(rows, columns), dtype=matrices.dtype)


def _fake_quantized(tensor: torch.Tensor, *args: object, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded values, and where they were within the range."""
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _drawn(parameters: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
    """A number for each of a distribution's parameters."""
    return torch.empty_like(parameters)


def _is_padded_at_the_end(*args: object, **named: object) -> bool:
    """No: transformers' encoders then keep padding as it is, in the place of nested tensors."""
    return False


def _as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Resize.h, ``checkInBoundsForStorage``: fake storages are not checked."""
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    needed_bytes, storage_bytes = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if 0 not in size and needed_bytes > storage_bytes:
        raise RuntimeError(
            f"setStorage: sizes {[*size]}, strides {[*stride]}, storage offset {offset}, and itemsize "
            f"{tensor.element_size()} requiring a storage size of {needed_bytes} are out of bounds for storage of "
            f"size {storage_bytes}"
        )
    view: torch.Tensor = _aten.as_strided.default(tensor, size, stride, storage_offset)
    return view


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Waiting for a collective gives its result; the kernel for fake tensors makes another."""
    arrived: torch.Tensor = _aten.alias.default(tensor)
    return arrived


FAKES: dict[OpOverload, Callable[..., Any]] = {
    _aten._cudnn_rnn_backward.default: cuda_recurrent.backward,
    _aten._thnn_fused_lstm_cell.default: cuda_recurrent.fake_lstm_cell,
    _aten._thnn_fused_gru_cell.default: cuda_recurrent.fake_gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: cuda_recurrent.fake_gru_cell_backward,
    _aten._efficient_attention_backward.default: cuda_efficient_attention.fake_backward,
    _aten.as_strided.default: _as_strided,
    _aten._embedding_bag.default: _embedding_bag,
    _aten._embedding_bag_forward_only.default: _embedding_bag,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.default: _like_second,
    _aten._ctc_loss_backward.Tensor: _like_second,
    _aten.multi_margin_loss_backward.default: _like_second,
    _aten.multilabel_margin_loss_backward.default: _like_second,
    _aten.fractional_max_pool3d_backward.default: _like_second,
    _aten.geqrf.default: _geqrf,
    _aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantized,
    _aten._sample_dirichlet.default: _drawn,
    _aten._standard_gamma.default: _drawn,
    _aten.poisson.default: _drawn,
    _aten.binomial.default: _drawn,
    _aten._nested_tensor_from_mask_left_aligned.default: _is_padded_at_the_end,
    _aten._fused_sgd_.default: _fused,
    _aten._fused_sgd_.tensor_lr: _fused,
    _aten._fused_adagrad_.default: _fused,
    _aten._fused_adagrad_.tensor_lr: _fused,
    _aten._fused_rms_norm.default: cuda_norms.fake_forward,
    _aten._fused_rms_norm_backward.default: cuda_norms.fake_backward,
    _aten.histc.default: _histc,
    _aten._grouped_mm.default: _grouped_mm,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
if torch.distributed.is_available():
    FAKES[torch.ops._c10d_functional.wait_tensor.default] = _arrived


def _isin(
    elements: torch.Tensor, wanted: torch.Tensor, *, assume_unique: bool = False, invert: bool = False
) -> torch.Tensor:
    """TensorCompare.cpp: few are compared one by one (cuda/TensorCompare.cpp), many are sorted together."""
    result = elements.new_empty(elements.shape, dtype=torch.bool)
    if not elements.numel():
        return result
    if wanted.numel() < int(10 * elements.numel() ** 0.145):
        result.fill_(invert)
        each, others = elements.unsqueeze(-1), wanted.view((1,) * elements.dim() + (-1,))
        return result.copy_(each.ne(others).all(-1) if invert else each.eq(others).any(-1))
    if assume_unique:
        first, second = elements.ravel(), wanted.ravel()
    else:
        first, order = _aten._unique.default(elements, False, True)
        second = _aten._unique.default(wanted, False)[0]
    joined = torch.cat((first, second))  # kept to the end, as its parts are not
    del first, second
    values, places = joined.sort(stable=True, dim=0, descending=False)
    repeated = torch.empty_like(values, dtype=torch.bool)
    repeated[:-1].copy_(values[1:].ne(values[:-1]) if invert else values[1:].eq(values[:-1]))
    repeated[-1].fill_(invert)
    mask = torch.empty_like(repeated).index_copy_(0, places, repeated)
    return result.copy_(mask[: elements.numel()].view(elements.shape) if assume_unique else mask[order])


# CUDA kernels that are made of other operators, where the CPU has a kernel of its own.
COMPOSITES: dict[OpOverload, Callable[..., Any]] = {
    _aten.isin.Tensor_Tensor: _isin,
    # PixelShuffle.cpp: the result is dense whatever the layout of what it is made of.
    _aten.pixel_shuffle.default: partial(_aten.pixel_shuffle.default._op_dk, _ON_EVERY_DEVICE),
    _aten.pixel_unshuffle.default: partial(_aten.pixel_unshuffle.default._op_dk, _ON_EVERY_DEVICE),
}
