"""Each training technique by itself: what is predicted with it applied is what a run with it applied allocates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from brim.estimation.simulation import simulate
from brim.predict.tracer import trace
from brim.techniques import micro_batch, optimizers, precision
from brim.techniques.activation_offload import inplace as inplace_activations
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.loss import chunked as chunked_loss
from support.cpu.truth import measured_peak_bytes
from support.trained import ResNet

Apply = Callable[[nn.Module, dict[str, torch.Tensor]], Any]
Build = Callable[[], Callable[[], Any]]


def language_model(rows: int = 4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 4000, (rows, 64))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def vision_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    inputs = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.zeros(8, dtype=torch.long)}
    return ResNet().train(), inputs


def built(make: Callable[[], Any], apply: Apply) -> Build:
    def build() -> Callable[[], Any]:
        model, inputs = make()
        apply(model, inputs)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def in_precision(kind: str) -> Build:
    def build() -> Callable[[], Any]:
        model, inputs = language_model()
        optimizer = torch.optim.AdamW(model.parameters())
        handle = precision.apply(model, optimizer, kind)

        def step() -> None:
            with handle.forward():
                loss = model(**inputs).loss
            handle.backward(loss)
            handle.step(optimizer)
            optimizer.zero_grad()

        return step

    return build


def in_pieces() -> Callable[[], Any]:
    model, inputs = language_model()
    optimizer = optimizers.make("lion", model.parameters())

    def step() -> None:
        for piece in micro_batch.split(inputs, 2):
            (model(**piece.inputs).loss * piece.weight).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def checkpointed(kind: str, rows: int = 0) -> Apply:
    return lambda model, _: checkpointing.apply(model, dict.fromkeys(checkpointing.blocks(model), kind), rows=rows)


def many_rows() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return language_model(16)


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Its blocks return a bias for all rows together."""
    config = transformers.T5Config(
        vocab_size=4000, d_model=64, d_kv=16, d_ff=192, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 4000, (4, 64))
    return transformers.T5ForConditionalGeneration(config).train(), {"input_ids": ids, "labels": ids}


CASES: dict[str, Build] = {
    "plain": built(language_model, lambda *_: None),
    "checkpointing-full": built(language_model, checkpointed("full")),
    "checkpointing-selective": built(language_model, checkpointed("selective")),
    "checkpointing-every-other": built(
        language_model, lambda model, _: checkpointing.apply(model, checkpointing.every(model, 2))
    ),
    **{
        f"checkpointing-{kind}-in-pieces-of-{rows}": built(many_rows, checkpointed(kind, rows))
        for kind, rows in itertools.product(("full", "selective"), (1, 4))
    },
    "checkpointing-whole-blocks": built(t5, checkpointed("selective", 1)),
    "chunked-loss": built(language_model, lambda model, _: chunked_loss.apply(model, 64)),
    "vision-plain": built(vision_model, lambda *_: None),
    "vision-checkpointing-full": built(vision_model, checkpointed("full")),
    "vision-inplace": built(vision_model, inplace_activations.apply),
    **{kind: in_precision(kind) for kind in precision.PRECISIONS if kind not in ("tf32", "fp8")},
    "micro-batches": in_pieces,
}
SAVES = {
    "checkpointing-full": "plain", "checkpointing-selective": "plain", "chunked-loss": "plain",
    "micro-batches": "plain", "vision-checkpointing-full": "vision-plain", "bf16": "plain",
}  # fmt: skip


@pytest.fixture(scope="module")
def peaks() -> Callable[[str], tuple[int, int]]:
    """Predicted and measured peak bytes of a case."""
    found: dict[str, tuple[int, int]] = {}

    def of(name: str) -> tuple[int, int]:
        if name not in found:
            predicted = simulate(trace(CASES[name], steps=2, target="cpu")).peak_bytes.allocated
            found[name] = (predicted, measured_peak_bytes(CASES[name], steps=2))
        return found[name]

    return of


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_the_measured_one(peaks: Callable[[str], tuple[int, int]], name: str) -> None:
    predicted, measured = peaks(name)
    assert predicted == pytest.approx(measured, rel=0.005)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAVES)
def test_it_takes_less_than_without(peaks: Callable[[str], tuple[int, int]], name: str) -> None:
    assert peaks(name)[1] < peaks(SAVES[name])[1]
