"""Trace ordinary programs as they are, and compare what each takes with PyTorch's own CUDA build on a device.

    python bench/ordinary_programs.py                       # how many trace, and what was assumed
    python bench/ordinary_programs.py --python VENV/bin/python     # against PyTorch on the rehearsal device
    python bench/ordinary_programs.py --python VENV/bin/python --output measurements/ordinary_programs.json

Where a GPU is there, ``--real`` takes it in the place of the rehearsal device; ``--answers FILE`` keeps what it said
then, and compares with it elsewhere (``measurements/ordinary_programs_h200.jsonl``, whose first line names the GPU
and the versions; trace with the same ones). That device computes every number, for
which it needs a C++ compiler, or with ``--values whole`` whole numbers only, and those where sizes or branches depend
on values. Programs whose GPU joins equal indices of sparse tensors are left out there. Workspaces of convolutions are
cuDNN's own: on that device nothing, in a trace a copy where an engine is known to transpose its operands. Those of
recurrent layers are known to neither; both take what the layers cannot do without.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from brim.device.environment import find
from brim.predict.lowering.cuda import convolution
from brim.rehearsal import force
from support.ordinary import programs
from support.ordinary.comparison import CARD, Row, answered, compared, traced
from support.ordinary.worker import STEPS


def told(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        name = f"{row.program.kind}.{row.program.name}"
        if row.allocated is None:
            yield f"{name:55} not traced: {row.said}"
        elif row.true_allocated is None:
            yield f"{name:55} {row.allocated:>13,} {row.reserved:>13,} {row.said}"
        else:
            off = [f"{row.off(what):+8.2%}" for what in ("allocated", "reserved")]
            yield f"{name:55} {row.allocated:>13,} {off[0]} {row.reserved:>13,} {off[1]} {row.said}"
    made = sum(row.allocated is not None for row in rows)
    yield f"{made} of {len(rows)} traced"
    for what in ("allocated", "reserved"):
        offs = sorted(abs(off) for row in rows if (off := row.off(what)) is not None)
        if len(offs) > 1:
            high = quantiles(offs, n=20, method="inclusive")[-1]
            yield f"{what}: {len(offs)} compared, median {median(offs):.2%}, p95 {high:.2%}, most {offs[-1]:.2%}"


def table(rows: list[Row]) -> dict[str, Any]:
    """The rows and their differences, for a file."""
    one = [
        {"program": f"{row.program.kind}.{row.program.name}", "allocated_bytes": row.allocated,
         "reserved_bytes": row.reserved, "device_allocated_bytes": row.true_allocated,
         "device_reserved_bytes": row.true_reserved, "said": row.said}
        for row in rows
    ]  # fmt: skip
    return {"card": CARD, "steps": STEPS, "summary": list(told(rows))[len(rows) :], "programs": one}


def answers_in(path: Path) -> dict[str, dict[str, Any]]:
    """What a GPU said of each program."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines if "allocated" in line}


def keep_answers(path: Path, rows: list[Row]) -> None:
    import torch

    lines: list[dict[str, Any]] = [
        {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": STEPS}
    ]
    lines += [
        {"name": row.program.name, "allocated": row.true_allocated, "reserved": row.true_reserved}
        for row in rows if row.true_allocated is not None
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs or kinds (default: all)")
    parser.add_argument("--python", type=Path, help="a Python that `brim rehearse` runs with; compares")
    parser.add_argument(
        "--values", choices=force.MODES, default="all", help="what the rehearsal device computes (default: all)"
    )
    parser.add_argument("--real", action="store_true", help="compare with the GPU of this machine")
    parser.add_argument("--answers", type=Path, help="JSON lines of what a GPU said: written with --real, else read")
    parser.add_argument("--output", type=Path, help="a JSON file for the table")
    options = parser.parse_args()
    chosen = [one for one in programs() if not options.names or {one.name, one.kind} & set(options.names)]
    said = answers_in(options.answers) if options.answers and not options.real else None
    if said is not None:
        chosen = [one for one in chosen if one.name in said]
    if options.python:
        convolution._MEASURED = None  # the device's cuDNN has one engine, without a workspace
    rows = [traced(one) for one in chosen]
    if said is not None:
        rows = [answered(row, said[row.program.name]) for row in rows]
    elif options.python or options.real:
        environment = None if options.real else find(options.python)
        if environment is None and not options.real:
            raise SystemExit("There is no CUDA build of PyTorch: see `brim rehearse --help`.")
        rows = compared(rows, environment, options.values)
        if options.real and options.answers:
            keep_answers(options.answers, rows)
    for line in told(rows):
        print(line)
    if options.output:
        text = json.dumps(table(rows), indent=1).replace(f"{Path(__file__).parents[1]}/", "")
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
