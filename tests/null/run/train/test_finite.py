"""Values that are no finite numbers: found in every form, and never saved unasked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import ModelError, UsageError
from brim.run.checkpoint.reading import latest
from brim.run.train.finite import is_finite
from brim.run.train.loop import Request, train
from support.tiny_model import save_llama
from support.trainings import quick_trainings, request, weights, write_text

__all__ = ["quick_trainings"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    values = torch.linspace(-3, 3, 35).reshape(5, 7)
    assert is_finite(values.to(dtype)) and is_finite(values.to(dtype).t())
    for at in (0, 17, 34):
        worse = values.clone()
        worse.view(-1)[at] = bad
        if not worse.to(dtype).float().isfinite().all():  # e4m3fn has no infinities
            assert not is_finite(worse.to(dtype)) and not is_finite(worse.to(dtype).t())


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert is_finite(torch.arange(3)) and is_finite(torch.empty(0)) and is_finite(torch.tensor([True]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=16, layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batch": 1, "offload_optimizer": "disk", "clip_norm": 1.0},
        {"method": "lora"},
        pytest.param({"precision": "fp16-mixed"}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-master", "offload_optimizer": "keep"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_a_training_that_diverges_stops_at_its_last_good_checkpoint(
    options: dict[str, Any], llama: Path, text: Path, tmp_path: Path, quick_trainings: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The second step is as wrong as a step can be: its own loss is finite, and what it makes is not."""
    monkeypatch.setattr(Request, "lr_at", lambda self, step, steps: 1e39 if step == 1 else 1e-3)
    asked = request(llama, text, tmp_path / "out", save_every=1, **options)
    with pytest.raises(ModelError, match=r"not finite|Its loss is") as raised:
        train(asked)
    assert "--resume" in str(raised.value)
    del raised
    assert latest(tmp_path / "out").step == 1
    assert list((tmp_path / "out").glob("*model.safetensors")) == []
    monkeypatch.undo()
    found = train(request(llama, text, tmp_path / "out", save_every=1, resume=True, **options))
    assert len(found.losses) == 2
    assert all(value.isfinite().all() for value in weights(tmp_path / "out").values())


def test_a_model_that_is_not_finite_is_saved_only_where_that_is_said(
    llama: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    with pytest.raises(ModelError, match="values that are not finite"):
        train(request(llama, text, tmp_path / "one", steps=1, lr=1e38))
    assert list((tmp_path / "one").glob("*.safetensors")) == []
    train(request(llama, text, tmp_path / "other", steps=2, lr=1e38, allow_non_finite=True))
    assert not all(value.isfinite().all() for value in weights(tmp_path / "other").values())


@pytest.mark.parametrize(
    "options",
    [
        {"lr": math.inf}, {"lr": math.nan}, {"lr": -1e-3}, {"clip_norm": math.nan}, {"clip_norm": math.inf},
        {"clip_norm": 0.0}, {"clip_norm": -1.0}, {"batch": 0}, {"seq": 1}, {"steps": 0}, {"warmup": -1},
        {"save_every": 0}, {"micro_batch": 0}, {"seed": 10**30}, {"resume": True, "overwrite": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        train(request(tmp_path / "model", tmp_path / "data.txt", tmp_path / "out", **options))
    assert list(tmp_path.iterdir()) == []
