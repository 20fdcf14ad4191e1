"""The benches, for tests of the benches themselves: no other test needs them."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).resolve().parents[2] / "bench"


def load(name: str) -> ModuleType:
    """The module of that name in ``bench``, which imports no other of them."""
    spec = spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
