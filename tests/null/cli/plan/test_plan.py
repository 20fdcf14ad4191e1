"""``brim plan`` as it is typed: a ranked answer for a machine, which may be another one; or what is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from brim.catalog.gpus import gpu
from brim.cli import main
from brim.measure.capacity import ram_capacity_bytes
from brim.planning import file as plan_file
from brim.planning import nearest
from support.report_page import data_of
from support.tiny_model import save_llama

GENERATE = ("--gpu", "RTX 3060", "--seq", "16", "--new-tokens", "4")
TRAIN = ("--task", "train", "--gpu", "RTX 3060", "--seq", "16", "--batch", "2")
SHORT = ("--vram", "16MiB")  # less than a process with CUDA takes beside tensors


@dataclass(frozen=True, kw_only=True)
class Said:
    code: int
    out: str
    err: str


def said(*arguments: str) -> Said:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["plan", *arguments])
    return Said(code=code, out=out.getvalue(), err=err.getvalue())


def told(*arguments: str, code: int = 0) -> Any:
    found = said(*arguments, "--json")
    assert found.code == code, found.err
    return json.loads(found.out)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64, layers=2))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What one command said and wrote."""

    document: Any
    file: Path
    page: Any


@pytest.fixture(scope="module", params=[GENERATE, TRAIN], ids=["generate", "train"])
def planned(request: pytest.FixtureRequest, llama: str, tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("planned")
    file, page = folder / "best.json", folder / "plan.html"
    document = told(llama, *request.param, "--output", str(file), "--html", str(page))
    return Planned(document=document, file=file, page=data_of(page.read_text()))


def test_the_text_begins_with_the_verdict_and_what_was_asked_a_line_each(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    verdict, title = said(llama, *GENERATE).out.splitlines()[:2]
    assert re.fullmatch(r"Fits with .* of VRAM to spare, at .* per token \(.* tokens/s\)\.", verdict)
    assert title.startswith(f"{llama}: generate on ") and title.endswith(" of DISK") and len(title) > 80


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("asked", "precision"),
    [
        (GENERATE, "fp32, by dtype of its configuration (float32)"),
        ((*GENERATE, "--precision", "bf16"), "bf16, as asked for"),
        (TRAIN, "bf16-mixed, brim train's default on GPUs"),
        ((*TRAIN, "--prefer", "quality"), "fp32, by --prefer quality"),
    ],
)
def test_the_text_names_the_precision_and_where_it_is_from(
    llama: str, asked: tuple[str, ...], precision: str
) -> None:
    assert f"precision: {precision}" in said(llama, *asked).out.splitlines()


@pytest.mark.thorough
def test_a_composite_configuration_is_planned_in_the_precision_of_its_text(tmp_path: Path) -> None:
    text = {
        "model_type": "qwen3_vl_text", "dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 500, "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
        "vision_config": vision,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    nested = told(str(tmp_path), *GENERATE)
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    outer = told(str(tmp_path), *GENERATE)
    assert nested["plans"][0]["peak_bytes"] == outer["plans"][0]["peak_bytes"]
    assert (nested["precision"], nested["precision_origin"]) == (
        "bf16", "by text_config.dtype of its configuration (bfloat16)",
    )  # fmt: skip


@pytest.mark.thorough
def test_a_budget_in_percent_is_that_share_of_all_there_is(llama: str, cache: Path) -> None:
    card = told(llama, *GENERATE, "--vram", "50%")
    host = told(llama, "--seq", "16", "--new-tokens", "4", "--ram", "25%")
    assert card["budget_bytes"]["vram"] == gpu("RTX 3060").capacity_bytes // 2
    assert host["budget_bytes"]["ram"] == ram_capacity_bytes() // 4


def test_plans_are_ranked_proved_and_inside_the_budget(planned: Planned) -> None:
    found = planned.document
    assert 1 <= len(found["plans"]) <= 5 and found["infeasible"] is None
    seconds = [plan["step_s"] for plan in found["plans"]]
    assert seconds == sorted(seconds) and seconds[0] > 0
    for plan in found["plans"]:
        assert plan["proved"] is True
        assert plan["limited_by"] in ("compute", "link", "disk", "RAM")
        assert plan["tokens_per_s"] > 0 and 0 <= plan["gap"] < 1
        assert plan["peak_bytes"]["ram"] > 0
        assert all(count <= found["budget_bytes"][tier] for tier, count in plan["peak_bytes"].items())
    assert found["plans"][0]["peak_bytes"]["vram"] > 0
    assert any("GB/s" in text for text in found["assumed"])


def test_every_plan_is_in_the_file_that_its_command_names(planned: Planned) -> None:
    found = planned.document
    for number, plan in enumerate(found["plans"], 1):
        file = planned.file if number == 1 else planned.file.with_name(f"best.{number}.json")
        read = plan_file.read(file)
        assert read.plan.to_json() == plan["plan"]
        assert read.request.gpu == "RTX 3060" and read.request.seq == 16
        words = shlex.split(plan["command"])
        assert words[:2] == ["brim", found["task"]]
        assert "--plan" not in words or words[words.index("--plan") + 1] == str(file)
    assert plan_file.read(planned.file).hardware.name == found["hardware"] == "NVIDIA GeForce RTX 3060"


def test_the_page_shows_the_plans_and_the_schedule_of_the_first(planned: Planned) -> None:
    best = planned.document["plans"][0]
    (table,) = (table for table in planned.page["tables"] if table["title"] == "Plans")
    assert len(table["rows"]) == len(planned.document["plans"])
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["step_s"] == best["step_s"]
    assert row["vram_bytes"] == best["peak_bytes"]["vram"]
    (view,) = planned.page["views"]
    assert "compute" in {lane["kind"] for lane in view["lanes"]} and view["measured"] is False
    (panel,) = (panel for panel in view["panels"] if panel["tier"] == "vram")
    assert {line["name"]: line["bytes"] for line in panel["lines"]}["promised"] == best["peak_bytes"]["vram"]
    assert panel["peak"]["allocated_bytes"] <= best["peak_bytes"]["vram"]


def test_the_table_has_a_row_and_a_command_for_each_plan(llama: str) -> None:
    found = said(llama, *TRAIN, "--top", "2")
    assert found.code == 0
    for word in ("VRAM", "s per step", "tokens/s", "limited by", "above", "assumed: ", "planned in "):
        assert word in found.out
    assert found.out.count(f"brim train {llama}") == 2


@pytest.mark.slow
def test_the_smallest_comes_first_where_memory_is_preferred(llama: str) -> None:
    fast = told(llama, *TRAIN, "--top", "1")["plans"]
    small = told(llama, *TRAIN, "--top", "3", "--prefer", "memory")["plans"]
    peaks = [plan["peak_bytes"]["vram"] for plan in small]
    assert peaks == sorted(peaks)
    assert peaks[0] < fast[0]["peak_bytes"]["vram"]
    assert small[0]["step_s"] >= fast[0]["step_s"]


@pytest.mark.thorough
def test_the_precisions_are_shown_for_each_kind_of_block(llama: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    page = tmp_path / "plan.html"
    found = told(llama, *GENERATE, "--top", "1", "--precisions", "--html", str(page))
    assert found["precisions"]
    for row in found["precisions"]:
        assert len(row["forms"]) == 2 and row["streamed"] in row["forms"] and row["resident"] in row["forms"]
        assert row["count"] >= 1 and min(form["bytes"] for form in row["forms"].values()) > 0
    (table,) = (t for t in data_of(page.read_text())["tables"] if t["title"] == "Which precision?")
    assert len(table["rows"]) == len(found["precisions"])
    assert " or int8?" in said(llama, *GENERATE, "--top", "1", "--precisions").out
    assert told(llama, *GENERATE, "--top", "1")["precisions"] == []


@pytest.fixture
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One other change is tried."""
    monkeypatch.setattr(nearest, "_OTHER_PLANS", 1)


@pytest.mark.thorough
def test_what_does_not_fit_is_code_3_with_changes_that_do(llama: str, few_changes: None) -> None:
    found = told(llama, *TRAIN, *SHORT, code=3)
    assert found["plans"] == []
    assert found["infeasible"]["why"]
    assert found["infeasible"]["needs_bytes"]["vram"] > 64 << 20
    more = found["infeasible"]["nearest"][0]
    assert "more of VRAM" in more["change"]
    words = shlex.split(more["command"])
    assert words[:2] == ["brim", "plan"]
    assert told(*words[2:], "--top", "1")["plans"]


@pytest.mark.slow
def test_what_does_not_fit_is_told_in_words(llama: str, tmp_path: Path, few_changes: None) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    found = said(llama, *TRAIN, *SHORT, "--output", str(path), "--html", str(page))
    assert found.code == 3
    assert found.out.startswith("Nothing fits") and "\nIt fits with " in found.out
    assert not path.exists()
    assert data_of(page.read_text())["verdict"].startswith("Nothing fits")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["gpt2", "--gpu", "RTX 9999"], "Nearest"),
        (["gpt22"], "gpt2"),
        (["sd-unet"], "does not generate"),
        (["gpt2", "--precision", "int3"], "--precision int3"),
        (["gpt2", "--precision", "int4", "--lossless"], "--lossless"),
        (["gpt2", "--task", "train", "--precision", "int4"], "--precision int4"),
        (["gpt2", "--task", "train", "--optimizer", "adamx"], "--optimizer adamx"),
        (["gpt2", "--method", "lora"], "--task train"),
        (["gpt2", "--optimizer", "lion"], "--task train"),
        (["gpt2", "--task", "dream"], "dream"),
        (["gpt2", "--vram", "lots"], "8GiB"),
        (["gpt2", "--top", "0"], "--top"),
        (["gpt2", "--vram", "4000GiB"], "GPU"),
        (["gpt2", "--prefer", "beauty"], "beauty"),
        (["gpt2", "--task", "train", "--precisions"], "--precisions"),
        (["gpt2", "--output", "no-such-folder/plan.json"], "not a folder"),
        (["gpt2", "--html", "no-such-folder/plan.html"], "not a folder"),
    ],
)
def test_what_cannot_be_meant_is_code_2(
    arguments: list[str], hint: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert hint in output.err and output.out == ""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "asked",
    [
        ("--new-tokens", "4", "--seq", "16", "--ram", "1GiB"),
        ("--task", "train", "--seq", "16", "--batch", "2", "--ram", "1GiB", "--top", "2"),
        ("--task", "train", "--seq", "16", "--batch", "2", "--ram", "260MiB", "--top", "2"),
    ],
    ids=["generate", "train", "train in little"],
)
def test_every_command_that_is_printed_runs_as_it_is(llama: str, asked: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a few words to train on, again and again"}\n' * 4)
    printed = said(llama, *asked)
    document = told(llama, *asked, code=printed.code)
    proposals = document["plans"] or document["infeasible"]["nearest"]
    assert proposals
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for number, proposal in enumerate(proposals):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path, folder, ignore=lambda _, names: [name for name in names if name.isdigit()])
        assert proposal["command"] in printed.out
        done = subprocess.run(
            proposal["command"], shell=True, cwd=folder, capture_output=True, text=True,
            env={**os.environ, "PATH": path},
        )  # fmt: skip
        assert done.returncode == 0, (proposal["command"], done.stderr)


@pytest.mark.thorough
def test_a_command_with_a_plan_that_is_not_written_writes_it_first(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim.planning.training._orders", lambda choice, blocks: None)  # no options say all of it
    (first, *_) = told(llama, *TRAIN)["plans"]
    plans, trains = first["command"].split(" && ")
    assert trains.endswith(" --plan plan.json") and plans.endswith(" --output plan.json")
    monkeypatch.chdir(tmp_path)
    assert said(*shlex.split(plans)[2:]).code == 0
    assert plan_file.read(tmp_path / "plan.json").plan.to_json() == first["plan"]
    (written, *_) = told(llama, *TRAIN, "--output", str(tmp_path / "mine.json"))["plans"]
    assert " && " not in written["command"] and written["command"].endswith(" --plan " + str(tmp_path / "mine.json"))
