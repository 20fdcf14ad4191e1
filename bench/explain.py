"""Time and memory of ``brim explain``, beside the tools that PyTorch's users have. Prints a table, writes JSON.

``python bench/explain.py [--events 100000 1000000 5000000] [--peer-python PYTHON] [--tiny] [--json FILE]``

Every contender reads the same synthetic files, in a process of its own:

* memory snapshots: brim (text, and the HTML report), and PyTorch's ``torch/cuda/_memory_viz.py``, whose
  ``trace_plot`` and ``segment_plot`` put the whole recording into a page for the browser to work out, and whose
  ``trace`` prints the events. Its ``profile_plot`` takes a live profiler and no file, so it is not here.
* profiler traces: brim, and Holistic Trace Analysis (HTA) if ``--peer-python`` is a Python that has it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import _synthetic_trace
import snapshot

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--tiny", action="store_true", help="2,000 events: shows that everything runs")
    parser.add_argument("--peer-python", help="a Python that can import hta")
    parser.add_argument("--only", help="contenders whose names contain this")
    parser.add_argument("--directory", type=Path, help="where the files go (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for events in [2_000] if options.tiny else options.events:
            for row in _rows(Path(folder), events, options.peer_python, options.only or ""):
                rows.append(row)
                print(_line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _rows(folder: Path, events: int, peer_python: str | None, only: str) -> Iterator[Row]:
    recording, trace = folder / f"run{events}.pickle", folder / f"trace{events}.json"
    out = folder / "out"
    for path, write in ((recording, snapshot.write), (trace, _synthetic_trace.write)):
        # In a process of its own, so that what writing takes is given back.
        maker = multiprocessing.get_context("spawn").Process(target=write, args=(path, events))
        maker.start()
        maker.join()
    python, viz = [sys.executable, "-c"], [sys.executable, "-m", "torch.cuda._memory_viz"]
    contenders: list[tuple[str, Path, list[str]]] = [
        ("brim explain", recording, [*python, _BRIM, "explain", str(recording), "--json"]),
        ("brim explain --html", recording, [*python, _BRIM, "explain", str(recording), "--html", str(out)]),
        ("_memory_viz trace_plot", recording, [*python, _VIZ, "trace_plot", str(recording), str(out)]),
        ("_memory_viz segment_plot", recording, [*python, _VIZ, "segment_plot", str(recording), str(out)]),
        ("_memory_viz trace", recording, [*viz, "trace", str(recording)]),
        ("brim explain", trace, [*python, _BRIM, "explain", str(trace), "--json"]),
        ("brim explain --html", trace, [*python, _BRIM, "explain", str(trace), "--html", str(out)]),
    ]
    if peer_python:
        contenders.append(("HTA", trace, [peer_python, "-c", _HTA, str(trace)]))
    for name, path, command in contenders:
        if only in name:
            yield _measure(name, path, events, command, out)
    recording.unlink()
    trace.unlink()


def _measure(name: str, path: Path, events: int, command: list[str], out: Path) -> Row:
    out.unlink(missing_ok=True)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=printed, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - start
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
        failed="" if child.returncode == 0 else (told or [f"exit status {child.returncode}"])[-1][:200],
    )


def _line(row: Row) -> str:
    numbers = (
        f"{row.wall_s:8.2f} s {row.peak_rss_bytes / 2**20:7,.0f} MiB {row.peak_rss_bytes / row.file_bytes:6.1f} x "
        f"the file, wrote {row.output_bytes / 2**20:8,.1f} MiB"
    )
    return f"{row.contender:26} {row.input:7} {row.events:>9,} events {row.failed or numbers}"


if __name__ == "__main__":
    main()
