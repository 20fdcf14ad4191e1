"""A fixture of pytest that checks the predicted memory of a step against a limit and a stored baseline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

_FILE = "brim_memory.json"
_TOLERANCE = 0.005  # of the baseline


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--brim-update", action="store_true", help=f"Store the peaks of brim_memory in {_FILE}, beside the tests."
    )


@pytest.fixture
def brim_memory(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Return a function that fails the test where a step's predicted peak is too large.

    ``brim_memory("20GiB", build, gpu="RTX 4090")`` takes ``build`` as ``brim.trace`` does, and runs nothing on a GPU.
    It fails above the limit, and where the allocated bytes are more than half a percent above those that
    ``--brim-update`` stored. It returns the reserved bytes.
    """
    checks = 0

    def check(limit: str | int, build: Callable[[], Callable[[], Any]], *, gpu: str = "H100", steps: int = 3) -> int:
        import brim
        from brim.estimation.simulation import capability_of, place_of
        from brim.units import format_bytes, parse_bytes

        nonlocal checks
        checks += 1
        place = replace(place_of(gpu), total_bytes=None)  # what does not fit is to be known, too
        peak = brim.simulate(brim.trace(build, steps=steps, capability=capability_of(place)), place).peak_bytes
        if peak.reserved > parse_bytes(limit):
            pytest.fail(f"A step reserves {format_bytes(peak.reserved)} on {gpu}, limit {limit}.", pytrace=False)
        file = request.path.with_name(_FILE)
        stored = json.loads(file.read_text()) if file.exists() else {}
        key = f"{request.path.name}::{request.node.name} {checks}"
        before = stored.get(key)
        if request.config.getoption("--brim-update"):
            stored[key] = peak.allocated
            file.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        elif before is not None and peak.allocated > before * (1 + _TOLERANCE):
            pytest.fail(
                f"A step allocates {format_bytes(peak.allocated)}, {peak.allocated / before - 1:.1%} more than the "
                f"{format_bytes(before)} of {_FILE}; pytest --brim-update stores the new peak.",
                pytrace=False,
            )
        return peak.reserved

    return check
