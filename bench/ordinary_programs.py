"""Trace ordinary programs as they are, and compare what each takes with PyTorch's own CUDA build on a device.

    python bench/ordinary_programs.py                       # how many trace, and what was assumed
    python bench/ordinary_programs.py --python VENV/bin/python     # against PyTorch on the rehearsal device

Where a GPU is there, ``--real`` takes it in the place of the rehearsal device. Programs whose sizes depend on values
that the device computes are traced and not compared: the rehearsal device computes none. Convolutions' and recurrent
layers' workspaces are cuDNN's own and on that device nothing; the trace counts none either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import _ordinary_worker
import brim
from brim.estimation.simulation import simulate
from brim.rehearsal.build import build
from brim.rehearsal.settings import DeviceSettings
from ordinary import Program, programs

CAPABILITY = (9, 0)
CARD = "H100"
_SITE = "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('torch').origin).parents[1])"


@dataclass(frozen=True, slots=True)
class Row:
    """One program: bytes said and measured, None where there are none, and why."""

    program: Program
    allocated: int | None = None
    reserved: int | None = None
    true_allocated: int | None = None
    true_reserved: int | None = None
    said: str = ""

    def off(self, what: str) -> float | None:
        """Relative difference of ``allocated`` or ``reserved``."""
        said, true = getattr(self, what), getattr(self, f"true_{what}")
        return None if said is None or not true else said / true - 1


def traced(one: Program) -> Row:
    """Allocated and reserved at the peak, as traced; why not, where it does not trace."""
    _ordinary_worker.seed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = brim.trace(one.build, steps=_ordinary_worker.STEPS, target="cuda", capability=CAPABILITY)
    except Exception as error:  # whatever keeps a program from being traced is the result
        return Row(one, said=f"{type(error).__name__}: {' '.join(str(error).split())}")
    peak = simulate(made).peak_bytes
    return Row(one, peak.allocated, peak.reserved, said="; ".join(f"{k}: {v}" for k, v in made.notes.items()))


def on_device(chosen: Iterable[Program], python: Path, real: bool, *options: str) -> Iterator[dict[str, Any]]:
    """What PyTorch says that each program took, by name; runs in processes of ``python``."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent / 'src'}", "OMP_NUM_THREADS": "1"}
    if not real:
        site = subprocess.run([python, "-c", _SITE], capture_output=True, text=True, check=True).stdout.strip()
        environment = DeviceSettings.of(CARD).environment(build(Path(site)), environment)
    names = ",".join(one.name for one in chosen)
    command = [str(python), str(here / "_ordinary_worker.py"), names, *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def compared(rows: list[Row], python: Path, real: bool) -> list[Row]:
    found = {row.program.name: row for row in rows}
    asked = [row.program for row in rows if row.allocated is not None and not row.program.asks]
    for answer in on_device(asked, python, real):
        row = found[answer["name"]]
        if "error" in answer:
            said = f"on the device: {answer['error'].strip().splitlines()[-1]}"
            found[answer["name"]] = Row(row.program, row.allocated, row.reserved, said=said)
            continue
        found[answer["name"]] = Row(
            row.program, row.allocated, row.reserved, answer["allocated"], answer["reserved"], row.said
        )
    return list(found.values())


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs or kinds (default: all)")
    parser.add_argument("--python", type=Path, help="of an environment with a CUDA build of PyTorch; compares")
    parser.add_argument("--real", action="store_true", help="compare with the GPU of this machine")
    options = parser.parse_args()
    chosen = [one for one in programs() if not options.names or {one.name, one.kind} & set(options.names)]
    rows = [traced(one) for one in chosen]
    if options.python or options.real:
        rows = compared(rows, options.python or Path(sys.executable), options.real)
    for line in told(rows):
        print(line)


if __name__ == "__main__":
    main()
