"""``brim.fit(model, optimizer)``: a loop of the user's own, unchanged, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.errors import BudgetError, UsageError

MIB = 1 << 20


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)) for _ in range(8)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(8, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("example", [None, (torch.zeros(8, 256),)], ids=["reserve", "example"])
@pytest.mark.parametrize(
    ("budget", "states"),
    [
        ({"device": "cpu", "ram": 64 * MIB}, "keep"),
        ({"device": "cpu", "ram": int(6.5 * MIB)}, "disk"),
        ({"device": "emulated", "vram": int(6.5 * MIB), "ram": 64 * MIB}, "ram"),
    ],
    ids=["all fits", "states on disk", "states in RAM"],
)
def test_the_loop_stays_and_so_do_its_numbers(
    budget: dict[str, Any], states: str, example: tuple[torch.Tensor] | None
) -> None:
    twin, plain = make()
    wanted = loop(twin, plain)
    model, optimizer = make()
    handle = brim.fit(model, optimizer, example=example, activations=None if example else "256KiB", **budget)
    assert model.brim is optimizer.brim is handle
    assert handle.plan.choices("optimizer_offload")[""] == states
    assert handle.plan.task == "train"
    words = "everything in memory" if states == "keep" else f"optimizer states in {states}"
    assert words in handle.summary()
    assert repr(handle) == f"<Fitted: Sequential, {handle.summary()}>"
    assert handle.summary() in handle._repr_html_()
    assert loop(model, optimizer) == wanted
    handle.remove()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    assert not hasattr(model, "brim") and not hasattr(optimizer, "brim")
    assert loop(model, optimizer) == loop(twin, plain)


def test_nothing_fits_says_what_would() -> None:
    model, optimizer = make()
    with pytest.raises(BudgetError) as caught:
        brim.fit(model, optimizer, ram=64 << 10, device="cpu", activations=0)
    assert caught.value.smallest_bytes["ram"] > 64 << 10


@pytest.mark.thorough
def test_the_budget_of_a_refusal_is_what_the_plan_within_it_takes() -> None:
    def fit(ram: int) -> Any:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)], nn.Linear(256, 8))
        for index, part in enumerate(model):
            part.requires_grad_(index in (3, 8))  # frozen weights stream, as below adapters
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        return brim.fit(model, optimizer, ram=ram, device="cpu", example=(torch.zeros(64, 256),))

    with pytest.raises(BudgetError, match="with 1 MiB of RAM") as caught:
        fit(MIB)
    smallest_bytes = caught.value.smallest_bytes["ram"]
    handle = fit(smallest_bytes)
    assert handle.plan.promise.peak_bytes["ram"] == smallest_bytes
    assert "stream:disk" in handle.plan.choices("weight_streaming").values()
    handle.remove()


def test_only_an_optimizer_is_taken_for_one() -> None:
    model, _ = make()
    with pytest.raises(UsageError, match="Linear"):
        brim.fit(model, nn.Linear(2, 2))  # type: ignore[call-overload]


def test_a_second_time_is_refused() -> None:
    model, optimizer = make()
    handle = brim.fit(model, optimizer, ram="64MiB", device="cpu")
    with pytest.raises(UsageError, match="fitted already"):
        brim.fit(model, optimizer, ram="64MiB", device="cpu")
    handle.remove()


class Masked(nn.Module):
    """Looks into its mask, as models do that leave a mask of ones away."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = make()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x if bool(mask.all()) else x * mask[:, None])


def test_a_step_that_depends_on_a_mask_is_foreseen_with_the_example_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", str(tmp_path))
    mask = torch.ones(8, dtype=torch.long)

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        return loop(lambda x: model(x, mask), optimizer)

    twin = Masked()
    wanted = losses(twin, torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True))
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    handle = brim.fit(model, optimizer, device="cpu", ram=int(6.5 * MIB), example=(torch.zeros(8, 256), mask))
    assert handle.choice.states == "disk"
    assert losses(model, optimizer) == wanted
    handle.remove()
