"""Other families and programs than those of ``test_cpu_accuracy``. ``bench/accuracy.py --cpu`` has all of them."""

from __future__ import annotations

import pytest

from brim.estimation.simulation import simulate
from brim.predict.tracer import trace
from support.cpu.families import CONFIGURATIONS as FAMILIES
from support.cpu.programs import CONFIGURATIONS as PROGRAMS
from support.cpu.truth import measured_peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore")

# One of each kind of attention, mixture, recurrence and convolution, the quick ones to trace.
NAMES = (
    "bart-inference", "bloom-inference", "clip", "deberta", "electra", "falcon", "fnet", "gemma2-inference",
    "gpt-oss", "granite-moe", "marian-inference", "mixtral", "mobilenet-v2-inference", "opt", "poolformer",
    "qwen2-vl-text", "segformer-inference", "stablelm", "swin-inference", "wav2vec2-inference", "xlnet-inference",
)  # fmt: skip


def check(build):
    predicted = simulate(trace(build, steps=2, target="cpu")).peak_bytes.allocated
    assert predicted == pytest.approx(measured_peak_bytes(build, steps=2), rel=0.0005)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_familys_peak_is_the_measured_one(name):
    check(FAMILIES[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_programs_peak_is_the_measured_one(name):
    check(PROGRAMS[name])
