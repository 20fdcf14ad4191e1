"""A plan's file: read back as it was written, and refused wherever it was not made for what it is to be used for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.core import Decision, Hardware, Link, Plan, Promise, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import FormatError, UnsupportedError, UsageError
from brim.models.opening import open_model
from brim.models.training_model import open_training_model
from brim.planning import file as plan_file
from brim.planning.file import PlanFile, described, fingerprint
from brim.planning.request import Answer, Machine, Proposal, Request
from brim.units import GIB
from support.tiny_model import save_llama

GPU = Hardware(
    name="a GPU",
    compute=VRAM,
    tiers=(
        Tier(name=VRAM, capacity_bytes=8 * GIB, bytes_per_s=400e9),
        Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=40e9),
        Tier(name=DISK, capacity_bytes=512 * GIB),
    ),
    links=(Link(source=RAM, target=VRAM, bytes_per_s=25e9), Link(source=VRAM, target=RAM, bytes_per_s=25e9)),
    flops_per_s={"bfloat16": 40e12},
    source="a test",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64)


def answer(model: Path, **options: Any) -> Answer:
    request = Request(model=model, vram=6 * GIB, ram="48GiB", **options)
    plan = Plan(
        model="llama",
        hardware=GPU.name,
        task=request.task,
        budget_bytes={VRAM: 6 * GIB, RAM: 48 * GIB},
        decisions=(Decision(technique="weight_streaming", block="model.layers.0", choice="stream:ram", bytes=7),),
        promise=Promise(peak_bytes={VRAM: GIB, RAM: 2 * GIB, DISK: 3 * GIB}, step_s=0.25, limited_by="compute"),
        settings={"ring_slots": 2},
    )
    proposal = Proposal(plan=plan, step_s=0.25, limited_by="compute", techniques=(), command="brim generate")
    machine = Machine(hardware=GPU, budget_bytes=plan.budget_bytes)
    return Answer(request=request, machine=machine, proposals=(proposal,))


@pytest.fixture
def written(llama: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan_file.write(path, answer(llama))
    return path


def module(folder: Path, **options: Any) -> nn.Module:
    return open_model(folder, **options).module


def test_what_was_written_is_read_back(llama: Path, written: Path) -> None:
    made = answer(llama)
    found = plan_file.read(written)
    assert found.plan == made.proposals[0].plan
    assert found.hardware == GPU
    assert found.request == replace(made.request, model=str(llama))
    assert found.brim == brim.__version__
    assert found.parameters["model.layers.*.mlp.up_proj.weight float32[256, 64]"] == 3


def test_it_is_accepted_for_what_it_was_made_for(llama: Path, written: Path) -> None:
    plan_file.read(written).check(model=module(llama), hardware=GPU, task="generate")


def test_a_machine_that_has_more_is_accepted(llama: Path, written: Path) -> None:
    tiers = tuple(replace(tier, capacity_bytes=2 * tier.capacity_bytes) for tier in GPU.tiers)
    plan_file.read(written).check(model=module(llama), hardware=replace(GPU, tiers=tiers), task="generate")


def test_a_plan_of_another_version_is_refused(llama: Path, written: Path) -> None:
    file = replace(plan_file.read(written), brim="0.0.1")
    with pytest.raises(UsageError, match=r"made by brim 0\.0\.1, and this is"):
        file.check(model=module(llama), hardware=GPU, task="generate")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layers": 4}, r"model\.layers\.\*\.\S+: it was made for 3 x float32\[.*, and this model has 4 x"),
        (
            {"hidden": 128},
            r"model\.embed_tokens\.weight: it was made for 1 x float32\[300, 64\], .* 1 x float32\[300, 128\]",
        ),
    ],
)
def test_another_model_is_refused_by_what_differs(
    written: Path, tmp_path: Path, options: dict[str, int], told: str
) -> None:
    other = save_llama(tmp_path / "other", **{"hidden": 64, **options})
    with pytest.raises(UsageError, match=told):
        plan_file.read(written).check(model=module(other), hardware=GPU, task="generate")


def test_the_same_model_in_another_dtype_is_refused_where_it_runs_as_it_is_stored(llama: Path, written: Path) -> None:
    other = module(llama, dtype=torch.bfloat16, convert=True)
    with pytest.raises(UsageError, match=r"1 x float32\[300, 64\], and this model has 1 x bfloat16\[300, 64\]"):
        plan_file.read(written).check(model=other, hardware=GPU, task="generate")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_plan_to_train_is_accepted_for_the_model_as_training_opens_it(
    llama: Path, tmp_path: Path, method: Any
) -> None:
    path = tmp_path / "plan.json"
    plan_file.write(path, answer(llama, task="train", method=method))
    training_model = open_training_model(llama, method=method, precision="bf16", seed=0)
    plan_file.read(path).check(model=training_model.module, hardware=GPU, task="train")


def changed(**tiers: int) -> Hardware:
    made = tuple(replace(tier, capacity_bytes=tiers.get(tier.name, tier.capacity_bytes)) for tier in GPU.tiers)
    return replace(GPU, tiers=made)


@pytest.mark.parametrize(
    ("hardware", "told"),
    [
        (replace(GPU, name="another GPU"), "made for a GPU, and this machine is another GPU"),
        (replace(GPU, compute=RAM), "computes in VRAM, and this machine in RAM"),
        (changed(vram=5 * GIB), "may take 6 GiB of VRAM, and this machine has 5 GiB"),
        (changed(ram=32 * GIB), "may take 48 GiB of RAM, and this machine has 32 GiB"),
        (changed(disk=2 * GIB), "may take 3 GiB of DISK, and this machine has 2 GiB"),
    ],
)
def test_another_machine_is_refused_by_what_differs(
    llama: Path, written: Path, hardware: Hardware, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        plan_file.read(written).check(model=module(llama), hardware=hardware, task="generate")


def test_all_that_differs_is_told_at_once(llama: Path, written: Path) -> None:
    with pytest.raises(UsageError) as raised:
        plan_file.read(written).check(model=module(llama), hardware=changed(vram=GIB, ram=GIB), task="train")
    text = str(raised.value)
    assert "the task generate, and this is train" in text
    assert "VRAM" in text and "RAM" in text
    assert "brim plan" in text


def edited(path: Path, change: Callable[[Any], Any]) -> Path:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(change(document)))
    return path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d | {"version": plan_file.VERSION + 1}, f"version {plan_file.VERSION + 1}"),
        (lambda d: d["plan"] | {"kind": "Plan", "version": 1}, "kind 'Plan'"),
        (lambda d: {key: value for key, value in d.items() if key != "parameters"}, "missing keys .'parameters'"),
        (lambda d: d | {"more": 1}, "unknown keys .'more'"),
        (lambda d: d | {"request": d["request"] | {"batch": "two"}}, "request.batch must be int"),
        (lambda d: d | {"request": d["request"] | {"method": "half"}}, "request.method must be one of"),
        (lambda d: d | {"request": d["request"] | {"vram": [1]}}, "request.vram must be"),
        (lambda d: d | {"plan": None}, "plan must be an object"),
        (lambda d: [d], "Found list"),
    ],
)
def test_what_is_no_plan_is_refused(written: Path, change: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(FormatError, match=told) as raised:
        plan_file.read(edited(written, change))
    assert str(written) in str(raised.value)


def decided(**changes: str) -> Callable[[Any], Any]:
    def change(document: Any) -> Any:
        document["plan"]["decisions"].append(
            {"technique": "precision", "block": "", "choice": "fp32", "bytes": 0} | changes
        )
        return document

    return change


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"technique": "magic"}, "a decision on 'magic'; known for the task generate are precision"),
        ({"technique": "checkpointing", "choice": "full"}, "a decision on 'checkpointing'"),
        ({"choice": "fp3"}, "choice of precision is 'fp3'; known are bf16, fp16"),
        ({"technique": "weight_streaming", "block": "lm_head", "choice": "nowhere"}, "weight_streaming is 'nowhere'"),
        ({"technique": "experts", "block": "model.layers.0.mlp", "choice": "stream:ram"}, "experts is 'stream:ram'"),
        ({"block": "model.layers.99"}, "precision for 'model.layers.99'; that has one choice for the model"),
    ],
)
def test_a_decision_that_nothing_would_follow_is_refused(written: Path, changes: dict[str, str], told: str) -> None:
    with pytest.raises(FormatError, match=told):
        plan_file.read(edited(written, decided(**changes)))


def test_a_precision_is_that_which_was_asked_for(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_file.write(path, answer(llama, precision="bf16"))
    plan_file.read(edited(path, decided(choice="bf16")))
    plan_file.write(path, answer(llama, precision="bf16"))
    with pytest.raises(FormatError, match="Its precision is int8, but it was made for bf16"):
        plan_file.read(edited(path, decided(choice="int8")))


def test_a_file_that_was_cut_off_is_refused(written: Path) -> None:
    text = written.read_text().rstrip()
    for length in range(0, len(text), 97):
        written.write_text(text[:length])
        with pytest.raises(FormatError):
            plan_file.read(written)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none\.json"):
        plan_file.read(tmp_path / "none.json")


def test_a_plan_that_there_is_not_is_not_written(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UsageError, match="The answer has 1"):
        plan_file.write(path, answer(llama), index=1)
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_told(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Name another file"):
        plan_file.write(tmp_path, answer(llama))


def test_a_model_of_the_catalog_is_described_without_its_weights() -> None:
    made = described("llama-2-7b")
    assert sum(parameter.numel() for parameter in made.parameters()) == 6738415616
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
    found = fingerprint(made, Request(model="llama-2-7b"))
    assert found["model.layers.*.self_attn.q_proj.weight float16[4096, 4096]"] == 32


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="diffusers"):
        described("sd-unet")


def test_the_file_says_all_that_a_plan_depends_on(written: Path) -> None:
    assert set(json.loads(written.read_text())) == {"kind", "version", *PlanFile.__dataclass_fields__}


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan["budget_bytes"].clear(),
        lambda plan: plan["budget_bytes"].update(ram=-1),
        lambda plan: plan["promise"].update(step_s=float("inf")),
        lambda plan: plan["decisions"].append(plan["decisions"][0]),
        lambda plan: plan["decisions"].append(
            {"technique": "weight_streaming", "block": "b", "choice": "?", "bytes": 0}
        ),
        lambda plan: plan["settings"].update(ring_slots=-1),
        lambda plan: plan["settings"].update(ring_slots=1 << 40),
        lambda plan: plan["settings"].update(batch=1 << 60),
    ],
)
def test_a_plan_that_cannot_be_is_refused(written: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(written.read_text())
    change(document["plan"])
    written.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="brim plan MODEL"):
        plan_file.read(written)
