"""Situations that people know: the plan is what an expert would make of each. Every file says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.planning.request import Answer, Proposal, Request
from brim.run.plan.search import answer_to

pytestmark = pytest.mark.slow  # every plan is a search and several traces

FOLDER = Path(__file__).parent / "golden"
CASES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def answer(case: dict[str, Any]) -> Answer:
    asked = dict(case["request"])
    if ":" in asked["model"]:  # a function in a file beside the cases
        asked["model"] = str(FOLDER / asked["model"])
    return answer_to(Request(**asked, top=1))


def used(one: Proposal) -> set[str]:
    """Techniques by name, and where blocks are (``stream:ram``) or what they are rounded to (``int4``)."""
    return {effect.technique for effect in one.techniques} | {d.choice for d in one.plan.decisions}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["fits"]])
def test_the_plan_is_what_an_expert_expects(name: str) -> None:
    case = CASES[name]
    found = answer(case)
    assert found.proposals, found.refusal
    best = found.proposals[0]
    for group in case["uses"]:
        assert used(best) & set(group), f"none of {group} in {sorted(used(best))}: {case['why']}"
    assert not used(best) & set(case["never"]), case["why"]
    assert best.limited_by in case["limited_by"], case["why"]
    least_s, most_s = case["step_s"]
    assert least_s <= best.step_s <= most_s, case["why"]
    budget = found.machine.budget_bytes
    assert all(count <= budget[tier] for tier, count in best.plan.promise.peak_bytes.items() if tier in budget)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case["fits"]])
def test_what_nobody_could_fit_is_answered_with_what_would(name: str) -> None:
    case = CASES[name]
    found = answer(case)
    assert not found.proposals
    for tier, (least, most) in case["needs"].items():
        assert least <= found.needs_bytes[tier] <= most, case["why"]
    for text in case["nearest"]:
        assert any(text in change.change for change in found.nearest), case["why"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_says_why(name: str) -> None:
    case = CASES[name]
    assert min(len(case[part].split()) for part in ("situation", "why", "source")) >= 5
