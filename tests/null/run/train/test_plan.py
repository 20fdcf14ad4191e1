"""``train`` by a plan's file: exactly that plan, the same losses, and nothing beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brim.core.hardware import DISK, RAM
from brim.errors import BudgetError, UsageError
from brim.planning import file as plan_file
from brim.planning.request import Answer, machine_of
from brim.planning.request import Request as Question
from brim.planning.strategy.choice import Choice
from brim.planning.training import plan_training
from brim.run.train.loop import Request, Training, train
from support.tiny_model import save_llama

SEQ, BATCH, STEPS, MIB = 64, 4, 2, 1 << 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=512, layers=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{number} little pieces of text, one after another. " for number in range(90)))
    return path


@pytest.fixture(scope="module")
def planned(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for less than the plain step takes."""
    question = Question(model=llama, task="train", batch=BATCH, seq=SEQ, ram="4GiB", top=1)
    machine = machine_of(question)
    (plain,) = plan_training(question, machine)
    assert not Choice.of(plain.plan).offloads_optimizer
    tight = plain.plan.promise.peak_bytes[RAM] * 3 // 4
    question = replace(question, ram=tight)
    found = plan_training(question, machine_of(question))
    assert Choice.of(found[0].plan) != Choice.of(plain.plan)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan_file.write(path, Answer(request=question, machine=machine_of(question), proposals=found))
    return path


def run(model: Path, data: Path, output: Path, **options: Any) -> Training:
    return train(Request(model=model, data=data, output=output, steps=STEPS, lr=1e-3, **options))


@pytest.mark.thorough
def test_exactly_the_plan_is_run_and_kept_to(llama: Path, text: Path, planned: Path, tmp_path: Path) -> None:
    file = plan_file.read(planned)
    result = run(llama, text, tmp_path / "planned", plan=planned)
    assert Choice.of(result.plan) == replace(
        Choice.of(file.plan), streaming=Choice.of(result.plan).streaming
    )  # what is resident is told as well
    wanted = Choice.of(file.plan).streaming
    assert {name: Choice.of(result.plan).streaming[name] for name in wanted} == wanted
    assert dict(result.plan.budget_bytes) == dict(file.plan.budget_bytes)
    assert result.promised_bytes[RAM] <= file.plan.budget_bytes[RAM]
    assert result.promised_bytes[DISK] == file.plan.promise.peak_bytes[DISK]
    micro = Choice.of(file.plan).micro_batch
    plain = run(llama, text, tmp_path / "plain", batch=BATCH, seq=SEQ, micro_batch=micro, ram="4GiB")
    if not Choice.of(file.plan).chunk_tokens:
        assert result.losses == plain.losses
    assert result.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.thorough
def test_going_on_goes_on_with_the_plan(llama: Path, text: Path, planned: Path, tmp_path: Path) -> None:
    whole = run(llama, text, tmp_path / "whole", plan=planned)
    run(llama, text, tmp_path / "parts", plan=planned, save_every=1)
    rest = train(
        Request(
            model=llama, data=text, output=tmp_path / "parts", steps=STEPS + 1, lr=1e-3, batch=BATCH, seq=SEQ,
            resume=True, ram=plan_file.read(planned).plan.budget_bytes[RAM],
        )
    )  # fmt: skip
    assert len(rest.losses) == 1
    assert Choice.of(rest.plan) == Choice.of(whole.plan)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"micro_batch": 1}, "--micro-batch 1"),
        ({"batch": 2}, "--batch 2"),
        ({"precision": "bf16-mixed"}, "--precision"),
    ],
)
def test_what_the_plan_decided_cannot_be_ordered_otherwise(
    options: dict[str, Any], named: str, llama: Path, text: Path, planned: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=named):
        run(llama, text, tmp_path / "out", plan=planned, **options)


def test_a_plan_that_promises_less_than_it_takes_is_refused(
    llama: Path, text: Path, planned: Path, tmp_path: Path
) -> None:
    document = json.loads(planned.read_text())
    document["plan"]["promise"]["peak_bytes"]["ram"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="It promises 1 B of RAM; its decisions take"):
        run(llama, text, tmp_path / "run", plan=tmp_path / "plan.json")
    assert not (tmp_path / "run").exists()


def test_a_plan_for_another_model_is_refused(text: Path, planned: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other", hidden=128, layers=3)
    with pytest.raises(UsageError, match="it was made for 1 x"):
        run(other, text, tmp_path / "out", plan=planned)


def test_a_budget_below_the_plans_is_refused_with_bytes(
    llama: Path, text: Path, planned: Path, tmp_path: Path
) -> None:
    with pytest.raises(BudgetError) as refused:
        run(llama, text, tmp_path / "out", plan=planned, ram=30 * MIB)
    assert refused.value.smallest_bytes[RAM] > 30 * MIB
