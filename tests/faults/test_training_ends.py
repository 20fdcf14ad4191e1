"""Trainings for which memory is never enough: they end, and say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from brim.core.hardware import RAM
from brim.errors import BudgetError
from brim.planning.strategy.step import Fitted
from brim.run.train.loop import train
from support.tiny_model import held, save_llama
from support.trainings import request


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stream_weights",
    [
        pytest.param(None, id="weights may be streamed"),
        pytest.param(False, id="they may not", marks=pytest.mark.slow),
    ],
)
def test_memory_that_runs_out_under_every_plan_is_one_error_in_the_end(
    stream_weights: bool | None, tiny: Path, text: Path, tmp_path: Path, scratch: Path, quick_trainings: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    step, plans, before = Fitted.step, [], held(scratch)

    def failing(self: Fitted, *args: Any, **more: Any) -> torch.Tensor:
        if self.memory.fake:
            return step(self, *args, **more)
        plans.append(self.choice)
        assert len(plans) < 20, "it goes on for ever"
        raise MemoryError

    monkeypatch.setattr(Fitted, "step", failing)
    with pytest.raises(BudgetError, match="The smallest plan is already in force") as raised:
        train(request(tiny, text, tmp_path / "out", stream_weights=stream_weights))
    assert "Cannot continue training with less memory." in str(raised.value)
    del raised
    # Streaming may be planned so that all weights stay: what is there is enough for them.
    assert 5 <= len(plans) - 1 <= len({repr(plan) for plan in plans})
    assert held(scratch)["threads"] == before["threads"]


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("fp16-mixed", marks=pytest.mark.slow),
        "bf16-master",
        pytest.param("bf16-stochastic", marks=pytest.mark.slow),
    ],
)
def test_a_precision_whose_optimizer_is_not_plain_trains_at_the_smallest_budget_that_it_names(
    precision: str, text: Path, tmp_path: Path, scratch: Path
) -> None:
    model = save_llama(tmp_path / "model", hidden=256, layers=2)
    options: dict[str, Any] = {"precision": precision, "steps": 1, "seq": 64}
    with pytest.raises(BudgetError) as raised:
        train(request(model, text, tmp_path / "out", ram="20MiB", **options))
    least = raised.value.smallest_bytes[RAM]
    del raised
    found = train(request(model, text, tmp_path / "out", ram=least + (1 << 20), **options))
    assert len(found.losses) == 1
    if precision != "fp16-mixed":
        assert found.plan.choices("optimizer_offload")[""] == "keep"
