"""The planner's benchmark: its verdict from rows with known figures, and one cell of it as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.benches import BENCH, load

pytestmark = pytest.mark.slow  # every plan is a search and several traces

summarize = load("_planner_report").summarize


def row(label: str, kind: str, measured_s: float, held: int, **more: Any) -> dict[str, Any]:
    return {
        "cell": "deep-train",
        "task": "train",
        "label": label,
        "kind": kind,
        "budget_bytes": {"ram": 100},
        "predicted_s": measured_s,
        "measured_s": measured_s,
        "measured_bytes": {"ram": held},
        "problem": "",
        **more,
    }


def test_a_choice_is_compared_with_what_stayed_in_its_budget() -> None:
    rows = [
        row("plain", "simple", 1.0, held=150),  # faster, and too large
        row("mixed", "forced", 2.0, held=90),
        row("streamed", "simple", 4.0, held=50),
        row("chosen", "chosen", 2.2, held=95, predicted_s=2.0),
        row("elsewhere", "forced", 0.1, held=10, cell="wide-train"),
    ]
    found = summarize(rows)
    (line,) = found["rows"]
    assert (line["best"], line["compared"]) == ("mixed", 3)
    assert line["slower_than_best"] == pytest.approx(0.1)
    assert (line["simple"], line["slower_than_simple"]) == ("streamed", pytest.approx(-0.45))
    assert found["slower_than_simple"] == [] and found["over_budget"] == []
    assert found["error_max"] == pytest.approx(0.2 / 2.2) and found["error_median"] == 0.0


def test_what_went_wrong_is_told() -> None:
    rows = [
        row("streamed", "simple", 1.0, held=50),
        row("chosen", "chosen", 1.5, held=101),
        row("broken", "forced", 0.0, held=0, problem="exit 2: it failed"),
    ]
    found = summarize(rows)
    assert found["over_budget"] == ["deep-train chosen: ram"]
    assert found["slower_than_simple"] == ["deep-train"]
    assert found["problems"] == ["deep-train broken: exit 2: it failed"]
    assert found["points"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the counters come from /proc")
def test_a_cell_is_measured_and_not_again(tmp_path: Path) -> None:
    rows, summary = tmp_path / "rows.jsonl", tmp_path / "summary.json"
    command = [
        "--tiny",
        "--only",
        "tiny-generate",
        "--threads",
        "1",
        "--rounds",
        "1",
        "--directory",
        str(tmp_path / "models"),
    ]
    command += ["--output", str(rows), "--summary", str(summary)]
    told = [
        subprocess.run(
            [sys.executable, str(BENCH / "planner.py"), *command],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    assert [done.returncode for done in told] == [0, 0], told[0].stderr
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line["problem"] for line in lines] == [""] * len(lines)
    assert {line["kind"] for line in lines} == {"simple", "chosen"}
    for line in lines:
        assert line["measured_s"] > 0 and line["predicted_s"] > 0
        assert 1 << 20 < line["measured_bytes"]["ram"] <= line["budget_bytes"]["ram"]
    document = json.loads(summary.read_text())
    assert document["points"] == len(lines) and len(document["rows"]) == 1
    assert "tiny-generate" in told[1].stdout
