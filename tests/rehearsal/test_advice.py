"""The first advice of programs that run out, followed in their own text: they fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from brim.device.environment import find
from support.benches import load

if TYPE_CHECKING:
    from conftest import OnDevice


@pytest.mark.parametrize(
    ("trainer", "case", "phase", "change"),
    [
        ("plain_loop", "optimizer", "optimizer", "fused optimizer"),
        ("plain_loop", "loss", "loss", "loss in chunks"),
        ("plain_loop", "evaluation", "evaluation", "no gradients in evaluation"),
    ],
)
def test_a_program_that_follows_its_first_advice_fits(
    on_device: OnDevice, trainer: str, case: str, phase: str, change: str
) -> None:
    if find() is None:
        pytest.skip("the CUDA build is another Python's: the bench goes by the one that runs it")
    bench = load("advice")
    row = bench.tried(trainer, case, bench.CASES[trainer][case])
    assert (row["phase"], row["change"], row["said_to_fit"], row["fits"]) == (phase, change, True, True)
