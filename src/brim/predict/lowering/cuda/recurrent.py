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
    state, cell, output_mask = args[2], args[3], args[-1]
    flat = torch.zeros(sum(weight.numel() for weight in weights), dtype=weights[0].dtype) if output_mask[3] else None
    parts = [] if flat is None else flat.split([weight.numel() for weight in weights])
    return (
        torch.empty_like(source) if output_mask[0] else None,
        torch.empty_like(state) if output_mask[1] else None,
        torch.empty_like(cell) if output_mask[2] and cell is not None else None,
        [part.view(weight.shape) for part, weight in zip(parts, weights, strict=False)],
    )


class _Layers:
    """The rules of recurrent layers; the state of their dropout is made once and kept."""

    def __init__(self) -> None:
        self._dropout_states: set[bool] = set()  # on the device

    def forward(self, kernel: Kernel) -> None:
        _note(kernel)
        if kernel.arg("dropout") and kernel.arg("train") and kernel.on_device not in self._dropout_states:
            self._dropout_states.add(kernel.on_device)
            kernel.keep(_DROPOUT_STATE_BYTES, "cuDNN")
        dense = _contiguous(kernel, "input")
        for index in range(3):
            kernel.emit(index)
        workspace = kernel.temp(_bytes(kernel, _GATES))
        kernel.emit(3, bytes=_bytes(kernel, _KEPT) * kernel.arg("num_layers") if kernel.arg("train") else 0)
        for handle in (workspace, *dense):
            kernel.free(handle)

    @staticmethod
    def backward(kernel: Kernel) -> None:
        """The gradient of the input is made in any case, then that of the weights; each has a workspace."""
        _note(kernel)
        for name, like in (("grad_output", "output"), ("grad_hy", "hx"), ("grad_cy", "cx")):
            if kernel.arg(name) is None and kernel.arg(like) is not None:
                kernel.temp(nbytes(kernel.arg(like)))
        dense = _contiguous(kernel, "input", "grad_output")
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
        for handle in (kernel.temp(workspace_bytes), *reversed(dense)):
            kernel.free(handle)
        if output_mask[3]:
            dense = _contiguous(kernel, "input")
            kernel.emit()
            for handle in (kernel.temp(workspace_bytes), *dense):
                kernel.free(handle)


def _bytes(kernel: Kernel, numbers: Mapping[int, int]) -> int:
    """So many numbers for every step, sequence and hidden unit of a layer, packed or not."""
    source, steps = kernel.arg("input"), kernel.arg("batch_sizes")
    rows = len(steps) * steps[0] if steps else source.size(0) * source.size(1)
    units = kernel.arg("hidden_size") * (2 if kernel.arg("bidirectional") else 1)
    return int(rows * units * numbers[kernel.arg("mode")] * source.element_size())


def _contiguous(kernel: Kernel, *names: str) -> list[int]:
    tensors = [kernel.arg(name) for name in names]
    return [kernel.temp(nbytes(tensor)) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]


def _note(kernel: Kernel) -> None:
    kernel.unknown = (
        f"{kernel.func.overloadpacket}: cuDNN's workspace, and what its reserve holds beside gates and states"
    )


def lstm_cell(
    source: torch.Tensor, state: Sequence[torch.Tensor], input_weight: torch.Tensor, hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None = None, hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``torch.lstm_cell`` of a tensor on the device: one kernel behind two products."""
    first, cell = state
    outputs = _cell(_LstmCell, source, first, cell, input_weight, hidden_weight, input_bias, hidden_bias)
    return outputs[0], outputs[1]


def gru_cell(
    source: torch.Tensor, state: torch.Tensor, input_weight: torch.Tensor, hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None = None, hidden_bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``torch.gru_cell`` of a tensor on the device."""
    output: torch.Tensor = _cell(_GruCell, source, state, state, input_weight, hidden_weight, input_bias, hidden_bias)
    return output


def _cell(
    kind: Any, source: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor, *weights: torch.Tensor | None
) -> Any:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        source, hidden, state = (tensor.to(dtype) for tensor in (source, hidden, state))
        weights = tuple(None if weight is None else weight.to(dtype) for weight in weights)
    input_weight, hidden_weight, *biases = weights
    assert input_weight is not None
    assert hidden_weight is not None
    products = source.matmul(input_weight.t()), hidden.matmul(hidden_weight.t())
    inputs = (*products, state, *biases)
    if torch.is_grad_enabled() and any(input is not None and input.requires_grad for input in inputs):
        return kind.apply(*inputs)
    return kind.run(*inputs)[0]


def _below_autograd(function: Any, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return function(*args)


class _LstmCell(torch.autograd.Function):
    """The backward formula of ``_thnn_fused_lstm_cell`` in derivatives.yaml, which saves gates before and after."""

    @staticmethod
    def run(*inputs: Any) -> Any:
        *states, gates = _below_autograd(_aten._thnn_fused_lstm_cell, *inputs)
        return tuple(states), gates

    @staticmethod
    def forward(context: Any, *inputs: Any) -> Any:
        states, gates = _LstmCell.run(*inputs)
        context.save_for_backward(*inputs, states[1], gates)
        context.set_materialize_grads(False)
        return states

    @staticmethod
    def backward(context: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:
        cell, bias, new_cell, gates = (context.saved_tensors[place] for place in (2, 3, 5, 6))
        gradients = _aten._thnn_fused_lstm_cell_backward_impl(first, second, cell, new_cell, gates, bias is not None)
        gradient, of_cell, of_bias = gradients
        return gradient, gradient, of_cell, *((None, None) if bias is None else (of_bias, of_bias))


class _GruCell(torch.autograd.Function):
    """The backward formula of ``_thnn_fused_gru_cell`` in derivatives.yaml."""

    @staticmethod
    def run(*inputs: Any) -> Any:
        return _below_autograd(_aten._thnn_fused_gru_cell, *inputs)

    @staticmethod
    def forward(context: Any, *inputs: Any) -> Any:
        state, gates = _GruCell.run(*inputs)
        context.save_for_backward(*inputs, gates)
        return state

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        bias, gates = context.saved_tensors[3], context.saved_tensors[5]
        return tuple(_aten._thnn_fused_gru_cell_backward(gradient, gates, bias is not None))


def fake_lstm_cell(
    gates: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    return (
        *(torch.empty(cell.shape, dtype=cell.dtype) for _ in range(2)),
        torch.empty(gates.shape, dtype=gates.dtype),
    )


def fake_lstm_cell_backward(
    first: torch.Tensor | None, second: torch.Tensor | None, cell: torch.Tensor, new_cell: torch.Tensor,
    gates: torch.Tensor, has_bias: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    gradients = torch.empty(gates.shape, dtype=gates.dtype), torch.empty(cell.shape, dtype=cell.dtype)
    return (*gradients, torch.empty(gates.size(1), dtype=gates.dtype) if has_bias else None)


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


def _workspace_first(kernel: Kernel) -> None:
    """cuda/RNN.cu allocates the tensors saved for the backward pass, then the states."""
    kernel.emit(len(kernel.outputs) - 1)
    kernel.emit()


def rules() -> dict[torch._ops.OpOverload, Rule]:
    """The rules for one trace."""
    layers = _Layers()
    return {
        _aten._cudnn_rnn.default: layers.forward,
        _aten._cudnn_rnn_backward.default: layers.backward,
        _aten._thnn_fused_lstm_cell.default: _workspace_first,
        _aten._thnn_fused_gru_cell.default: _workspace_first,
    }


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
