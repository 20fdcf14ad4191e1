"""Training torchvision's CNNs at 224 px with Adam in fp32, memory of the whole device (GPUMemNet's table).

The GPU's context and libraries are in the measurement and the card is not named: expect no more than the right size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import brim
from support.accuracy import ground_truth
from support.accuracy.table import MIB, Row
from support.zoo import MODELS

# Inception v3 is left out: with its auxiliary classifier it does not run at 224 px.
_NAMES = {
    "vgg16": "vgg16", "resnet50": "resnet50", "Xception": "xception", "mobilenetV2": "mobilenet_v2",
    "efficientnet": "efficientnet_b0",
}  # fmt: skip


def build(name: str, batch: int) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        model = MODELS[name]().to("cuda")
        optimizer = torch.optim.Adam(model.parameters())
        loss_of = nn.CrossEntropyLoss()

        def step() -> None:
            images = torch.empty(batch, 3, 224, 224).to("cuda")
            labels = torch.zeros(batch, dtype=torch.int64).to("cuda")
            optimizer.zero_grad()
            outputs = model(images)
            loss = loss_of(outputs[0] if isinstance(outputs, tuple) else outputs, labels)
            loss.backward()
            optimizer.step()

        return step

    return make


def _cases() -> Iterator[tuple[str, dict[str, str]]]:
    """The table leaves a model's name out on its second row."""
    name = ""
    for row in ground_truth.rows("gpumemnet_torchvision.csv"):
        name = row[""] or name
        yield name, row


def rows(only: str = "") -> list[Row]:
    """The rows of CNNs."""
    found = []
    for name, row in _cases():
        if name not in _NAMES or only not in name.lower():
            continue
        started = time.perf_counter()
        made = brim.trace(build(_NAMES[name], int(row["batch_size"])), steps=2, target="cuda", capability=(8, 0))
        measured = float(row["Actual GPU memory"]) * MIB
        rivals = {
            label: float(row[column]) * MIB / measured - 1
            for label, column in (("GPUMemNet", "GPUMemNet "), ("FakeTensor", "FakeTensor"), ("Horus", "Horus"))
            if row[column] != "-"
        }
        found.append(Row(
            name=f"{name} {row['batch_size']}",
            predicted_bytes=brim.simulate(made).peak_bytes.reserved,
            measured_bytes=measured, seconds=time.perf_counter() - started, rivals=rivals,
        ))  # fmt: skip
    return found


__all__ = ["build", "rows"]
