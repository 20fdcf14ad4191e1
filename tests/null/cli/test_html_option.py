"""``--html`` of ``estimate``, ``generate`` and ``train``: a page with the figures of the command's own JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.cli import main
from support.report_page import data_of
from support.tiny_model import save_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64)


def both(arguments: list[str], path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[Any, Any]:
    """The command's JSON and its page's data."""
    assert main([*arguments, "--json", "--html", str(path)]) == code
    output = capsys.readouterr()
    assert str(path) in output.err
    return json.loads(output.out), data_of(path.read_text())


def rows(page: Any, title: str) -> list[list[Any]]:
    (table,) = (table for table in page["tables"] if table["title"].startswith(title))
    return table["rows"]


def test_estimates_peaks_are_those_of_the_json(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate", str(llama), "--batch", "2", "--seq", "32", "--gpu", "RTX 4090"]
    document, page = both(arguments, tmp_path / "report.html", capsys)
    (panel,) = page["views"][0]["panels"]
    peak = document["peak_bytes"]
    assert panel["peak"]["allocated_bytes"] == peak["allocated"]
    assert panel["reserved_peak_bytes"] == peak["reserved"]
    told = {name: size for name, size, _ in rows(page, "Peak")}
    assert (told["process"], told["safe upper bound"]) == (peak["process"], document["upper_bound_bytes"])


@pytest.mark.thorough
def test_what_does_not_fit_is_shown_until_it_fails_and_without_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "estimate",
        "llama-3-8b",
        "--task",
        "generate",
        "--seq",
        "32",
        "--new-tokens",
        "2",
        "--gpu",
        "RTX 3060",
    ]
    document, page = both(arguments, tmp_path / "report.html", capsys, code=3)
    assert document["fits"] is False
    assert rows(page, "It fits with") == [[s["options"], s["process_bytes"]] for s in document["fits_with"]] != []
    here, endless = (view["panels"][0] for view in page["views"])
    assert len(here["ooms"]) == 1 and endless["ooms"] == []
    assert here["peak"]["allocated_bytes"] < endless["peak"]["allocated_bytes"] == document["peak_bytes"]["allocated"]
    assert page["verdict"].startswith("Does not fit: it takes ")


def check_parts(page: Any) -> None:
    """Every figure of memory on the page is one of a table that adds up, the picture's peak among them."""
    panels = {panel["tier"].upper(): panel["peak"]["allocated_bytes"] for panel in page["views"][0]["panels"]}
    for tier, _, _, measured, pools, beside in rows(page, "Memory, promised and measured"):
        assert pools == panels.get(tier, 0)
        assert beside == max(measured - pools, 0)


def check_both_runs(document: Any, page: Any) -> None:
    """What was measured and what was foreseen are on one axis and told apart; their figures are the JSON's."""
    measured, predicted = page["views"]
    assert (measured["measured"], predicted["measured"], page["one_axis"]) == (True, False, True)
    assert "measured" in measured["title"]
    assert "predicted" in predicted["title"]
    assert {view["axis"] for view in page["views"]} == {"time"}
    told = {name: (all_s, busy_s, idle_s) for name, all_s, busy_s, idle_s in rows(page, "Compute, measured")}
    assert told == {name: (f["wall_s"], f["busy_s"], f["idle_s"]) for name, f in document["compute"].items()}
    assert told.keys() == {"measured", "predicted"}
    for name, view in zip(("measured", "predicted"), page["views"], strict=True):
        assert document["compute"][name]["busy_s"] > 0
        assert any(lane["kind"] == "compute" for lane in view["lanes"])
        assert view["panels"][0]["tier"] == "ram"


def test_generate_shows_its_plan_and_what_was_copied(
    llama: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(llama), "--prompt", "hi", "--max-new-tokens", "3", "--ram", "400MiB"]  # planned
    document, page = both(arguments, tmp_path / "report.html", capsys)
    panel = page["views"][0]["panels"][0]
    assert {line["name"]: line["bytes"] for line in panel["lines"]} == {
        "promised": document["promised_bytes"]["ram"],
        "budget": document["plan"]["budget_bytes"]["ram"],
    }
    (memory,) = (row for row in rows(page, "Memory, promised and measured") if row[0] == "RAM")
    assert memory[3] == document["measured_bytes"]["ram"]
    check_parts(page)
    assert len(rows(page, "Decisions")) == len(document["plan"]["decisions"])
    check_both_runs(document, page)
    held = page["views"][1]["panels"][0]["peak"]["allocated_bytes"]
    assert held == page["views"][0]["panels"][0]["peak"]["allocated_bytes"]


def test_train_shows_its_losses_and_peaks(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{number} little pieces of text, one after another. " for number in range(60)))
    arguments = ["train", str(llama), "--data", str(data), "--output", str(tmp_path / "out"), "--seq", "32"]
    more = ["--batch", "2", "--steps", "2", "--ram", "1GiB", "--device", "cpu"]
    document, page = both([*arguments, *more], tmp_path / "report.html", capsys)
    assert [loss for _, loss in rows(page, "Loss")] == document["losses"]
    told = {
        tier: (promised, measured) for tier, _, promised, measured, *_ in rows(page, "Memory, promised and measured")
    }
    assert told["RAM"] == (document["promised_bytes"]["ram"], document["measured_bytes"]["ram"])
    check_parts(page)
    check_both_runs(document, page)
    assert "activation" in page["views"][1]["panels"][0]["groups"]


@pytest.mark.parametrize("command", ["estimate", "generate", "train"])
def test_a_folder_that_does_not_exist_is_told_before_anything_is_done(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"generate": ["--prompt", "hi"], "train": ["--data", "x", "--output", "y"]}.get(command, [])
    page = tmp_path / "none" / "a.html"
    assert main([command, "no-such-model", *needed, "--html", str(page)]) == 2
    assert f"'{page.parent}' is not a folder" in capsys.readouterr().err
