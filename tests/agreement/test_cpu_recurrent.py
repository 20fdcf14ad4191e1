"""LSTMs on the CPU: what is predicted against what a real run allocates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import brim
from support.cpu.truth import measured_peak_bytes


def build(layers: int, both_ways: bool, train: bool, inputs: int, hidden: int) -> Callable[[], Callable[[], None]]:
    def made() -> Callable[[], None]:
        model = nn.LSTM(inputs, hidden, num_layers=layers, bidirectional=both_ways)
        head = nn.Linear(hidden * (1 + both_ways), 10)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        source = torch.randn(48, 12, inputs)

        def step() -> None:
            with torch.set_grad_enabled(train):
                loss = head(model(source)[0]).sum()
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return step

    return made


# Sizes whose rows are whole cache lines, are not, and are widened because they share the cache's sets.
@pytest.mark.parametrize(
    ("layers", "both_ways", "train", "inputs", "hidden"),
    [
        (1, False, True, 32, 64),
        (2, False, True, 100, 128),
        (1, True, True, 40, 24),
        (1, False, True, 256, 256),
        (2, False, False, 32, 64),
    ],
)
def test_an_lstm_is_predicted_within_a_tenth_of_a_percent(
    layers: int, both_ways: bool, train: bool, inputs: int, hidden: int
) -> None:
    made = build(layers, both_ways, train, inputs, hidden)
    predicted = brim.simulate(brim.trace(made, steps=2, target="cpu")).peak_bytes.allocated
    assert predicted == pytest.approx(measured_peak_bytes(made, steps=2), rel=1e-3)
