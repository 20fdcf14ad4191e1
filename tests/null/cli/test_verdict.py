"""The sentence that reports begin with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brim.cli import verdict
from brim.estimation.estimate import Estimate, PeakBytes
from brim.estimation.workload import Workload

GIB = 1 << 30


def estimate(**values: Any) -> Estimate:
    peak = PeakBytes(allocated=4 * GIB, reserved=5 * GIB, process=6 * GIB)
    given: dict[str, Any] = {
        "model": "m", "workload": Workload(), "gpu": "g", "peak_bytes": peak, "upper_bound_bytes": 7 * GIB,
        "margins": (), "at_peak_bytes": {"context": GIB}, "per_module": {}, "rounding_bytes": 0, "step_s": None,
        "flops": 0, "not_modelled": (), "fits": True, "notes": (),
    }  # fmt: skip
    return Estimate(**given | values)


@pytest.mark.parametrize(
    ("found", "total_bytes", "largest", "says"),
    [
        (estimate(), 9 * GIB, 25, "Fits with 3 GiB to spare; batch 25 is the largest."),
        (estimate(), 9 * GIB, None, "Fits with 3 GiB to spare."),
        (
            estimate(),
            13 * GIB // 2,
            None,
            "Fits with 512 MiB to spare, though the safe upper bound is 512 MiB above the memory.",
        ),
        (estimate(fits=False), 4 * GIB, 2, "Does not fit: it takes 6 GiB of 4 GiB; batch 2 is the largest."),
        (replace(estimate(), fits=None), None, 3, "Takes 6 GiB of GPU memory, 1 GiB of it CUDA context."),
    ],
)
def test_whether_it_fits_and_by_how_much(
    found: Estimate, total_bytes: int | None, largest: int | None, says: str
) -> None:
    assert verdict.of_estimate(found, total_bytes, largest) == says
