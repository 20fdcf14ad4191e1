"""The machine that is planned for, as a request means it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from brim.core import Hardware
from brim.errors import BudgetError
from brim.measure.capacity import resident_bytes
from brim.memory import heap
from brim.planning import request as planning_request
from brim.planning.request import Request
from brim.run.plan import search as planning


def test_what_measuring_the_machine_leaves_hides_nothing_that_a_run_grows_by(
    known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan on a machine measures it: a plan that was made then let its run go over the budget."""
    left = []

    def measuring(**options: Any) -> Hardware:
        left.append(bytearray(os.urandom(1 << 20) * 64))
        return known_machine

    monkeypatch.setattr(planning_request, "probe", measuring)
    heap.collect_and_trim()
    before_bytes = resident_bytes()
    new = planning_request.machine_of(Request(model="gpt2", task="train", ram="1GiB", disk="1GiB"))
    assert len(left) == 1 and new.left_bytes >= 60 << 20
    assert abs(new.start_bytes() - before_bytes) < 4 << 20
    monkeypatch.setattr(planning_request, "probe", lambda **options: known_machine)
    known = planning_request.machine_of(Request(model="gpt2", task="train", ram="1GiB", disk="1GiB"))
    assert known == new and known.left_bytes < 1 << 20


@pytest.mark.parametrize("task", ["generate", "train"])
def test_a_batch_whose_tokens_alone_are_more_than_memory_is_refused_at_once(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(budget_bytes={"ram": 8 << 30})
    monkeypatch.setattr(planning, "machine_of", lambda request: machine)
    monkeypatch.setattr(planning, f"plan_{'training' if task == 'train' else 'generation'}", None)
    with pytest.raises(BudgetError, match=r"--batch 1000000000 --seq 1024 were given, with 8 GiB") as found:
        planning.answer_to(planning.Request(model="nowhere", task=task, batch=10**9))
    assert found.value.smallest_bytes["ram"] == 8 * 1024 * 10**9 * (1 + (task == "train"))


def test_a_batch_whose_scores_alone_are_more_than_memory_is_refused_before_any_search(
    known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_request, "probe", lambda **options: known_machine)
    monkeypatch.setattr(planning, "plan_generation", lambda *_, **__: pytest.fail("it was searched"))
    with pytest.raises(BudgetError, match="logits of each sequence's last token alone take 956 GiB") as found:
        planning.answer_to(Request(model="llama-3.2-1b", task="generate", batch=10**6, seq=16, ram="4GiB"))
    assert found.value.smallest_bytes["ram"] == 2 * 4 * 128256 * 10**6


def test_a_budget_above_the_free_memory_of_the_gpu_is_noted() -> None:
    above, below = (
        planning_request.machine_of(Request(model="gpt2", gpu="RTX 3060", vram=n)) for n in ("50GiB", "8GiB")
    )
    assert above.budget_bytes["vram"] < 12 << 30
    assert [text for text in above.assumed if "--vram" in text]
    assert not [text for text in below.assumed if "--vram" in text]
