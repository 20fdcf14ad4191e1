"""Whole trainings of a small model, by brim and by the loop that everybody writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from brim.planning.strategy.choice import Choice
from brim.planning.strategy.prediction import SimulatedStep, TrainingStep
from brim.run.data.dataset import Batches, open_data
from brim.run.train.loop import Request

SEQ, BATCH, LR = 32, 2, 1e-3


def write_text(path: Path) -> Path:
    path.write_text("".join(f"{number} little pieces of text, one after another. " for number in range(60)))
    return path


def request(model: Path, data: Path, output: Path, **options: Any) -> Request:
    settings = {"batch": BATCH, "seq": SEQ, "steps": 3, "lr": LR, "ram": "1GiB", "device": "cpu"}
    return Request(model=model, data=data, output=output, **{**settings, **options})


def plain(
    model: Path, data: Path, steps: int, *, seq: int = SEQ, batch: int = BATCH, lr: float = LR, sgd: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and final parameters and stored buffers, of plain PyTorch with everything in memory."""
    batches = Batches(open_data(data, AutoTokenizer.from_pretrained(model), seq), batch, seed=0, pad_to=seq)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_pretrained(model).train()
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(module.parameters(), lr=lr, fused=True)
    losses = []
    for _ in range(steps):
        loss = module(**next(batches)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, module.state_dict()


def remember_predictions() -> Callable[[], None]:
    """From now on, what a choice takes is predicted once for each kind of training: it is most of a tiny one.

    Returns what ends it."""
    simulate, made = TrainingStep.simulate, {}

    def remembered(self: TrainingStep, choice: Choice) -> SimulatedStep:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        key = (type(self.model), trained, self.batch, self.clip_norm, self.hardware.name, repr(choice))
        if key not in made:
            made[key] = simulate(self, choice)
        return made[key]

    TrainingStep.simulate = remembered  # type: ignore[method-assign]
    return lambda: setattr(TrainingStep, "simulate", simulate)


@pytest.fixture
def quick_trainings() -> Iterator[None]:
    """For tests of many trainings: what each choice takes is predicted once."""
    forget = remember_predictions()
    yield
    forget()


def course(output: Path) -> list[tuple[int, float]]:
    """Step and loss, as ``metrics.jsonl`` has them."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def weights(output: Path) -> dict[str, torch.Tensor]:
    """What was trained."""
    found: Path = next(output.glob("*model.safetensors"))
    return load_file(found)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two output folders hold the same model, bit for bit."""
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


if __name__ == "__main__":  # MODEL DATA STEPS SEQ BATCH LR: in a process of its own, for models of some size
    folder, text = Path(sys.argv[1]), Path(sys.argv[2])
    numbers = {"seq": int(sys.argv[4]), "batch": int(sys.argv[5]), "lr": float(sys.argv[6])}
    print(json.dumps(plain(folder, text, int(sys.argv[3]), **numbers)[0]))  # type: ignore[arg-type]
