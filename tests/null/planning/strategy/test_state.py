"""What a run is beside its weights: put back, it goes on bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.errors import ModelError
from brim.planning.strategy.state import (
    optimizer_numbers,
    optimizer_tensors,
    restore_optimizer,
    restore_rng,
    restore_settings,
    rng_state,
)
from brim.run.checkpoint.contents import model_tensors
from brim.run.checkpoint.reading import latest, layout_of
from brim.run.checkpoint.saver import Checkpointer, Tensors
from support.trained import same_state


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 8) * random.random() + np.random.rand()).square().mean().backward()
        optimizer.step()


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def named(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.99), amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    ],
    ids=["amsgrad", "fused", "sgd", "momentum", "adafactor", "rmsprop"],
)
def test_training_goes_on_bit_for_bit_after_a_restart(tmp_path: Path, make: object) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
    optimizer = make(model.parameters())  # type: ignore[operator]
    stepped(model, optimizer, 3)
    names = named(model)
    state = {"rng": rng_state(), "optimizer": optimizer_numbers(optimizer, names)}
    kept = Tensors(
        stem="optimizer",
        layout=layout_of(dict(optimizer_tensors(optimizer, names))),
        values=optimizer_tensors(optimizer, names),
    )
    with Checkpointer(tmp_path) as keeper:
        keeper.save(3, [model_tensors(model), kept], state=state)
    stepped(model, optimizer, 3)

    found = latest(tmp_path)
    again = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
    other = make(again.parameters())  # type: ignore[operator]
    found.read_into("model", dict(again.named_parameters()))
    restore_optimizer(other, named(again), found.state["optimizer"], found.tensors("optimizer"))
    restore_rng(found.state["rng"])
    stepped(again, other, 3)
    assert same_state(again, model)
    assert settings(other) == settings(optimizer)
    ours, theirs = other.state_dict()["state"], optimizer.state_dict()["state"]
    assert list(ours) == list(theirs)
    for index, state in theirs.items():
        assert ours[index].keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(ours[index][k]), torch.as_tensor(v)) for k, v in state.items())


def test_another_optimizer_is_refused_and_unchanged() -> None:
    model = torch.nn.Linear(3, 2)
    names = named(model)
    numbers = optimizer_numbers(torch.optim.AdamW(model.parameters(), lr=0.25), names)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    for other, said in (
        (torch.optim.SGD(model.parameters()), "It is of AdamW, not of SGD"),
        (torch.optim.AdamW(groups), "1 parameter groups, not 2"),
        (
            torch.optim.AdamW([model.weight]),
            "is bias in the checkpoint, missing in this training",
        ),
        (torch.optim.AdamW([model.bias, model.weight]), "is weight in the checkpoint, bias in this training"),
    ):
        before = str(other.state_dict())
        with pytest.raises(ModelError, match=said):
            restore_optimizer(other, names, numbers, [])
        assert str(other.state_dict()) == before
    same = torch.optim.AdamW(model.parameters())
    with pytest.raises(ModelError, match="exp_avg of other"):
        restore_optimizer(same, names, numbers, [("other.exp_avg", torch.ones(1))])
    restore_settings(same, names, numbers)
    assert same.param_groups[0]["lr"] == 0.25 and same.param_groups[0]["betas"] == (0.9, 0.999)
