"""Recurrent layers as CUDA runs them: cuDNN takes all steps and layers as one operation.

Follows aten/src/ATen/native/RNN.cpp and cudnn/RNN.cpp. What cuDNN keeps for the backward pass (its reserve) has a
size that only the library tells; here it is what that pass cannot do without, every step's gates and states, and the
trace says that the rest is not known. Weights count as they lie: flattening them into one buffer moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from brim.predict import packed
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_MODES: dict[Any, int] = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}  # cudnnRNNMode_t
KINDS = tuple(_MODES)
# Values per step, layer and hidden unit: the activated gates, and the states that the next step reads.
_KEPT = {0: 1, 1: 1, 2: 4 + 2, 3: 3 + 1}


def layer(kind: Any, source: torch.Tensor, *args: Any) -> Any:
    """``torch.lstm`` and its kin on a padded batch or on packed sequences."""
    if not torch.backends.cudnn.enabled:
        return kind(source, *args)
    sizes: list[int] = []
    if isinstance(args[2], bool):
        state, weights, _, layers, dropout, train, bidirectional, batch_first = args
    else:  # packed: how many sequences have each step comes first
        batch_sizes, state, weights, _, layers, dropout, train, bidirectional = args
        sizes, batch_first = packed.sizes_of(batch_sizes), False
    first, cell = state if kind is torch.lstm else (state, None)
    source, first, cell, weights = _autocast(source, first, cell, weights)
    per_layer = len(weights) // (layers * (2 if bidirectional else 1))
    projected = first.size(-1) if per_layer in (3, 5) else 0
    hidden = (cell if cell is not None else first).size(-1)
    # cuDNN has steps outermost: the layer's result is a view of that where the batch comes first.
    output, last, last_cell, _, _ = _aten._cudnn_rnn(
        source.transpose(0, 1) if batch_first else source, weights, per_layer, weights[0].detach(), first, cell,
        _MODES[kind], hidden, projected, layers, False, dropout, train, bidirectional, sizes, None,
    )  # fmt: skip
    output = output.transpose(0, 1) if batch_first else output
    return (output, last, last_cell) if kind is torch.lstm else (output, last)


def _autocast(
    source: torch.Tensor, state: torch.Tensor, cell: torch.Tensor | None, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """cudnn/RNN.cpp, ``_cudnn_rnn_cast_reflatten``: everything is cast, the weights anew in every call."""
    if not torch.is_autocast_enabled("cpu"):
        return source, state, cell, list(weights)
    dtype = torch.get_autocast_dtype("cpu")
    cast = [weight.to(dtype) for weight in weights]
    return source.to(dtype), state.to(dtype), None if cell is None else cell.to(dtype), cast


def backward(
    source: torch.Tensor, weights: list[torch.Tensor], *args: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """The shapes of ``_cudnn_rnn_backward``, which has no fake kernel; the weights' gradients are one buffer."""
    state, cell, wanted = args[2], args[3], args[-1]
    flat = torch.zeros(sum(weight.numel() for weight in weights), dtype=weights[0].dtype) if wanted[3] else None
    parts = [] if flat is None else flat.split([weight.numel() for weight in weights])
    return (
        torch.empty_like(source) if wanted[0] else None,
        torch.empty_like(state) if wanted[1] else None,
        torch.empty_like(cell) if wanted[2] and cell is not None else None,
        [part.view(weight.shape) for part, weight in zip(parts, weights, strict=False)],
    )


def _forward(kernel: Kernel) -> None:
    _note(kernel)
    _contiguous(kernel, "input")
    for index in range(3):
        kernel.emit(index)
    kernel.emit(3, bytes=_reserve_bytes(kernel) if kernel.arg("train") else 0)


def _reserve_bytes(kernel: Kernel) -> int:
    source = kernel.arg("input")
    units = kernel.arg("hidden_size") * kernel.arg("num_layers") * (2 if kernel.arg("bidirectional") else 1)
    rows = source.size(0) if kernel.arg("batch_sizes") else source.size(0) * source.size(1)
    return int(rows * units * _KEPT[kernel.arg("mode")] * source.element_size())


def _backward(kernel: Kernel) -> None:
    _note(kernel)
    _contiguous(kernel, "input", "grad_output")
    for name, like in (("grad_output", "output"), ("grad_hy", "hx"), ("grad_cy", "cx")):
        if kernel.arg(name) is None and kernel.arg(like) is not None:
            kernel.temp(nbytes(kernel.arg(like)))
    kernel.emit()


def _contiguous(kernel: Kernel, *names: str) -> None:
    for name in names:
        tensor = kernel.arg(name)
        if tensor is not None and not tensor.is_contiguous():
            kernel.temp(nbytes(tensor))


def _note(kernel: Kernel) -> None:
    kernel.unknown = (
        f"{kernel.func.overloadpacket}: cuDNN's workspace, and what its reserve holds beside gates and states"
    )


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten._cudnn_rnn.default: _forward,
    _aten._cudnn_rnn_backward.default: _backward,
}
