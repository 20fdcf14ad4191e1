"""What an LSTM layer takes on the CPU: oneDNN's workspace, its scratchpad and the weights in the order that it reads.

aten/src/ATen/native/mkldnn/RNN.cpp; oneDNN, src/cpu/rnn/rnn_utils.cpp (``get_good_ld``, ``set_workspace_sizes``).
Sizes were checked against the profiler's memory events of real layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_PAGE_BYTES = 4096
_TABLES_BYTES = {True: 568, False: 776}  # pointers of one layer and direction, by whether it trains


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One layer in one direction over (steps, batch, inputs); ``size``: bytes of an element."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    size: int

    @classmethod
    def of(cls, kernel: Kernel) -> _Layer:
        source = kernel.args[0]
        steps, batch, inputs = source.shape
        return cls(
            steps=steps, batch=batch, inputs=inputs, hidden=kernel.arg("hidden_size"), size=source.element_size()
        )

    def leading(self, row: int) -> int:
        """Elements from row to row: whole cache lines, and one more where rows would share the cache's sets."""
        line = 64 // self.size
        row = -(-row // line) * line
        return row + line if row % 256 == 0 else row

    def pages(self, rows: int, row: int) -> int:
        return -(-rows * self.batch * row * self.size // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def workspace_bytes(self) -> int:
        """What is kept for the backward pass.

        The gates and the projected states of every step; then, of this layer and the one below and from before the
        first step on, states with their two gradients, and the cell's with its gradient.
        """
        states = 2 * (self.steps + 1)
        widest = self.leading(max(self.inputs, self.hidden))
        return (
            self.pages(self.steps, self.leading(4 * self.hidden))
            + self.pages(self.steps, self.leading(self.hidden))
            + 3 * self.pages(states, widest)
            + 2 * self.pages(states, self.hidden)
        )

    def scratchpad_bytes(self, training: bool) -> int:
        """Every step's gates, and states of a step or two. The states of inference are known to a few pages."""
        row = self.leading(self.hidden)
        if training:
            gates = self.pages(self.steps, self.leading(4 * self.hidden))
            states = 2 * self.pages(1, row)
        else:
            gates = self.pages(self.steps, 4 * self.hidden)
            states = self.pages(4, row) + 2 * self.pages(2, row) + self.pages(1, row) + _PAGE_BYTES
        return gates + states + _PAGE_BYTES + _TABLES_BYTES[training]

    def by_gates_bytes(self, rows: int) -> int:
        """Weights of ``rows`` inputs as rows of gates."""
        return rows * self.leading(4 * self.hidden) * self.size

    def by_inputs_bytes(self, columns: int) -> int:
        """Weights of ``columns`` inputs as padded columns; none where they have that form already."""
        wide = self.leading(columns)
        return 4 * self.hidden * wide * self.size if wide != columns else 0


def _forward(kernel: Kernel) -> None:
    layer, training = _Layer.of(kernel), torch.is_grad_enabled()
    weights = (kernel.arg("weight0"), kernel.arg("weight1"))
    for index in range(3):  # the output and the last states
        kernel.emit(index)
    kernel.temp(4 * layer.hidden * layer.size)  # the biases' sum
    if training:
        kernel.emit(3, bytes=layer.workspace_bytes)
    else:
        kernel.drop(kernel.outputs[3] if len(kernel.outputs) > 3 else None)
    for weight in weights:
        kernel.temp(layer.by_gates_bytes(weight.size(1)) if training else nbytes(weight))
    kernel.temp(layer.scratchpad_bytes(training))


def _backward(kernel: Kernel) -> None:
    layer = _Layer.of(kernel)
    state = layer.batch * layer.hidden * layer.size
    gradient = kernel.arg("grad_output")
    if gradient is None or not gradient.is_contiguous():
        kernel.temp(layer.steps * state)
    for name in ("grad_hy", "grad_cy"):
        if kernel.arg(name) is None:
            kernel.temp(state)
    kernel.temp(4 * layer.hidden * layer.size)  # the biases' sum
    kernel.emit()
    for columns in (layer.inputs, layer.hidden):
        kernel.temp(layer.by_inputs_bytes(columns))
    for rows in (layer.inputs, layer.hidden):  # the weights' gradients
        kernel.temp(layer.by_gates_bytes(rows))
    kernel.temp(4 * layer.hidden * layer.size)
    kernel.temp(layer.scratchpad_bytes(training=True))


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.mkldnn_rnn_layer.default: _forward,
    _aten.mkldnn_rnn_layer_backward.default: _backward,
}
