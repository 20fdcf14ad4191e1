"""Recurrent layers on CUDA are cuDNN's: one operation, and a reserve for its backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from brim import trace
from brim.core import Category, Op, Trace

STEPS, BATCH, INPUTS, HIDDEN, LAYERS = 20, 8, 64, 128, 2
KEPT = {nn.LSTM: 6, nn.GRU: 4, nn.RNN: 2}  # gates and states of a step


def traced(kind: type[nn.RNNBase], *, train: bool = True, dtype: torch.dtype = torch.float32, **options) -> Trace:
    def build():
        layer = kind(INPUTS, HIDDEN, num_layers=LAYERS, **options).cuda().train(train)
        source = torch.randn(STEPS, BATCH, INPUTS, device="cuda", requires_grad=True)

        def step() -> None:
            with torch.set_grad_enabled(train), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                output = layer(source.transpose(0, 1) if options.get("batch_first") else source)[0]
            if train:
                output.sum().backward()

        return step

    return trace(build, steps=1)


def made_by(made: Trace, name: str) -> tuple[list[int], list[Op]]:
    """Sizes of what lives on after operations of that name, and the operations."""
    ops = [op for op in made.ops if op.name == f"aten.{name}.default"]
    starts = sorted(op.at for op in made.ops)
    ends = [next((at for at in starts if at > op.at), op.at + 100) for op in ops]
    sizes = [
        storage.bytes for storage in made.storages
        if storage.category is not Category.TEMPORARY
        and any(op.at < storage.born < end for op, end in zip(ops, ends, strict=True))
    ]  # fmt: skip
    return sizes, ops


@pytest.mark.parametrize("kind", KEPT)
def test_training_keeps_the_gates_of_every_step_in_a_reserve(kind):
    made = traced(kind)
    sizes, (forward,) = made_by(made, "_cudnn_rnn")
    assert STEPS * BATCH * HIDDEN * LAYERS * KEPT[kind] * 4 in sizes
    assert forward.flops == 2 * STEPS * BATCH * sum(
        weight.numel() for weight in kind(INPUTS, HIDDEN, num_layers=LAYERS).parameters() if weight.dim() == 2
    )
    (gradients, (backward,)) = made_by(made, "_cudnn_rnn_backward")
    assert backward.flops == 2 * forward.flops
    assert sum(weight.numel() for weight in kind(INPUTS, HIDDEN, num_layers=LAYERS).parameters()) * 4 in gradients


def test_inference_keeps_nothing_and_both_say_what_is_not_known():
    made = traced(nn.LSTM, train=False)
    sizes, _ = made_by(made, "_cudnn_rnn")
    assert max(sizes, default=0) < STEPS * BATCH * HIDDEN * LAYERS * 6 * 4
    for trained in (made, traced(nn.LSTM)):
        assert any(text.startswith("aten._cudnn_rnn: cuDNN's workspace") for text in trained.not_modelled)


def test_both_directions_projections_and_half_precision():
    sizes, _ = made_by(traced(nn.LSTM, bidirectional=True), "_cudnn_rnn")
    assert STEPS * BATCH * HIDDEN * LAYERS * 2 * 6 * 4 in sizes
    projected = traced(nn.LSTM, proj_size=32)
    assert any(op.name == "aten._cudnn_rnn_backward.default" for op in projected.ops)
    halved, _ = made_by(traced(nn.LSTM, dtype=torch.float16), "_cudnn_rnn")
    assert STEPS * BATCH * HIDDEN * LAYERS * 6 * 2 in halved


def test_a_batch_first_layer_copies_what_does_not_lie_step_by_step():
    plain, batch_first = traced(nn.GRU), traced(nn.GRU, batch_first=True)
    assert [op.name for op in batch_first.ops if "rnn" in op.name] == [
        op.name for op in plain.ops if "rnn" in op.name
    ]
    contiguous = trace(_batch_first, steps=1)
    copied = [s.bytes for s in contiguous.storages if s.category is Category.TEMPORARY]
    assert BATCH * STEPS * INPUTS * 4 in copied


def _batch_first():
    layer, source = nn.GRU(INPUTS, HIDDEN, batch_first=True).cuda(), torch.randn(BATCH, STEPS, INPUTS, device="cuda")
    return lambda: layer(source)[0]
