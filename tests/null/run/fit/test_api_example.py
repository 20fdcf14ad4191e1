"""An example is what a model is called with: a tensor alone is one input, not as many as it has rows."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.errors import UsageError
from brim.estimation.steps import _named_inputs
from brim.techniques.dry_run import as_arguments

SHAPES: list[torch.Size] = []  # of the model's own twins too


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SHAPES.append(x.shape)
        return self.layer(x)


X = torch.zeros(1, 256)


@pytest.mark.parametrize("example", [X, (X,), [X], {"x": X}, UserDict(x=X)])
def test_the_model_is_tried_with_the_shape_that_was_given(example: Any) -> None:
    SHAPES.clear()
    model = Recording()
    brim.fit(model, ram="1GiB", device="cpu", example=example).remove()
    assert set(SHAPES) == {X.shape}


@pytest.mark.parametrize("example", [X, (X,), {"x": X}])
def test_training_is_tried_with_the_shape_that_was_given(example: Any) -> None:
    SHAPES.clear()
    model = Recording()
    brim.fit(model, torch.optim.SGD(model.parameters()), ram="1GiB", device="cpu", example=example).remove()
    assert set(SHAPES) == {X.shape}


@pytest.mark.parametrize("example", ["text", 7, {1: X}, {X}, iter([X])])
def test_what_no_model_is_called_with_is_refused(example: Any) -> None:
    with pytest.raises(UsageError, match="tensor, a tuple"):
        brim.fit(Recording(), ram="1GiB", device="cpu", example=example)


def test_named_inputs_of_any_mapping_stay_named() -> None:
    assert isinstance(as_arguments(UserDict(x=X)), dict)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", lambda self: self)
        assert set(_named_inputs(UserDict(x=X), torch.float32)) == {"x"}


def test_a_size_to_make_room_for_is_no_example(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="Inputs"):
        brim.load(tmp_path, inputs={"input_ids": X})  # type: ignore[arg-type]
