"""What ordinary programs take as they are traced, and by PyTorch's own CUDA build on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import brim
from brim.device.environment import Environment
from brim.device.settings import DeviceSettings
from brim.estimation.simulation import simulate
from brim.rehearsal import force
from support.ordinary import Program, worker

CAPABILITY = (9, 0)
CARD = "H100"
_ROOT = Path(__file__).resolve().parents[3]


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
    worker.seed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = brim.trace(one.build, steps=worker.STEPS, target="cuda", capability=CAPABILITY)
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
    sources = f"{_ROOT / 'tests'}:{_ROOT / 'src'}"
    variables = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    python = Path(sys.executable)
    if environment is not None:
        python, variables = environment.python, environment.variables(DeviceSettings.of(CARD), variables)
        variables |= force.environment(values, variables) if values else {}
    names = ",".join(one.name for one in chosen)
    command = [str(python), "-m", worker.__name__, names, *options]
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
    With ``all``, programs with an operator that the CPU has no kernel for run once more with whole numbers.
    """
    found = {row.program.name: row for row in rows}
    traced = [row.program for row in rows if row.allocated is not None and not (environment and row.program.merges)]
    plain = [one for one in traced if values != "all" and not one.asks]
    computing = [one for one in traced if one not in plain]
    for answer in (*on_device(plain, environment), *on_device(computing, environment, values=values)):
        found[answer["name"]] = answered(found[answer["name"]], answer)
    lacking = [one for one in computing if values == "all" and found[one.name].true_allocated is None]
    before = {row.program.name: row for row in rows}
    for answer in on_device(lacking, environment, values="whole"):
        found[answer["name"]] = answered(before[answer["name"]], answer)
    return list(found.values())


def answered(row: Row, answer: dict[str, Any]) -> Row:
    """``row`` with what a device said of its program."""
    if "error" in answer:
        said = f"on the device: {answer['error'].strip().splitlines()[-1]}"
        return Row(row.program, row.allocated, row.reserved, said=said)
    return Row(row.program, row.allocated, row.reserved, answer["allocated"], answer["reserved"], row.said)
