"""The machine that is planned for, as a request means it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from brim.core import Hardware
from brim.measure.capacity import resident_bytes
from brim.memory import heap
from brim.run import planning_request
from brim.run.planning_request import Request


def test_what_measuring_the_machine_leaves_hides_nothing_that_a_run_grows_by(
    known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan on a machine measures it: a plan that was made then let its run go over the budget."""
    left = []

    def measuring(**options: Any) -> Hardware:
        left.append(bytearray(os.urandom(1 << 20) * 64))
        return known_machine

    monkeypatch.setattr(planning_request, "probe", measuring)
    heap.trim()
    before_bytes = resident_bytes()
    new = planning_request.machine_of(Request(model="gpt2", task="train", ram="1GiB", disk="1GiB"))
    assert len(left) == 1 and new.left_bytes >= 60 << 20
    assert abs(new.start_bytes() - before_bytes) < 4 << 20
    monkeypatch.setattr(planning_request, "probe", lambda **options: known_machine)
    known = planning_request.machine_of(Request(model="gpt2", task="train", ram="1GiB", disk="1GiB"))
    assert known == new and known.left_bytes < 1 << 20
