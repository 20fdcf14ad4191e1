"""Recurrent layers as CUDA runs them: cuDNN takes all steps and layers as one operation.

Follows aten/src/ATen/native/RNN.cpp and cudnn/RNN.cpp. What cuDNN keeps for the backward pass (its reserve) has a
size that only the library tells; here it is what that pass cannot do without, every step's gates and states, and the
trace says that the rest is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes
from brim.predict.values import packed

_aten = torch.ops.aten
_MODES: dict[Any, int] = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}  # cudnnRNNMode_t
KINDS = tuple(_MODES)
# Values per step, layer and hidden unit: the activated gates, and the states that the next step reads.
_KEPT = {0: 2, 1: 2, 2: 4 + 2, 3: 3 + 1}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_DROPOUT_STATE_BYTES = 1 << 20
_NOT_KNOWN = "cuDNN's workspace, and what its reserve holds beside gates and states"


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
    if torch.is_autocast_enabled("cpu"):  # ``_cudnn_rnn_cast_reflatten`` casts the weights anew in every call
        dtype = torch.get_autocast_dtype("cpu")
        weights = [weight.to(dtype) for weight in weights]
        source, first, cell = source.to(dtype), first.to(dtype), None if cell is None else cell.to(dtype)
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


def backward(
    source: torch.Tensor, weights: list[torch.Tensor], *args: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """The shapes of ``_cudnn_rnn_backward``, which has no fake kernel; the weights' gradients are one buffer."""
    state, cell, output_mask = args[2], args[3], args[-1]
    flat = torch.zeros(sum(weight.numel() for weight in weights), dtype=weights[0].dtype) if output_mask[3] else None
    parts = [] if flat is None else flat.split([weight.numel() for weight in weights])
    return (
        torch.empty_like(source) if output_mask[0] else None,
        torch.empty_like(state) if output_mask[1] else None,
        torch.empty_like(cell) if output_mask[2] and cell is not None else None,
        [part.view(weight.shape) for part, weight in zip(parts, weights, strict=False)],
    )


def _forward(kernel: Kernel) -> None:
    """The state of dropout is made once and kept."""
    kernel.name(_NOT_KNOWN)
    if kernel.arg("dropout") and kernel.arg("train"):
        kernel.keep(_DROPOUT_STATE_BYTES, "cuDNN")
    dense = kernel.contiguous(kernel.arg("input"))
    for index in range(3):
        kernel.emit(index)
    workspace = kernel.temp(_bytes(kernel, _GATES))
    kernel.emit(3, bytes=_bytes(kernel, _KEPT) * kernel.arg("num_layers") if kernel.arg("train") else 0)
    kernel.free(workspace, dense)


def _backward(kernel: Kernel) -> None:
    """The gradient of the input is made in any case, then that of the weights; each has a workspace."""
    kernel.name(_NOT_KNOWN)
    for name, like in (("grad_output", "output"), ("grad_hy", "hx"), ("grad_cy", "cx")):
        if kernel.arg(name) is None and kernel.arg(like) is not None:
            kernel.temp(nbytes(kernel.arg(like)))
    dense = [kernel.contiguous(kernel.arg(name)) for name in ("input", "grad_output")]
    output_mask, output_number = kernel.arg("output_mask"), 0
    for want, like in zip(output_mask, ("input", "hx", "cx"), strict=False):
        if kernel.arg(like) is None:
            continue
        if want:
            kernel.emit(output_number)
            output_number += 1
        else:
            kernel.temp(nbytes(kernel.arg(like)))
    workspace_bytes = _bytes(kernel, _GATES)
    kernel.free(kernel.temp(workspace_bytes), *reversed(dense))
    if output_mask[3]:
        copy = kernel.contiguous(kernel.arg("input"))
        kernel.emit()
        kernel.free(kernel.temp(workspace_bytes), copy)


def _bytes(kernel: Kernel, numbers: Mapping[int, int]) -> int:
    """So many numbers for every step, sequence and hidden unit of a layer, packed or not."""
    source, steps = kernel.arg("input"), kernel.arg("batch_sizes")
    rows = len(steps) * steps[0] if steps else source.size(0) * source.size(1)
    units = kernel.arg("hidden_size") * (2 if kernel.arg("bidirectional") else 1)
    return int(rows * units * numbers[kernel.arg("mode")] * source.element_size())


def lstm_cell(
    source: torch.Tensor, state: Sequence[torch.Tensor], *weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.lstm_cell`` of a tensor on the device: one kernel behind two products."""
    hidden, cell = state
    first, second, _ = _cell(_aten._thnn_fused_lstm_cell, source, hidden, cell, *weights)
    return first, second


def gru_cell(source: torch.Tensor, state: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
    """``torch.gru_cell`` of a tensor on the device."""
    output: torch.Tensor = _cell(_aten._thnn_fused_gru_cell, source, state, state, *weights)[0]
    return output


def _cell(
    fused: Any, source: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor, *weights: torch.Tensor | None
) -> Any:
    input_weight, hidden_weight, *biases = weights
    assert input_weight is not None and hidden_weight is not None
    return fused(source.matmul(input_weight.t()), hidden.matmul(hidden_weight.t()), state, *biases)


def fake_lstm_cell(gates: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *biases: Any) -> Any:
    states = [torch.empty(cell.shape, dtype=cell.dtype) for _ in range(2)]
    return (*states, torch.empty(gates.shape, dtype=gates.dtype))


def fake_gru_cell(
    gates: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.empty(state.size(0), 5 * state.size(1), dtype=state.dtype)
    return torch.empty(state.shape, dtype=state.dtype), kept


def fake_gru_cell_backward(
    gradient: torch.Tensor, gates: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    rows, hidden = gradient.shape
    of_gates = [torch.empty(rows, 3 * hidden, dtype=gradient.dtype) for _ in range(2)]
    biases = [torch.empty(3 * hidden, dtype=gradient.dtype) if has_bias else None for _ in range(2)]
    return (*of_gates, torch.empty(gradient.shape, dtype=gradient.dtype), *biases)


def flatten(layer: torch.nn.RNNBase, on_device: Callable[[torch.Tensor], bool]) -> None:
    """``RNNBase.flatten_parameters``: weights on the device are moved into one buffer."""
    weights = [
        parameter
        for parameter in layer._flat_weights
        if isinstance(parameter, torch.nn.Parameter) and on_device(parameter)
    ]
    homes = {parameter.untyped_storage()._cdata for parameter in weights}
    if not weights or len(homes) < len(layer._flat_weights) or len({parameter.dtype for parameter in weights}) > 1:
        return
    with torch.no_grad():
        buffer = weights[0].new_zeros(sum(parameter.numel() for parameter in weights))
        parts = buffer.split([parameter.numel() for parameter in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part.view(weight.shape)


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten._cudnn_rnn.default: _forward,
    _aten._cudnn_rnn_backward.default: _backward,
}
