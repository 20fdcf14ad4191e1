"""brim: virtual memory for PyTorch that knows the future.

PYTEST_DONT_REWRITE: pytest warns of a plugin's package that is imported before it (``brim run -m pytest``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from brim.version import __version__

if TYPE_CHECKING:
    from brim.cli.explain.answers import explain as explain
    from brim.estimation.estimate import estimate as estimate
    from brim.estimation.simulation import simulate as simulate
    from brim.measure.probe import probe as probe
    from brim.measure.watch import watch as watch
    from brim.predict.tracer import trace as trace
    from brim.rehearsal.rehearse import rehearse as rehearse
    from brim.run.fit import fit as fit
    from brim.run.generate.load import load as load
    from brim.run.plan.search import plan as plan

# The verbs of the public interface and where each lives. Loaded on first use (PEP 562): `import brim` costs nothing.
_EXPORTS = {
    "estimate": "brim.estimation.estimate",
    "explain": "brim.cli.explain.answers",
    "fit": "brim.run.fit",
    "load": "brim.run.generate.load",
    "plan": "brim.run.plan.search",
    "probe": "brim.measure.probe",
    "rehearse": "brim.rehearsal.rehearse",
    "simulate": "brim.estimation.simulation",
    "trace": "brim.predict.tracer",
    "watch": "brim.measure.watch",
}

__all__ = [
    "__version__", "estimate", "explain", "fit", "load", "plan", "probe", "rehearse", "simulate", "trace", "watch"
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value  # found without this function next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
