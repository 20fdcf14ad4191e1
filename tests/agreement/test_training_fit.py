"""``brim.fit`` of a convolutional network: activations in place, found, predicted and put into force in one way.

A ReLU keeps its result, which the next layer keeps as well; a leaky one keeps its input, and in place it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.core import Hardware
from brim.core.hardware import RAM
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.prediction import TrainingStep, works_in_place
from brim.run import fit as fitting_door
from brim.techniques.blocks import find_blocks
from brim.techniques.streaming.weight_streaming import Weights
from support.cpu.truth import measured_peak_bytes


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 12, 3, padding=1)]
        for kind in (nn.LeakyReLU(0.1), nn.ReLU6(), nn.ReLU(), nn.LeakyReLU(0.2)):
            layers += [kind, nn.Conv2d(12, 12, 3, padding=1)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(12, 7)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(pixel_values).mean((2, 3))), labels)


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"pixel_values": torch.randn(8, 3, 48, 48), "labels": torch.zeros(8, dtype=torch.long)}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Convolutional().train()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> float:
    loss: torch.Tensor = model(**inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def predicted(hardware: Hardware, in_place: bool) -> int:
    model, _ = make()
    training_step = TrainingStep(
        name="net", model=model, partition=find_blocks(model), weights=Weights(), batch=1, hardware=hardware,
        optimizer=lambda twin: torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9),
        inputs=lambda count: {name: torch.empty_like(value) for name, value in inputs.items()},
    )  # fmt: skip
    inputs = example()
    return training_step.predict(Choice(in_place=in_place)).peak_bytes[RAM]


@pytest.mark.filterwarnings("ignore")
def test_the_rung_between_is_taken_predicted_and_kept(
    known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting_door, "machine", lambda device: known_machine)
    plain, in_place = predicted(known_machine, False), predicted(known_machine, True)
    assert works_in_place(make()[0], example())
    assert in_place < 0.95 * plain
    handles: list[Any] = []

    def build(budget_bytes: int) -> Callable[[], Callable[[], Any]]:
        def made() -> Callable[[], Any]:
            model, optimizer = make()
            inputs = example()
            if budget_bytes:
                handles.append(brim.fit(model, optimizer, ram=budget_bytes, example=inputs))
            return lambda: step(model, optimizer, inputs)

        return made

    measured = measured_peak_bytes(build((plain + in_place) // 2), steps=2)
    assert handles[0].choice == Choice(in_place=True, streaming=handles[0].choice.streaming)
    assert handles[0].plan.promise.peak_bytes[RAM] == in_place
    assert in_place == pytest.approx(measured, rel=0.02)
    assert measured_peak_bytes(build(0), steps=2) == pytest.approx(plain, rel=0.02)


def test_its_losses_and_weights_are_those_of_plain_pytorch(
    known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting_door, "machine", lambda device: known_machine)
    (twin, plain), (model, optimizer) = make(), make()
    between = (predicted(known_machine, False) + predicted(known_machine, True)) // 2
    handle = brim.fit(model, optimizer, ram=between, example=example())
    assert handle.choice.in_place
    inputs = example()
    torch.manual_seed(1)
    losses = [step(twin, plain, inputs) for _ in range(3)]
    torch.manual_seed(1)
    assert [step(model, optimizer, inputs) for _ in range(3)] == losses
    handle.remove()
    for (name, one), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
