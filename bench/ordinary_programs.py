"""Trace ordinary programs as they are, and compare what each takes with PyTorch's own CUDA build on a device.

    python bench/ordinary_programs.py                       # how many trace, and what was assumed
    python bench/ordinary_programs.py --python VENV/bin/python     # against PyTorch on the rehearsal device
    python bench/ordinary_programs.py --python VENV/bin/python --output measurements/ordinary_programs.json

Where a GPU is there, ``--real`` takes it in the place of the rehearsal device. That device computes every number, for
which it needs a C++ compiler, or with ``--values whole`` whole numbers only, and those where sizes or branches depend
on values. Programs whose GPU joins equal indices of sparse tensors are left out there. Workspaces of convolutions are
cuDNN's own: on that device nothing, in a trace a copy where an engine is known to transpose its operands. Those of
recurrent layers are known to neither; both take what the layers cannot do without.
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

import torch

import _ordinary_worker
import brim
from brim.estimation.simulation import simulate
from brim.rehearsal import force
from brim.rehearsal.environment import Environment, find
from brim.rehearsal.settings import DeviceSettings
from ordinary import Program, programs

CAPABILITY = (9, 0)
CARD = "H100"


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


def _forget_the_last() -> None:
    """On the device each program has a process of its own: process groups and accelerate's state end with it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def traced(one: Program) -> Row:
    """Allocated and reserved at the peak, as traced; why not, where it does not trace."""
    _forget_the_last()
    _ordinary_worker.seed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = brim.trace(one.build, steps=_ordinary_worker.STEPS, target="cuda", capability=CAPABILITY)
    except Exception as error:  # whatever keeps a program from being traced is the result
        return Row(one, said=f"{type(error).__name__}: {' '.join(str(error).split())}")
    peak = simulate(made).peak_bytes
    return Row(one, peak.allocated, peak.reserved, said="; ".join(f"{k}: {v}" for k, v in made.notes.items()))


def on_device(
    chosen: Iterable[Program], environment: Environment | None, *options: str, values: str = ""
) -> Iterator[dict[str, Any]]:
    """What PyTorch says that each program took, by name, on the rehearsal device; on this machine's GPU for None.

    ``values``: what that device computes (``force.MODES``).
    """
    here = Path(__file__).parent
    variables = {**os.environ, "PYTHONPATH": f"{here}:{here.parent / 'src'}", "OMP_NUM_THREADS": "1"}
    python = Path(sys.executable)
    if environment is not None:
        python, variables = environment.python, environment.variables(DeviceSettings.of(CARD), variables)
        variables |= force.environment(values, variables) if values else {}
    names = ",".join(one.name for one in chosen)
    command = [str(python), str(here / "_ordinary_worker.py"), names, *options]
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith('{"name"'):  # programs print too
                yield json.loads(line)


def compared(rows: list[Row], environment: Environment | None, values: str = "all") -> list[Row]:
    """The rows with what the programs took ``on_device``.

    ``values``: ``all`` computes every number of all programs, ``whole`` whole numbers of those that ask for them.
    """
    found = {row.program.name: row for row in rows}
    traced = [row.program for row in rows if row.allocated is not None and not (environment and row.program.merges)]
    plain = [one for one in traced if values != "all" and not one.asks]
    computing = [one for one in traced if one not in plain]
    for answer in (*on_device(plain, environment), *on_device(computing, environment, values=values)):
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


def table(rows: list[Row]) -> dict[str, Any]:
    """The rows and their differences, for a file."""
    one = [
        {"program": f"{row.program.kind}.{row.program.name}", "allocated_bytes": row.allocated,
         "reserved_bytes": row.reserved, "device_allocated_bytes": row.true_allocated,
         "device_reserved_bytes": row.true_reserved, "said": row.said}
        for row in rows
    ]  # fmt: skip
    return {"card": CARD, "steps": _ordinary_worker.STEPS, "summary": list(told(rows))[len(rows) :], "programs": one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs or kinds (default: all)")
    parser.add_argument("--python", type=Path, help="a Python that `brim rehearse` runs with; compares")
    parser.add_argument(
        "--values", choices=force.MODES, default="all", help="what the rehearsal device computes (default: all)"
    )
    parser.add_argument("--real", action="store_true", help="compare with the GPU of this machine")
    parser.add_argument("--output", type=Path, help="a JSON file for the table")
    options = parser.parse_args()
    chosen = [one for one in programs() if not options.names or {one.name, one.kind} & set(options.names)]
    rows = [traced(one) for one in chosen]
    if options.python or options.real:
        environment = None if options.real else find(options.python)
        if environment is None and not options.real:
            raise SystemExit("There is no CUDA build of PyTorch: see `brim rehearse --help`.")
        rows = compared(rows, environment, options.values)
    for line in told(rows):
        print(line)
    if options.output:
        text = json.dumps(table(rows), indent=1).replace(f"{Path(__file__).parents[1]}/", "")
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
