"""Hybrids, state spaces, sparse attention, time series, sound and diffusion: predicted and run on the CPU."""

from __future__ import annotations

import pytest

from brim.estimation.simulation import simulate
from brim.predict.tracer import trace
from support.cpu.further import CONFIGURATIONS
from support.cpu.truth import measured_peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore")

# One of each kind, the quick ones to trace; ``slow`` has the others.
NAMES = (
    "bark-inference", "bit-inference", "hiera-inference", "longformer-inference",
    "minimax-inference", "nemotron-inference", "patchtst", "perceiver", "qwen3-next-inference", "reformer",
    "sd3-inference", "time-series-inference",
)  # fmt: skip


def check(name):
    build = CONFIGURATIONS[name]
    predicted = simulate(trace(build, steps=2, target="cpu")).peak_bytes.allocated
    assert predicted == pytest.approx(measured_peak_bytes(build, steps=2), rel=0.0005)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_familys_peak_is_the_measured_one(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in NAMES])
def test_the_other_families_peaks_are_the_measured_ones(name):
    check(name)
