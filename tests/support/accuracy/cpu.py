"""Peaks of real runs on this machine's CPU, for every configuration of the four ``cpu_`` zoos."""

from __future__ import annotations

import sys
import time

import brim
from brim.errors import BrimError
from support.accuracy.table import Row
from support.cpu.families import CONFIGURATIONS as FAMILIES
from support.cpu.further import CONFIGURATIONS as FURTHER
from support.cpu.programs import CONFIGURATIONS as PROGRAMS
from support.cpu.truth import measured_peak_bytes
from support.cpu.zoo import CONFIGURATIONS as ZOO


def rows(only: str = "") -> list[Row]:
    """Every configuration; one that cannot be traced is named on standard error."""
    found = []
    for name, build in {**ZOO, **FAMILIES, **FURTHER, **PROGRAMS}.items():
        if only not in name:
            continue
        started = time.perf_counter()
        try:
            predicted = brim.simulate(brim.trace(build, steps=2, target="cpu")).peak_bytes.allocated
        except BrimError as error:
            print(f"{name}: not traced: {str(error)[:300]}", file=sys.stderr)
            continue
        seconds = time.perf_counter() - started
        measured = float(measured_peak_bytes(build, steps=2))
        found.append(Row(name=name, predicted_bytes=predicted, measured_bytes=measured, seconds=seconds))
    return found
