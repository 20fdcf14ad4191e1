"""Forward passes of any module are placed and proved as those of a generation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError
from brim.planning.inference import choosing
from brim.planning.inference.choosing import InferenceCase
from brim.planning.inference.forward_prediction import forward_need, search_forward
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.units import KIB, MIB
from support.recorded_cases import CPU, GPU

X = (torch.zeros(4, 256),)


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])


def placed(model: nn.Module, budget: dict[str, int], device: str = "auto") -> choosing.Placed:
    hardware = GPU if VRAM in budget else CPU
    need = forward_need(model, budget, hardware, X, None)
    return search_forward(model, hardware, budget, need, X, device)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_what_the_pools_hold_is_in_the_promise(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[dict[str, int]] = []
    pool_bytes = InferenceCase.pool_bytes

    def watched(self: InferenceCase, *planned: Any) -> dict[str, int]:
        proved.append(pool_bytes(self, *planned))
        return proved[-1]

    monkeypatch.setattr(InferenceCase, "pool_bytes", watched)
    budget = {RAM: 1200 * KIB} if device == "cpu" else {VRAM: 1200 * KIB, RAM: 64 * MIB}
    plan = placed(layers(), budget, device).plan
    assert "resident" in plan.choices(STREAMING).values() and len(set(plan.choices(STREAMING).values())) == 2
    assert all(count <= plan.promise.peak_bytes[tier] <= budget[tier] for tier, count in proved[-1].items())


def test_a_plan_that_takes_more_than_it_says_gets_a_smaller_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pool_bytes, budget = InferenceCase.pool_bytes, {RAM: 1500 * KIB}
    before = placed(layers(), budget).plan

    def more(self: InferenceCase, *planned: Any) -> dict[str, int]:
        return {tier: count + 300 * KIB for tier, count in pool_bytes(self, *planned).items()}

    monkeypatch.setattr(InferenceCase, "pool_bytes", more)
    after = placed(layers(), budget).plan
    resident = [[*plan.choices(STREAMING).values()].count("resident") for plan in (before, after)]
    assert resident[1] < resident[0] and after.promise.peak_bytes[RAM] <= budget[RAM] == after.budget_bytes[RAM]


def test_a_model_that_cannot_be_copied_is_proved_and_left_as_it_was() -> None:
    model = layers()
    vars(model)["lock"] = threading.Lock()  # copy.deepcopy refuses it
    before = {name: (type(p), p.data_ptr(), p.untyped_storage()._cdata) for name, p in model.named_parameters()}
    assert "resident" in placed(model, {RAM: 1200 * KIB}).plan.choices(STREAMING).values()
    with pytest.raises(BudgetError):
        placed(model, {RAM: 300 * KIB})
    after = {name: (type(p), p.data_ptr(), p.untyped_storage()._cdata) for name, p in model.named_parameters()}
    assert after == before and not hasattr(model, "brim") and not model._forward_pre_hooks
