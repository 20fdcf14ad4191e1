"""What was recorded is what brim still answers. A difference that is meant is recorded anew, and explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recorded_cases import FILE, NAMES, answers

RECORDED = json.loads(FILE.read_text())


def test_every_case_is_recorded() -> None:
    assert set(RECORDED) == set(NAMES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    assert answers(tmp_path, (name,))[name] == RECORDED[name]
