"""Generators of a program are found wherever it holds them, and have their states back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import brim
from brim.random_numbers import all_generators, default_generators, restored, state_of

HELD: dict[str, Any] = {}  # of the program, filled in a test: what was imported before is set aside by gc.freeze


@pytest.fixture(autouse=True)
def _held() -> None:
    HELD.update(torch=torch.Generator(), numpy=np.random.default_rng(0), old=np.random.RandomState(0))


def draw(generators: list[Any]) -> list[float]:
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    for one in generators:
        drawn.append(float(torch.rand((), generator=one)) if isinstance(one, torch.Generator) else one.random())
    return drawn


def test_a_program_draws_what_it_would_have_drawn() -> None:
    in_closure = random.Random(3)
    own = [*HELD.values(), in_closure]
    with restored(all_generators()):
        first = draw(own)
    assert draw(own) == first
    with restored(default_generators()):
        second = draw(own)
    third = draw(own)
    assert third[:3] == second[:3] and third[3:] != second[3:]


def test_generators_without_a_state_are_left_out() -> None:
    system = random.SystemRandom()
    assert all(one is not system for one in all_generators())
    assert all(state_of(one) is not None for one in all_generators())


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + torch.rand(x.shape, generator=HELD["torch"]) * HELD["numpy"].random()
        return x


def test_fitting_a_model_draws_no_numbers_of_the_program() -> None:
    model = Noisy()
    before = HELD["torch"].get_state(), HELD["numpy"].bit_generator.state
    brim.fit(model, ram="64MiB", device="cpu", example=torch.zeros(2, 256)).remove()
    assert torch.equal(HELD["torch"].get_state(), before[0])
    assert HELD["numpy"].bit_generator.state == before[1]
