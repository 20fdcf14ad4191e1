"""Programs run on the rehearsal device, in processes of their own: the one that runs these tests has no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.device.environment import Environment, find
from brim.device.settings import DeviceSettings
from brim.measure.user_cache import cache_folder
from brim.predict.lowering.cuda import convolution
from brim.rehearsal import force

SOURCES = Path(brim.__file__).parents[1]
CHECKOUT = Path(__file__).parents[2]
# The interpreter's end would abort where a thread of PyTorch's backward pass is still freeing Python objects.
_PRINT = """
import json as _json, os as _os
print('\\n' + _json.dumps(result), flush=True)
_os._exit(0)
"""


@dataclass(frozen=True)
class OnDevice:
    """Runs programs with a CUDA build of PyTorch on the rehearsal device."""

    environment: Environment

    def variables(self, card: str, **settings: Any) -> dict[str, str]:
        paths = [str(SOURCES), os.environ.get("PYTHONPATH", "")]
        before = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        return self.environment.variables(DeviceSettings.of(card, **settings), before)

    def run(
        self, program: str, card: str = "H100", *, timeout_s: float = 120, values: str = "", **settings: Any
    ) -> Any:
        """What the program leaves in ``result``; ``values``: what is computed (``force.MODES``)."""
        variables = self.variables(card, **settings)
        done = subprocess.run(
            [self.environment.python, "-c", textwrap.dedent(program) + _PRINT],
            env=variables | (force.environment(values, variables) if values else {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "on_device" in getattr(item, "fixturenames", ()):
            item.add_marker("rehearsal")


@pytest.fixture(scope="module", autouse=True)
def _cudnn_of_one_engine() -> Iterator[None]:
    """The device's cuDNN has one engine for every convolution, which takes no workspace: a trace to compare with it
    follows none of the rules that real engines were measured by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_MEASURED", None)
        yield


@pytest.fixture(scope="session")
def on_device() -> OnDevice:
    """Skips where there is no CUDA build of PyTorch: `make rehearsal` fetches one, BRIM_REHEARSAL_PYTHON names
    another.

    What `make rehearsal` keeps in the checkout is, in these tests, what `brim rehearse` keeps in the user's cache
    folder: commands find the fetched build, and nothing is compiled twice.
    """
    kept, users = CHECKOUT / ".rehearsal", cache_folder() / "rehearsal"
    kept.mkdir(exist_ok=True)
    users.parent.mkdir(parents=True, exist_ok=True)
    users.symlink_to(kept)
    named = os.environ.get("BRIM_REHEARSAL_PYTHON")
    found = find(Path(named) if named else None)
    if found is None:
        pytest.skip("no CUDA build of PyTorch: run `make rehearsal`, or name a Python in BRIM_REHEARSAL_PYTHON")
    return OnDevice(found)
