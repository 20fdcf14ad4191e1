"""Programs run on the rehearsal device, in processes of their own: the one that runs these tests has no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.rehearsal.build import build
from brim.rehearsal.settings import DeviceSettings

SOURCES = Path(brim.__file__).parents[1]
_SITE = "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('torch').origin).parents[1])"
_PRINT = "import json as _json\nprint('\\n' + _json.dumps(result))\n"


@dataclass(frozen=True)
class OnDevice:
    """Runs programs with a CUDA build of PyTorch on the device that was built for it."""

    python: Path
    libraries: Path

    def environment(self, card: str, **settings: Any) -> dict[str, str]:
        paths = [str(SOURCES), os.environ.get("PYTHONPATH", "")]
        before = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        return DeviceSettings.of(card, **settings).environment(self.libraries, before)

    def run(self, program: str, card: str = "H100", *, timeout_s: float = 120, **settings: Any) -> Any:
        """What the program leaves in ``result``."""
        text = textwrap.dedent(program) + _PRINT
        done = subprocess.run(
            [self.python, "-c", text],
            env=self.environment(card, **settings),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def on_device() -> OnDevice:
    """Skips where there is no CUDA build of PyTorch: `make rehearsal` sets one up; BRIM_REHEARSAL_PYTHON names
    another."""
    python = Path(os.environ.get("BRIM_REHEARSAL_PYTHON", sys.executable))
    found = subprocess.run([python, "-c", _SITE], capture_output=True, text=True, check=True)
    site = Path(found.stdout.strip())
    if "cuda: Optional[str] = None" in (site / "torch" / "version.py").read_text():
        pytest.skip("no CUDA build of PyTorch: run `make rehearsal`, or name a Python in BRIM_REHEARSAL_PYTHON")
    return OnDevice(python, build(site))
