"""Peaks of real runs on this machine's CPU, for every configuration of the four ``cpu_`` zoos."""

from __future__ import annotations

import sys
import time

import brim
from accuracy.table import Row
from brim.errors import BrimError
from cpu_families import CONFIGURATIONS as FAMILIES
from cpu_further import CONFIGURATIONS as FURTHER
from cpu_programs import CONFIGURATIONS as PROGRAMS
from cpu_truth import measured_peak_bytes
from cpu_zoo import CONFIGURATIONS as ZOO


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
