"""``brim plan`` as it is typed: a ranked answer for a machine, which may be another one; or what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.cli import main
from brim.run import plan_file
from brim.units import GIB
from machine import cache, probed_home
from report_page import data_of
from tiny_model import save_llama

__all__ = ["cache", "probed_home"]

GENERATE = ("--gpu", "RTX 3060", "--seq", "32", "--new-tokens", "8")
TRAIN = ("--task", "train", "--gpu", "RTX 3060", "--seq", "32", "--batch", "2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=256)


def told(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("options", [GENERATE, TRAIN])
def test_plans_are_ranked_proved_and_inside_the_budget(
    llama: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = told([str(llama), *options], capsys)
    assert 1 <= len(found["plans"]) <= 5 and found["infeasible"] is None
    seconds = [plan["step_s"] for plan in found["plans"]]
    assert seconds == sorted(seconds) and seconds[0] > 0
    for plan in found["plans"]:
        assert plan["proved"] is True
        assert plan["limited_by"] and plan["command"].startswith("brim ")
        assert plan["tokens_per_s"] > 0 and 0 <= plan["gap"] < 1
        assert plan["peak_bytes"]["vram"] > 0
        assert all(count <= found["budget_bytes"][tier] for tier, count in plan["peak_bytes"].items())
    assert any("GB/s" in text for text in found["assumed"])


@pytest.mark.parametrize("options", [GENERATE, TRAIN])
def test_the_best_plan_is_written_to_a_file(
    llama: Path, tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    found = told([str(llama), *options, "--output", str(path)], capsys)
    file = plan_file.read(path)
    assert file.plan.to_json() == found["plans"][0]["plan"]
    assert file.hardware.name == found["hardware"] == "NVIDIA GeForce RTX 3060"
    assert file.request.gpu == "RTX 3060" and file.request.seq == 32


def test_the_table_has_a_row_and_a_command_for_each_plan(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(llama), *TRAIN, "--top", "2"]) == 0
    text = capsys.readouterr().out
    for word in ("VRAM", "s per step", "tokens/s", "limited by", "gap", "assumed: ", "planned in "):
        assert word in text
    assert text.count(f"brim train {llama}") == 2


def test_a_page_shows_the_plans_and_the_schedule_of_the_first(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    found = told([str(llama), *TRAIN, "--html", str(path)], capsys)
    page = data_of(path.read_text())
    (table,) = (table for table in page["tables"] if table["title"] == "Plans")
    assert len(table["rows"]) == len(found["plans"])
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["step_s"] == found["plans"][0]["step_s"]
    assert row["vram_bytes"] == found["plans"][0]["peak_bytes"]["vram"]
    assert "compute" in {lane["kind"] for lane in page["views"][0]["lanes"]}
    assert page["views"][0]["measured"] is False


def test_the_smallest_comes_first_where_memory_is_preferred(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = told([str(llama), *TRAIN], capsys)["plans"]
    small = told([str(llama), *TRAIN, "--prefer", "memory"], capsys)["plans"]
    peaks = [plan["peak_bytes"]["vram"] for plan in small]
    assert peaks == sorted(peaks)
    assert peaks[0] < fast[0]["peak_bytes"]["vram"]


def test_less_memory_is_never_faster(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = told([str(llama), *TRAIN], capsys)["plans"]
    least = told([str(llama), *TRAIN, "--prefer", "memory"], capsys)["plans"][0]
    budget = f"{least['peak_bytes']['vram'] + (1 << 20)}"
    small = told([str(llama), *TRAIN, "--vram", budget], capsys)["plans"]
    assert small[0]["step_s"] >= large[0]["step_s"]
    assert small[0]["techniques"]


def test_what_does_not_fit_is_code_3_with_changes_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["gpt2-medium", "--task", "train", "--gpu", "RTX 3060", "--vram", "1GiB", "--ram", "1GiB"]
    found = told([*options, "--disk", "1GiB", "--seq", "64"], capsys, code=3)
    assert found["plans"] == []
    assert found["infeasible"]["why"]
    assert any(count > GIB for count in found["infeasible"]["needs_bytes"].values())
    changes = found["infeasible"]["nearest"]
    assert changes
    arguments = changes[0]["command"].split()
    assert arguments[:2] == ["brim", "plan"]
    assert any("gpt2" in change["change"] for change in changes)


def test_a_change_that_was_named_does_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["gpt2", "--task", "train", "--gpu", "RTX 3060", "--vram", "300MiB", "--ram", "300MiB", "--disk", "0"]
    found = told([*options, "--seq", "64"], capsys, code=3)
    changes = found["infeasible"]["nearest"]
    assert changes
    import shlex

    for change in changes[:2]:
        assert told([*shlex.split(change["command"])[2:], "--top", "1"], capsys)["plans"]


def test_what_does_not_fit_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["gpt2", "--task", "train", "--gpu", "RTX 3060", "--vram", "300MiB", "--ram", "300MiB", "--disk", "0"]
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert main(["plan", *options, "--seq", "64", "--output", str(path), "--html", str(page)]) == 3
    text = capsys.readouterr().out
    assert "Nothing fits." in text and "it fits with" in text
    assert not path.exists()
    assert data_of(page.read_text())["notes"][0].startswith("Nothing fits.")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["gpt2", "--gpu", "RTX 9999"], "Nearest"),
        (["gpt22"], "gpt2"),
        (["sd-unet"], "diffusers"),
        (["gpt2", "--precision", "int3"], "--precision int3"),
        (["gpt2", "--precision", "int4", "--lossless"], "--lossless"),
        (["gpt2", "--task", "train", "--precision", "int4"], "--precision int4"),
        (["gpt2", "--task", "train", "--optimizer", "adamx"], "--optimizer adamx"),
        (["gpt2", "--task", "dream"], "dream"),
        (["gpt2", "--vram", "lots"], "8GiB"),
        (["gpt2", "--top", "0"], "--top"),
        (["gpt2", "--vram", "4000GiB"], "GPU"),
        (["gpt2", "--prefer", "beauty"], "beauty"),
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
