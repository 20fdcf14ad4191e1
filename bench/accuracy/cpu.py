"""Peaks of real runs on this machine's CPU, for every configuration of ``cpu_zoo``."""

from __future__ import annotations

import time

import brim
from accuracy.table import Row
from cpu_truth import measured_peak_bytes
from cpu_zoo import CONFIGURATIONS


def rows(only: str = "") -> list[Row]:
    found = []
    for name, build in CONFIGURATIONS.items():
        if only not in name:
            continue
        started = time.perf_counter()
        predicted = brim.simulate(brim.trace(build, steps=2, target="cpu")).peak_bytes.allocated
        seconds = time.perf_counter() - started
        measured = float(measured_peak_bytes(build, steps=2))
        found.append(Row(name=name, predicted_bytes=predicted, measured_bytes=measured, seconds=seconds))
    return found
