"""How long a step is said to take: all its micro-batches, of which only some are traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from brim.core import EventKind, Hardware, Link
from brim.core.hardware import DISK, RAM
from brim.planning.inference.machine import emulated_hardware
from brim.planning.seconds.spans import WHOLE
from brim.planning.strategy import prediction as training_prediction
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.prediction import Prediction, TrainingStep
from brim.techniques.activation_offload import inplace as inplace_activations
from brim.techniques.blocks import find_blocks
from brim.techniques.streaming.weight_streaming import Weights

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "states in ram, during backward": {"states": "ram", "in_backward": True},
    "gradients on disk": {"states": "disk", "gradients": "disk"},
}


def step_of(batch: int, hardware: Hardware) -> TrainingStep:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
        tie_word_embeddings=True,  # two gradients are added up before they are added to that of the passes before
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()

    def ids(count: int) -> dict[str, torch.Tensor]:
        made = torch.zeros(count, 16, dtype=torch.long)
        return {"input_ids": made, "labels": made.clone()}

    return TrainingStep(
        name="tiny", model=model, partition=find_blocks(model), weights=Weights(), inputs=ids, batch=batch,
        optimizer=lambda twin: torch.optim.AdamW(twin.parameters(), fused=True),
        hardware=emulated_hardware(hardware), device="emulated", budget_bytes={RAM: 1 << 30},
    )  # fmt: skip


def predicted(batch: int, choice: dict[str, Any], hardware: Hardware) -> Prediction:
    return step_of(batch, hardware).predict(Choice(micro_batch=1, **choice))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHOICES)
def test_every_micro_batch_takes_its_time_and_none_takes_memory_beside_the_others(
    name: str, known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    three, four, eight = (predicted(batch, CHOICES[name], known_machine) for batch in (3, 4, 8))
    assert three.peak_bytes == four.peak_bytes == eight.peak_bytes
    assert eight.step_s - four.step_s == pytest.approx(4 * (four.step_s - three.step_s))
    assert eight.bound_s == eight.step_s
    monkeypatch.setattr(training_prediction, "_TRACED_PASSES", 8)
    whole = predicted(8, CHOICES[name], known_machine)
    assert eight.step_s == pytest.approx(whole.step_s, rel=0.02)
    assert eight.limited_by == whole.limited_by
    for tier, count in whole.peak_bytes.items():
        assert eight.peak_bytes[tier] == pytest.approx(count, rel=0.01), tier  # the inputs of all are there


@pytest.mark.thorough
@pytest.mark.parametrize("disk_bytes_per_s", [1e6, 1e12], ids=["waits for the disk", "computes"])
def test_the_picture_of_a_step_takes_the_seconds_of_its_promise(
    disk_bytes_per_s: float, known_machine: Hardware
) -> None:
    link = Link(source=DISK, target=RAM, bytes_per_s=disk_bytes_per_s)
    training_step = step_of(2, replace(known_machine, links=(link, *known_machine.links[1:])))
    choice = Choice(micro_batch=1, **CHOICES["gradients on disk"])
    promised_s = training_step.predict(choice).step_s
    for whole_s in (promised_s, 2 * promised_s, 0.0):  # 0: nobody promised any
        drawn = training_step.foresee(choice, whole_s)
        ends = [e.time_s + e.duration_s for e in drawn if e.kind is EventKind.COMPUTE and e.stream == WHOLE]
        assert max(ends) == pytest.approx(whole_s or promised_s)
        copied = [e.time_s + e.duration_s for e in drawn if e.kind is EventKind.COPY]
        assert copied and max(copied) <= max(ends) * 1.001
    four = step_of(4, training_step.hardware)
    ends = [e.time_s + e.duration_s for e in four.foresee(choice, 3.0) if e.kind is EventKind.COMPUTE]
    assert 1.0 < max(ends) < 3.0  # two of four passes are drawn, and the update


@pytest.mark.thorough
def test_every_micro_batch_moves_its_gradients(known_machine: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(known_machine, links=(Link(source=DISK, target=RAM, bytes_per_s=1e6), *known_machine.links[1:]))
    eight = predicted(8, CHOICES["gradients on disk"], slow)
    monkeypatch.setattr(training_prediction, "_TRACED_PASSES", 8)
    whole = predicted(8, CHOICES["gradients on disk"], slow)
    assert eight.limited_by == whole.limited_by != "compute"
    assert eight.step_s == pytest.approx(whole.step_s, rel=0.02)


def test_activations_in_place_are_tried_out_once_for_all_predictions(
    known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
    training_step = TrainingStep(
        name="tiny", model=model, partition=find_blocks(model), weights=Weights(), batch=4,
        inputs=lambda count: (torch.zeros(count, 64),), optimizer=lambda twin: torch.optim.SGD(twin.parameters()),
        hardware=emulated_hardware(known_machine), device="emulated", budget_bytes={RAM: 1 << 30},
    )  # fmt: skip
    choice = Choice(micro_batch=4, in_place=True)
    first = training_step.predict(choice)
    assert list(training_step.in_place.values()) == [("0.1", "1.1", "2.1")]
    assert training_step.simulate(choice).trace != training_step.simulate(replace(choice, in_place=False)).trace

    def tried(*_: Any) -> None:
        raise AssertionError("it is known")

    monkeypatch.setattr(inplace_activations, "_inplace_bytes", tried)
    assert training_step.predict(choice) == first
    with pytest.raises(AssertionError, match="it is known"):  # other rows may be read in other ways
        training_step.predict(replace(choice, micro_batch=2))
