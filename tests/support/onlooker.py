"""A command's memory as the kernel counts it, beside what the command itself says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Samples taken from outside miss the moment at which the high water begins anew, on a busy machine: so the kernel's
# figures are read around it, in the process itself.
_TELLING = """
import json, sys
from brim.cli import main
from brim.measure.monitor import KernelMeter

def figures():
    lines = open("/proc/self/status").read().splitlines()
    return {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM", "VmRSS"))}

def telling(meter, reset=KernelMeter.reset):
    peaks.append(figures()["VmHWM:"])
    reset(meter)
    starts.append(figures()["VmRSS:"])

peaks, starts = [], []
KernelMeter.reset = telling
status = main(sys.argv[2:])
peaks.append(figures()["VmHWM:"])
open(sys.argv[1], "w").write(json.dumps([starts, peaks]))
sys.exit(status)
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """``document``: the JSON that the command printed. ``starts_bytes``: what was resident each time that the command
    began to watch itself; ``peaks_bytes``: the high water before each of these times, and at the end.
    """

    document: dict[str, Any]
    error: str
    starts_bytes: list[int]
    peaks_bytes: list[int]

    def growth_bytes(self, start: int) -> int:
        """The high water since the ``start``-th time (-1: the last) over what was resident then."""
        first = range(len(self.starts_bytes))[start]
        return max(self.peaks_bytes[first + 1 :]) - self.starts_bytes[first]


def watched(arguments: list[str], environment: dict[str, str], folder: Path) -> Seen:
    """Run ``brim ARGUMENTS`` in a process of its own, which must succeed. Writes a file into ``folder``."""
    told = folder / "told.json"
    command = [sys.executable, "-c", _TELLING, str(told), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert run.returncode == 0, run.stderr
    starts_bytes, peaks_bytes = json.loads(told.read_text())
    return Seen(document=json.loads(run.stdout), error=run.stderr, starts_bytes=starts_bytes, peaks_bytes=peaks_bytes)
