"""Time and memory of ``brim explain``, beside the tools that PyTorch's users have. Prints a table, writes JSON lines.

``python bench/explain.py --directory FOLDER --prepare`` writes the files (minutes for 5 million events; nothing is
measured), ``python bench/explain.py --directory FOLDER [--peer-python PYTHON]`` measures on an otherwise idle machine
for eight minutes at most, and goes on where it stopped when it is called again: rows that ``--json``
(``measurements/explain_cpu.jsonl``) has of these versions are kept.

Every contender reads the same synthetic files, in a process of its own:

* memory snapshots: brim (as JSON, and the HTML report), and PyTorch's ``torch/cuda/_memory_viz.py``, whose
  ``trace_plot`` and ``segment_plot`` put the whole recording into a page for the browser to work out, and whose
  ``trace`` prints the events. Its ``profile_plot`` takes a live profiler and no file, so it is not here.
* profiler traces: brim, and Holistic Trace Analysis (HTA) if ``--peer-python`` is a Python that has it.

Of the largest files only what makes a report is measured (``--all``: everything).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Process
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _harness import machine_facts
from brim.processes import python_command
from support import synthetic_snapshot, synthetic_trace

JSON = Path(__file__).resolve().parents[1] / "measurements" / "explain_cpu.jsonl"
LARGE_EVENTS = 2_000_000  # from here on only what makes a report
_REPORTS = ("brim explain --html", "_memory_viz trace_plot", "HTA")
_BRIM = "import sys; from brim.cli import main; sys.exit(main(sys.argv[1:]))"
_VIZ = (
    "import pickle, sys; from torch.cuda import _memory_viz as viz; "
    "data = pickle.load(open(sys.argv[2], 'rb')); made = getattr(viz, sys.argv[1])(data); "
    "open(sys.argv[3], 'w').write(made)"
)
_HTA = (
    "import sys; from hta.trace_analysis import TraceAnalysis; found = TraceAnalysis(trace_files={0: sys.argv[1]}, "
    "trace_dir=''); found.get_temporal_breakdown(visualize=False); "
    "found.get_idle_time_breakdown(ranks=[0], visualize=False)"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one file. ``output_bytes``: what it wrote. ``failed``: the last line of its error."""

    contender: str
    input: str
    events: int
    file_bytes: int
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    output_bytes: int
    failed: str = ""


def main() -> None:
    options = _options()
    sizes = [2_000] if options.tiny else options.events
    known = _read(options.json)
    facts = machine_facts(["brim", "torch", "numpy"])
    end_s = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.directory or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for events in sizes:
            _prepare(folder, events)
            for name, path, command in [] if options.prepare else _contenders(folder, events, options):
                if options.only not in name or any(_is_of(row, name, path, events, facts) for row in known):
                    continue
                if time.monotonic() > end_s:
                    print(f"not measured for want of time: {name}, {path.suffix}, {events:,} events; call again")
                    continue
                row = _measure(name, path, events, command, folder / "out", options.limit)
                known.append(asdict(row) | {"machine": facts})
                print(_line(row), flush=True)
                if options.json:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(known[-1]) + "\n")
    if not options.prepare:
        print("\nall rows:")
        for found in known:
            print(_line(Row(**{key: value for key, value in found.items() if key != "machine"})))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--tiny", action="store_true", help="2,000 events: shows that everything runs")
    parser.add_argument("--peer-python", help="a Python that can import hta")
    parser.add_argument("--only", default="", help="contenders whose names contain this")
    parser.add_argument("--all", action="store_true", help="of large files everything")
    parser.add_argument("--prepare", action="store_true", help="write the files and measure nothing")
    parser.add_argument("--directory", type=Path, help="where the files are kept (default: nowhere)")
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing is begun after that")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="of one contender on one file")
    parser.add_argument("--json", type=Path, default=JSON, help="a file of JSON lines to read and to add to")
    return parser.parse_args()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _is_of(row: dict[str, Any], name: str, path: Path, events: int, facts: dict[str, Any]) -> bool:
    same = (row["contender"], row["input"], row["events"]) == (name, path.suffix.removeprefix("."), events)
    return same and row["machine"]["packages"] == facts["packages"]


def _files(folder: Path, events: int) -> tuple[Path, Path]:
    return folder / f"run{events}.pickle", folder / f"trace{events}.json"


def _prepare(folder: Path, events: int) -> None:
    """Write what is not there yet, in a process of its own, so that what writing takes is given back."""
    for path, write in zip(_files(folder, events), (synthetic_snapshot.write, synthetic_trace.write), strict=True):
        if path.exists():
            continue
        unfinished = path.with_stem(f"{path.stem}_partial")
        process = Process(target=write, args=(unfinished, events))
        process.start()
        process.join()
        unfinished.replace(path)


def _contenders(folder: Path, events: int, options: argparse.Namespace) -> Iterator[tuple[str, Path, list[str]]]:
    recording, trace = _files(folder, events)
    out = folder / "out"
    viz = python_command("-m", "torch.cuda._memory_viz")
    contenders: list[tuple[str, Path, list[str]]] = [
        ("brim explain", recording, python_command("-c", _BRIM, "explain", str(recording), "--json")),
        (
            "brim explain --html",
            recording,
            python_command("-c", _BRIM, "explain", str(recording), "--html", str(out)),
        ),
        ("_memory_viz trace_plot", recording, python_command("-c", _VIZ, "trace_plot", str(recording), str(out))),
        ("_memory_viz segment_plot", recording, python_command("-c", _VIZ, "segment_plot", str(recording), str(out))),
        ("_memory_viz trace", recording, [*viz, "trace", str(recording)]),
        ("brim explain", trace, python_command("-c", _BRIM, "explain", str(trace), "--json")),
        ("brim explain --html", trace, python_command("-c", _BRIM, "explain", str(trace), "--html", str(out))),
    ]
    if options.peer_python:
        contenders.append(("HTA", trace, python_command("-c", _HTA, trace, interpreter=options.peer_python)))
    few = events >= LARGE_EVENTS and not options.all
    yield from (one for one in contenders if not few or one[0] in _REPORTS)


def _measure(name: str, path: Path, events: int, command: list[str], out: Path, limit_s: float) -> Row:
    out.unlink(missing_ok=True)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=printed, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"})
        alarm = threading.Timer(limit_s, child.kill)
        alarm.start()
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - start
        alarm.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        told = errors.read().decode("utf-8", "replace").strip().splitlines()
        written = out.stat().st_size if out.exists() else printed.seek(0, 2)
    return Row(
        contender=name,
        input=path.suffix.removeprefix("."),
        events=events,
        file_bytes=path.stat().st_size,
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss * 1024,
        output_bytes=written,
        failed=_failure(child.returncode, told, wall_s, limit_s),
    )


def _failure(code: int, told: list[str], wall_s: float, limit_s: float) -> str:
    if code == 0:
        return ""
    return f"took more than {limit_s:.0f} s" if wall_s >= limit_s else (told or [f"exit status {code}"])[-1][:200]


def _line(row: Row) -> str:
    numbers = (
        f"{row.wall_s:8.2f} s ({row.cpu_s:6.1f} s of a core) {row.peak_rss_bytes / 2**20:7,.0f} MiB "
        f"{row.peak_rss_bytes / row.file_bytes:6.1f} x the file, wrote {row.output_bytes / 2**20:8,.1f} MiB"
    )
    return f"{row.contender:26} {row.input:7} {row.events:>9,} events {row.failed or numbers}"


if __name__ == "__main__":
    main()
