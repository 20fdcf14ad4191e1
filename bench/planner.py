"""Is the chosen plan the fastest? A grid of plans, each one run and measured, against what the planner says of it.

    python bench/planner.py                      the table; about 15 minutes on two cores
    python bench/planner.py --tiny               the same with models of some MB, to see that it works
    python bench/planner.py --vram-cap 8GiB      on a CUDA GPU of which so much may be used
    python bench/planner.py --seconds            how long plans of large models take

Models with random weights, of different shapes, are written once into --directory. For each of them and for both
tasks there is a cell of the grid: plans made by hand (how much of the weights is resident, how deep the ring is, what
of the activations is kept, how large a micro-batch is, where the optimizer's states rest), among them the simple ones
that people use, and what the planner chooses in each of a few budgets. Every plan is written to a file and run by
`brim generate --plan` or `brim train --plan` in a fresh process, which says what it measured.

Per budget, the planner's choice is compared with the fastest plan of the grid that was measured to stay inside it,
and with the fastest simple one; these few are run --rounds times in all, in turn, and their medians count. Predicted
seconds are compared with measured ones over all plans. Rows are appended to --output cell by cell; what is there
already of this machine is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _harness as harness
import _planner_points as points
import _planner_report as report
import _planner_seconds as seconds
from brim.measure.user_cache import cache_folder
from brim.processes import python_command
from brim.units import format_seconds, parse_bytes

PACKAGES = ("brim", "torch", "transformers")
TIMEOUT_S = 300


def main() -> None:
    options = _options()
    facts = harness.machine_facts(PACKAGES) | {"code": _code()}
    if options.seconds:
        _seconds(options, facts)
        return
    rows = _known(options.output, facts)
    for cell in points.cells(tiny=options.tiny, vram_cap=options.vram_cap):
        done = any(row["cell"] == cell.name and row["tiny"] == options.tiny for row in rows)
        if done or (options.only and cell.name not in options.only):
            continue
        with _machine_of_its_own(options.directory):
            found = _cell(options, cell, facts)
        rows += found
        for row in found:
            _append(options.output, row)
    document = report.summarize([row for row in rows if row["tiny"] == options.tiny])
    report.show(document)
    if options.summary:
        options.summary.write_text(json.dumps(document, indent=1) + "\n")


def _cell(options: argparse.Namespace, cell: points.Cell, facts: dict[str, Any]) -> list[dict[str, Any]]:
    say(cell.name, "making plans")
    made = []
    plans = points.make(cell, options.directory)
    while (point := next(plans, None)) is not None:
        row = _measured(options, cell, point) | {"machine": facts, "tiny": options.tiny}
        told = row["problem"] or (
            f"{format_seconds(row['measured_s'])} measured, {format_seconds(row['predicted_s'])} predicted"
        )
        say(cell.name, f"{point.label}: {told}")
        made.append((point, row))
        _forget_rates()
    rows = [row for _, row in made]
    for _ in range(options.rounds - 1):
        for point, row in made:
            if row["label"] in report.rivals(rows):
                again = _measured(options, cell, point)
                if not again["problem"]:
                    row["rounds_s"].append(again["measured_s"])
    for row in rows:
        row["measured_s"] = statistics.median(row["rounds_s"] or [0.0])
    return rows


def _seconds(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    found = []
    for row in seconds.rows(options.threads):
        say(row["case"], f"{format_seconds(row['wall_s'])}, {format_seconds(row['processor_s'])} of processor")
        found.append(row)
        _append(options.output, row | {"benchmark": "planner seconds", "machine": facts})
    seconds.show(found)


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=cache, help="where checkpoints and scratch files go")
    parser.add_argument("--only", nargs="+", help="cells by name, as in deep-train")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--vram-cap", type=parse_bytes, help="compute on CUDA within so much; default: the CPU")
    parser.add_argument("--seconds", action="store_true", help="time plans of large models, and run none")
    parser.add_argument("--rounds", type=int, default=3, help="of the plans that choices are judged by")
    parser.add_argument("--tiny", action="store_true", help="models of some MB")
    parser.add_argument(
        "--output", type=Path, help="append one JSON line per plan here, and go on from what is there"
    )
    parser.add_argument("--summary", type=Path, help="write what the table says as JSON here")
    return parser.parse_args()


def _code() -> str:
    """The commit that is measured, marked where files differ from it; nothing outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def _known(output: Path | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of this very machine and this very code."""
    if output is None or not output.exists():
        return []
    rows = [json.loads(line) for line in output.read_text().splitlines() if line.strip()]
    return [row for row in rows if row["machine"] == facts and "cell" in row]


@contextlib.contextmanager
def _machine_of_its_own(directory: Path) -> Iterator[None]:
    """Within, the machine is new to brim, in this process and in those that it starts."""
    directory.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="rates-", dir=directory) as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def _forget_rates() -> None:
    """Forget the rates of the machine and of the model's drive, so that the next plan measures its own.

    Ratios and the seconds of blocks are kept.
    """
    for name in ("hardware", "file-rates"):
        for path in cache_folder().glob(f"{name}-*.json"):
            path.unlink()


def _append(output: Path | None, row: dict[str, Any]) -> None:
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as handle:
        handle.write(json.dumps(row) + "\n")


def _measured(options: argparse.Namespace, cell: points.Cell, point: points.Point) -> dict[str, Any]:
    """One plan in a fresh process, as its command line says what it took."""
    row = _promised(cell, point)
    options.directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="planner-", dir=options.directory))
    try:
        file = scratch / "plan.json"
        points.write(file, cell, point)
        folder = points.checkpoint(cell, options.directory)
        command = python_command("-m", "brim", *cell.arguments(folder, file, scratch), "--json")
        harness.drop_page_cache([folder])
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return row | {"problem": f"exit {done.returncode}: {' '.join(lines[-3:])[:300]}"}
        told = json.loads(done.stdout)
        took_s = told["step_s"] if cell.task == "train" else told["steady_s_per_token"]
        return row | {"measured_s": took_s, "rounds_s": [took_s], "measured_bytes": told["measured_bytes"]}
    except subprocess.TimeoutExpired:
        return row | {"problem": f"not finished after {TIMEOUT_S} s"}
    finally:
        shutil.rmtree(scratch)


def _promised(cell: points.Cell, point: points.Point) -> dict[str, Any]:
    """The row of a plan that was not run yet."""
    return {
        "cell": cell.name,
        "task": cell.task,
        "label": point.label,
        "kind": point.kind,
        "budget_bytes": point.budget_bytes,
        "predicted_s": point.plan.promise.step_s,
        "promised_bytes": dict(point.plan.promise.peak_bytes),
        "plan": point.plan.to_json(),
        "measured_s": 0.0,
        "rounds_s": [],
        "measured_bytes": {},
        "problem": "",
    }


def say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
