"""A plan in a file is followed to the letter: what was chosen and promised is what a run has and promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from brim.core import Plan
from brim.core.hardware import RAM, VRAM
from brim.errors import UsageError
from brim.planning import file as plan_file
from brim.planning.inference.choose import GenerationCase, follow, search_generation
from brim.planning.opening import open_subject
from brim.planning.request import Machine, Request
from brim.run.generate.request import Request as Generating
from brim.run.generate.request import generate
from brim.run.plan.search import answer_to
from brim.techniques.streaming.weight_streaming import FROM_RAM, RING_SLOTS
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.units import GIB, MIB
from support.generating import save_words_llama
from support.recorded_cases import GPU

BATCHES = {"all of it": (GIB, 1), "half": (40 * MIB, 1), "little": (20 * MIB, 1), "batch": (60 * MIB, 4)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words_llama(tmp_path_factory.mktemp("llama"), layers=6)


def case_of(saved: Path, vram: int, batch: int) -> GenerationCase:
    asked = Request(model=saved, seq=16, new_tokens=8, batch=batch, precision="fp32")
    on = Machine(hardware=GPU, budget_bytes={VRAM: 64 * MIB + vram, RAM: GIB}, assumed=("all of it",))
    return open_subject(asked, on).case


@pytest.mark.thorough
@pytest.mark.parametrize("name", BATCHES)
def test_what_follows_a_plan_chooses_and_promises_what_it_says(saved: Path, name: str) -> None:
    case = case_of(saved, *BATCHES[name])
    chosen = search_generation(case)
    followed = follow(case, chosen.plan)
    assert followed.plan == chosen.plan
    assert (followed.job, followed.prompt_job) == (chosen.job, chosen.prompt_job)
    assert (followed.sizes, followed.placement) == (chosen.sizes, chosen.placement)


def changed(plan: Plan, choices: Mapping[str, str]) -> Plan:
    decisions = [replace(one, choice=choices.get(one.block, one.choice)) for one in plan.decisions]
    return replace(plan, decisions=tuple(decisions), settings={**plan.settings, RING_SLOTS: 0})


def test_rows_that_are_looked_up_in_ram_need_no_ring(saved: Path) -> None:
    case = case_of(saved, GIB, 1)
    chosen = search_generation(case).plan
    table = changed(chosen, {"model.embed_tokens": FROM_RAM})
    assert follow(case, table).plan.choices(STREAMING)["model.embed_tokens"] == FROM_RAM
    streamed = {name: FROM_RAM for name in chosen.choices(STREAMING) if "mlp" in name or "layers.1" in name}
    assert streamed
    with pytest.raises(UsageError, match="no ring slots for them"):
        follow(case, changed(chosen, streamed))


@pytest.mark.thorough
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("tier", [VRAM, RAM])
def test_a_plan_that_promises_less_than_it_takes_is_not_followed(saved: Path, name: str, tier: str) -> None:
    case = case_of(saved, *BATCHES[name])
    plan = search_generation(case).plan
    if not plan.promise.peak_bytes.get(tier, 0):
        return
    little = replace(plan.promise, peak_bytes={**plan.promise.peak_bytes, tier: 1})
    with pytest.raises(UsageError, match=f"It promises 1 B of {tier.upper()}; its decisions take"):
        follow(case, replace(plan, promise=little))


@pytest.mark.thorough
@pytest.mark.parametrize("ram", ["8GiB", "60%"])
def test_a_plan_file_is_what_runs(saved: Path, ram: str, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "plan.json"
    answer = answer_to(Request(model=saved, ram=ram, seq=16, new_tokens=5, top=1))
    plan_file.write(file, answer)
    (best,) = answer.proposals
    assert plan_file.read(file).plan == best.plan
    run = generate(Generating(model=saved, prompt="a few words", plan=file, device="cpu", max_new_tokens=5))
    assert run.plan.decisions == best.plan.decisions
    assert run.plan.promise.step_s == best.step_s
    assert run.promised_bytes[RAM] <= best.plan.budget_bytes[RAM]
    free = generate(Generating(model=saved, prompt="a few words", ram=ram, device="cpu", max_new_tokens=5))
    assert run.token_ids == free.token_ids
