"""Architectures that nothing was chosen for, made small by rule: predicted and run on the CPU."""

from __future__ import annotations

import pytest

from support.cpu import sweep as cpu_sweep

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("kind", "family"), [("causal", "jetmoe"), ("masked", "esm"), ("both", "m2m_100")])
def test_a_familys_peak_is_the_measured_one(kind, family):
    make = cpu_sweep.model(family, cpu_sweep.KINDS[kind][family])
    assert abs(cpu_sweep.relative_error(cpu_sweep.build(kind, make, infer=True))) <= 0.0005


def test_what_cannot_be_run_is_named():
    assert cpu_sweep.outcome("causal", "blt", "BltForCausalLM", infer=True).startswith("left out")
