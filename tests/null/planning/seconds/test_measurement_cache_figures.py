"""What was measured of this machine for plans is measured once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from brim.planning.inference.warm_up import most_grown
from brim.planning.seconds.measurement_cache import Remembered


def test_the_program_s_share_is_the_most_that_was_seen_of_a_model(cache: Path) -> None:
    small, large = nn.Linear(4, 4), nn.Linear(8, 8)
    assert most_grown("train full", small, 64, 100 << 20) == 100 << 20
    assert most_grown("train full", small, 64, 3 << 20) == 100 << 20
    assert most_grown("train full", large, 64, 3 << 20) == 3 << 20


@pytest.mark.parametrize("numbers", [[0.0], [0, 0], [], [1.0, 2.0]])
def test_figures_that_say_nothing_are_measured_anew(cache: Path, numbers: list[float]) -> None:
    Remembered("x", ()).keep({"a": [1.5]})
    [file] = (cache / "brim").glob("x-*.json")
    file.write_text(json.dumps({"a": [numbers, 1.0]}))
    assert Remembered("x", ()).get("a", count=1) is None


@pytest.mark.parametrize(
    "text", ['{"a": [[-1.0], 1.0]}', '{"a": [[NaN], 1.0]}', '{"a": [[1e999], 1.0]}', "\0" * 99, '{"a": {"b": 1}}']
)
def test_figures_that_cannot_be_measured_are_a_damaged_file(cache: Path, text: str) -> None:
    Remembered("x", ()).keep({"a": [1.5]})
    [file] = (cache / "brim").glob("x-*.json")
    file.write_text(text)
    with pytest.warns(UserWarning, match="is damaged; its values are measured again"):
        assert Remembered("x", ()).get("a", count=1) is None
