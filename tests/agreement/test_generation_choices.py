"""Whoever asks how to generate with a model within a budget is told the same: ``brim plan``, ``brim generate`` and
``brim.load`` choose the same way and promise the same bytes and seconds, which pages and JSON show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brim.cli import main
from brim.core import EventKind, Plan, Timeline
from brim.core.hardware import RAM, VRAM
from brim.estimation.step_memory import Inputs
from brim.models.opening import OpenedModel, open_model, open_tokenizer
from brim.models.weights import materialize
from brim.planning.generation import plan_generation
from brim.planning.inference.choose import GenerationRequest, GenerationStrategy, search_generation
from brim.planning.inference.predicted_timeline import foreseen
from brim.planning.opening import open_subject
from brim.planning.request import Machine, Request
from brim.planning.seconds.spans import WHOLE
from brim.run.generate.inputs import encode
from brim.run.generate.load import generation_case
from brim.run.generate.request import Request as Generating
from brim.run.generate.request import generate
from brim.run.plan.search import answer_to
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import COMPUTE_RAM
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.units import GIB, MIB
from support.generating import save, save_words_llama
from support.recorded_cases import CPU, GPU

SEQ, NEW = 24, 8
MACHINES = {"a GPU": GPU, "a processor": CPU}
MODELS = ("llama of 8 layers", "gpt2", "qwen3-moe", "t5")
# Of what the model takes where all of it is in the compute tier, beside the program itself.
SHARES = {"llama of 8 layers": (2.0, 0.8, 0.5), "gpt2": (2.0,), "qwen3-moe": (2.0,), "t5": (2.0,)}
CASES = [(model, where, share) for model in MODELS for where in MACHINES for share in SHARES[model]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = {"llama of 8 layers": save_words_llama(tmp_path_factory.mktemp("llama"), layers=8)}
    for name in ("gpt2", "qwen3-moe", "t5"):
        made[name] = save(tmp_path_factory.mktemp(name), name)
    return made


def opened(folder: Path) -> OpenedModel:
    made = open_model(folder)
    materialize(made.module, made)
    return made


def told(plan: Plan) -> tuple[Any, Mapping[str, int], float]:
    """What is chosen and promised."""
    decisions = [one for one in plan.decisions if one.technique != "precision"]
    return (decisions, dict(plan.settings)), dict(plan.promise.peak_bytes), plan.promise.step_s


def weights(strategy: GenerationStrategy) -> tuple[Mapping[str, str], float]:
    """Where blocks are, and for how many seconds."""
    return strategy.plan.choices(STREAMING), strategy.plan.promise.step_s


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "where", "share"), CASES)
def test_plan_generate_and_load_choose_the_same_and_promise_the_same(
    model: str, where: str, share: float, models: Mapping[str, Path]
) -> None:
    hardware, folder = MACHINES[where], models[model]
    asked = Request(model=folder, seq=SEQ, new_tokens=NEW, top=1)
    ample = Machine(hardware=hardware, budget_bytes={VRAM: 16 * GIB, RAM: 16 * GIB}, assumed=("all of it",))
    subject = open_subject(asked, ample)
    whole, beside = search_generation(subject.case).plan.promise.peak_bytes, subject.spent_bytes
    room = int((whole[hardware.compute] - beside[hardware.compute]) * share)
    budget = {VRAM: 16 * GIB, RAM: 16 * GIB, hardware.compute: beside[hardware.compute] + room}

    planned = search_generation(subject.on(replace(ample, budget_bytes=budget)).case)
    model_here = opened(folder)
    case = generation_case(model_here, hardware, budget, subject.case.request, lambda: beside)
    generated = search_generation(case)
    assert told(generated.plan) == told(planned.plan)
    assert generated.prompt_job == planned.prompt_job

    # Whoever calls a loaded model gives it a cache of its own, which takes other bytes: with as many more, the same.
    request = GenerationRequest.of(Inputs(prompt=SEQ, total=SEQ + NEW))
    more = generation_case(model_here, hardware, budget, request, lambda: beside, called=True)
    sizes = generated.sizes
    held = generated.need.step_bytes - more.watch(sizes).step_bytes
    budget = {**budget, hardware.compute: budget[hardware.compute] - held}
    loaded = search_generation(replace(more, budget_bytes=budget))
    assert loaded.plan.choices(STREAMING) == generated.plan.choices(STREAMING)
    expected = dict(generated.plan.promise.peak_bytes)
    expected[hardware.compute] -= held
    # Of blocks that the processor computes, temporaries count in RAM, and the cache there as one or the other.
    computed = [*loaded.plan.choices(STREAMING).values()].count(COMPUTE_RAM)
    if computed:
        expected[RAM] += loaded.need.cpu_step_bytes - generated.need.cpu_step_bytes
        expected[RAM] += computed * (loaded.need.cpu_bytes - generated.need.cpu_bytes)
    assert loaded.plan.promise.peak_bytes == expected


def steady_s(timeline: Timeline) -> float:
    """From the end of the last pass but one to that of the last."""
    ends = sorted(e.time_s + e.duration_s for e in timeline if e.kind is EventKind.COMPUTE and e.stream == WHOLE)
    return ends[-1] - ends[-2]


@pytest.mark.thorough
@pytest.mark.parametrize(("vram", "batch"), [(GIB, 1), (90 * MIB, 1), (60 * MIB, 1), (80 * MIB, 4)])
def test_the_picture_of_a_plan_shows_the_seconds_that_it_promises(
    vram: int, batch: int, models: Mapping[str, Path]
) -> None:
    asked = Request(model=models["llama of 8 layers"], seq=256, new_tokens=256, batch=batch, precision="fp32")
    on = Machine(hardware=GPU, budget_bytes={VRAM: 64 * MIB + vram, RAM: GIB}, assumed=("all of it",))
    for one in plan_generation(asked, on):
        assert one.timeline is not None
        assert steady_s(one.timeline) == pytest.approx(one.step_s, rel=1e-9)
        assert one.step_s == one.to_json()["step_s"] == one.plan.promise.step_s


@pytest.mark.thorough
def test_a_plan_with_older_tokens_in_ram_is_drawn_with_the_wait_for_them(models: Mapping[str, Path]) -> None:
    # Where the processor computes, no token rests.
    asked = Request(
        model=models["llama of 8 layers"], seq=1900, new_tokens=100, batch=16, precision="fp32", host_compute=False
    )
    on = Machine(hardware=GPU, budget_bytes={VRAM: 440 * MIB, RAM: 2 * GIB}, assumed=("all of it",))
    found = search_generation(open_subject(asked, on).case)
    assert found.plan.settings[kv_cache.RESTING_TOKENS] > 0
    assert COMPUTE_RAM not in found.plan.choices(STREAMING).values()
    drawn = foreseen(found, 12)
    assert steady_s(drawn) == pytest.approx(found.plan.promise.step_s, rel=1e-9)
    room = found.placement
    assert room is not None and room.resting > 0
    for tier, count in room.held_bytes(VRAM).items():
        assert [e.bytes for e in drawn if e.kind is EventKind.ALLOC and e.tier == tier and "KV" in e.label] == [count]


@pytest.mark.thorough
@pytest.mark.parametrize("vram", [440 * MIB, 560 * MIB, 700 * MIB])
def test_no_plan_lets_tokens_rest_in_ram_and_the_processor_compute(vram: int, models: Mapping[str, Path]) -> None:
    """Keys and values of what the processor computes are in the model's own cache, of which nothing rests."""
    asked = Request(model=models["llama of 8 layers"], seq=1900, new_tokens=100, batch=16, precision="fp32")
    on = Machine(hardware=GPU, budget_bytes={VRAM: vram, RAM: 2 * GIB}, assumed=("all of it",))
    found = search_generation(open_subject(asked, on).case)
    computes = COMPUTE_RAM in found.plan.choices(STREAMING).values()
    decided = [one.choice for one in found.plan.decisions if one.technique == kv_cache.NAME]
    assert not (computes and found.plan.settings.get(kv_cache.RESTING_TOKENS))
    assert (found.placement is None) == computes
    assert decided == ([] if computes else [kv_cache.OLDER_IN_RAM if found.resting else kv_cache.RESIDENT])


@pytest.mark.thorough
def test_what_was_planned_for_this_machine_is_what_a_run_on_it_promises_and_shows(
    models: Mapping[str, Path], cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prompt = models["llama of 8 layers"], "a few words"
    length = int(encode(open_tokenizer(open_model(folder)), prompt, None, None).shape[-1])
    answer = answer_to(Request(model=folder, ram=400 * MIB, seq=length, new_tokens=NEW, top=1))
    (best,) = answer.proposals
    run = generate(Generating(model=folder, prompt=prompt, ram=400 * MIB, device="cpu", max_new_tokens=NEW))
    decided, _, seconds = told(run.plan)
    assert (decided, seconds) == (told(best.plan)[0], best.step_s)
    assert steady_s(run.predicted) == pytest.approx(seconds, rel=1e-9)
    page = tmp_path / "page.html"
    words = [
        "generate",
        str(folder),
        "--prompt",
        prompt,
        "--ram",
        "400MiB",
        "--device",
        "cpu",
        "--max-new-tokens",
        str(NEW),
    ]
    assert main([*words, "--json", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["promise"]["step_s"] == seconds
    assert repr(seconds) in page.read_text()
