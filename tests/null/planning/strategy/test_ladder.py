"""Fewer predictions, the same choice: what is found by halving is what a climb over every rung finds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers

from brim.core import Hardware, Promise
from brim.core.hardware import DISK, RAM, VRAM
from brim.planning.inference.machine import emulated_hardware
from brim.planning.proof import fits
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.ladder import Orders, Subject, climb_down, ladder
from brim.planning.strategy.prediction import Prediction, TrainingStep
from brim.techniques.blocks import find_blocks
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.streaming.weight_streaming import Weights

GIB, BATCH = 1 << 30, 2


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=400, hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=640
    )
    return transformers.BertForMaskedLM(config)


def ids(count: int) -> dict[str, torch.Tensor]:
    made = torch.zeros(count, 96, dtype=torch.long)
    return {"input_ids": made, "labels": made.clone()}


def climbed(
    rungs: Sequence[Choice], peaks: Mapping[int, Prediction], budget_bytes: Mapping[str, int]
) -> tuple[int, bool]:
    """The plain search: every rung in turn."""
    for index in range(len(rungs)):
        if fits(peaks[index].peak_bytes, budget_bytes):
            return index, True
    return -1, False


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "emulated"),
    [
        pytest.param(llama, False, id="llama-cpu", marks=pytest.mark.slow),
        pytest.param(bert, True, id="bert-emulated"),
    ],
)
def test_halving_finds_what_a_climb_over_every_rung_finds(make: Any, emulated: bool, known_machine: Hardware) -> None:
    model = make().train()
    hardware = emulated_hardware(known_machine) if emulated else known_machine
    compute = VRAM if emulated else RAM
    training_step = TrainingStep(
        name="tiny", model=model, partition=find_blocks(model), weights=Weights(), inputs=ids, batch=BATCH,
        optimizer=lambda twin: torch.optim.AdamW(twin.parameters(), fused=True), hardware=hardware,
        device="emulated" if emulated else "cpu", budget_bytes={RAM: GIB},
    )  # fmt: skip
    subject = Subject(compute=compute, batch=BATCH, blocks=checkpointing.blocks(model), chunkable=make is llama)
    rungs = ladder(subject, Orders())
    peaks = {index: training_step.predict(choice) for index, choice in enumerate(rungs)}
    sizes = sorted({peak.peak_bytes[compute] for peak in peaks.values()})
    for size in [*sizes, *(low + (high - low) // 2 for low, high in itertools.pairwise(sizes)), 1]:
        for ram in (GIB, 4 << 20):
            budget = {compute: size} if compute == RAM else {VRAM: size, RAM: ram}
            asked: list[Choice] = []

            def predict(choice: Choice, asked: list[Choice] = asked) -> Prediction:
                asked.append(choice)
                if choice in rungs:
                    return peaks[rungs.index(choice)]
                return Prediction(peak_bytes={compute: GIB << 10, RAM: GIB << 10})  # of larger micro-batches

            rung, _, found = climb_down(rungs, predict, budget, compute=compute, batch=BATCH, order=Orders())
            wanted, there = climbed(rungs, peaks, budget)
            fitting = fits(found.peak_bytes, budget)
            assert (fitting, rung if fitting else -1) == (there, wanted)
            assert len([choice for choice in asked if choice in rungs]) <= 6 or compute == VRAM


def test_the_first_rung_is_asked_first_and_nothing_else_where_it_fits() -> None:
    rungs = ladder(Subject(compute=RAM, batch=1, blocks=["a", "b"]), Orders())
    asked: list[Choice] = []

    def predict(choice: Choice) -> Prediction:
        asked.append(choice)
        return Prediction(peak_bytes={RAM: 10, DISK: 0})

    rung, _, found = climb_down(rungs, predict, {RAM: 10}, compute=RAM, batch=1, order=Orders())
    assert (rung, found.peak_bytes[RAM], len(asked)) == (0, 10, 1)


def test_from_vram_everything_goes_to_ram_before_anything_goes_to_disk() -> None:
    rungs = ladder(Subject(compute=VRAM, batch=2, blocks=["a", "b"], single_pass=False), Orders())
    places = [(rung.states, rung.gradients, bool(rung.activations)) for rung in rungs]
    assert places[-1] == ("disk", "disk", True)
    assert places.index(("ram", "ram", True)) < places.index(("disk", "ram", True))


def test_what_is_left_last_is_to_make_room_for_states_while_they_are_updated() -> None:
    rungs = ladder(Subject(compute=RAM, batch=2, blocks=["a", "b"], single_pass=False), Orders())
    assert [rung.brief_buffer for rung in rungs] == [*([False] * (len(rungs) - 1)), True]
    plan = rungs[-1].plan(model="m", hardware="h", budget_bytes={}, promise=Promise(peak_bytes={}))
    assert Choice.of(plan) == rungs[-1]
    updated_in_backward = ladder(Subject(compute=RAM, batch=2, blocks=["a", "b"]), Orders())
    assert not any(rung.brief_buffer for rung in updated_in_backward)


def test_activations_in_place_are_a_rung_where_there_are_any() -> None:
    for there in (False, True):
        subject = Subject(compute=RAM, batch=1, blocks=["a"], in_place=there)
        assert any(rung.in_place for rung in ladder(subject, Orders())) == there


def test_gradients_that_have_to_stay_do_on_every_rung() -> None:
    subject = Subject(compute=VRAM, batch=2, blocks=["a"], single_pass=False, gradients_leave=False)
    rungs = ladder(subject, Orders())
    assert {rung.gradients for rung in rungs} == {"keep"}
    assert {rung.states for rung in rungs} == {"keep", "ram", "disk"}


def test_an_optimizer_that_cannot_be_stepped_in_parts_never_is() -> None:
    rungs = ladder(Subject(compute=VRAM, batch=2, blocks=["a"], states_leave=False), Orders())
    assert not any(rung.offloads_optimizer for rung in rungs)
    assert rungs[-1].activations
