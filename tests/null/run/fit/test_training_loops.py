"""Loops of all kinds around what ``brim.fit`` has fitted: the numbers of plain PyTorch, or one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import brim
from brim.errors import BrimError
from brim.planning.strategy.step import Fitted

KIB, WIDTH, STEPS = 1 << 10, 256, 4
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[float]]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def losses_of(model: nn.Module, count: int = 1) -> list[torch.Tensor]:
    return [model(torch.randn(4, WIDTH)).square().mean() for _ in range(count)]


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(STEPS):
        for _ in range(3):
            (loss,) = losses_of(model)
            (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(STEPS):
        (loss,) = losses_of(model)
        loss.backward()
        found += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def zeroing_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        (loss,) = losses_of(model)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def scheduling(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS + 1)
    found = []
    for _ in range(STEPS):
        (loss,) = losses_of(model)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found += [loss.item(), optimizer.param_groups[0]["lr"]]
    return found


def scaling(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for step in range(STEPS):
        (loss,) = losses_of(model)
        scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()  # one step is to be skipped
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [loss.item(), scaler.get_scale()]
    return found


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(STEPS):
        (loss,) = losses_of(model)
        loss.backward()
        model.eval()
        with torch.no_grad():
            found += [one.item() for one in losses_of(model, 2)]
        model.train()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def saving(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(STEPS):
        (loss,) = losses_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), *(value.double().sum().item() for value in model.state_dict().values())]
        for state in optimizer.state_dict()["state"].values():
            found += [value.double().sum().item() for value in state.values()]
    return found


def loading(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Back to where the first step left model and optimizer, again and again."""
    found: list[float] = []
    kept: dict[str, Any] = {}
    for step in range(STEPS):
        (loss,) = losses_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            states = optimizer.state_dict()
            states["state"] = {k: {key: v.clone() for key, v in one.items()} for k, one in states["state"].items()}
        else:
            model.load_state_dict(kept)
            optimizer.load_state_dict(states)
        found.append(loss.item())
    return found


def closing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (loss,) = losses_of(model)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(STEPS)]  # type: ignore[union-attr]


def changing_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
        (loss,) = losses_of(model)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        found.append(loss.item())
    return found


def looking(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Gradients read, changed and made anew one by one, as clipping of values and noise do."""
    found = []
    for step in range(STEPS):
        (loss,) = losses_of(model)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.norm().item())
            parameter.grad /= 3
            parameter.grad.mul_(1.5)
            if step == 1:
                parameter.grad = parameter.grad * 0.5
            elif step == 2:
                parameter.grad.add_(torch.full_like(parameter, 1e-3))
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


LOOPS: dict[str, Loop] = {
    function.__name__: function
    for function in (
        accumulating, clipping, zeroing_in_place, scheduling, scaling, evaluating, saving, loading, closing,
        changing_rate, looking,
    )
}  # fmt: skip
# 8 x 257 KiB of weights, as much of gradients, twice as much of states.
BUDGETS: dict[str, dict[str, Any]] = {
    "all fits": {"device": "cpu", "ram": 65536 * KIB},
    "states on disk": {"device": "cpu", "ram": 6500 * KIB},
    "gradients on disk": {"device": "cpu", "ram": 4000 * KIB},
    "weights from disk": {"device": "cpu", "ram": 3100 * KIB},
    "states in RAM": {"device": "emulated", "vram": 5600 * KIB, "ram": 32768 * KIB},
    "weights from RAM": {"device": "emulated", "vram": 1700 * KIB, "ram": 32768 * KIB},
}
AWAY = ("gradients on disk", "weights from disk", "weights from RAM")


def fitted(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Fitted]:
    model, optimizer = make()
    handle = brim.fit(model, optimizer, activations=64 * KIB, **BUDGETS[name])
    choice = handle.choice
    assert (choice.gradients != "keep") == (name in AWAY), choice
    assert choice.streams == ("weights" in name), choice
    assert (choice.states != "keep") == (name != "all fits"), choice
    return model, optimizer, handle


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("name", BUDGETS)
def test_every_loop_has_the_numbers_of_plain_pytorch(name: str) -> None:
    for kind, loop in LOOPS.items():
        twin, plain = make()
        torch.manual_seed(1)
        wanted = loop(twin, plain)
        model, optimizer, handle = fitted(name)
        torch.manual_seed(1)
        try:
            found = loop(model, optimizer)
        except BrimError as error:
            raise AssertionError(f"{kind} was refused: {error}") from error
        assert found == wanted, kind
        for pool in (handle.memory.compute, handle.memory.ram):
            assert pool.peak_bytes <= pool.limit_bytes
        handle.remove()
        for (path, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter, other), (kind, path)


def test_clipping_by_the_handle_where_gradients_are_away() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], torch.Tensor]) -> list[float]:
        torch.manual_seed(1)
        found = []
        for _ in range(STEPS):
            (loss,) = losses_of(model)
            loss.backward()
            found += [loss.item(), clip().item()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    twin, plain = make()
    wanted = loop(twin, plain, lambda: nn.utils.clip_grad_norm_(twin.parameters(), 0.01))
    model, optimizer, handle = fitted("gradients on disk")
    assert loop(model, optimizer, lambda: handle.clip_grad_norm_(0.01)) == wanted
    handle.remove()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["weights from disk", "weights from RAM"])
def test_streamed_weights_take_what_was_promised(name: str) -> None:
    """An example makes the promise a prediction: no plan is refused that would fit, and no pool is overrun."""
    twin, plain = make()
    torch.manual_seed(1)
    wanted = evaluating(twin, plain)
    model, optimizer = make()
    handle = brim.fit(model, optimizer, example=(torch.zeros(4, WIDTH),), **BUDGETS[name])
    assert handle.choice.streams
    torch.manual_seed(1)
    assert evaluating(model, optimizer) == wanted
    promised = handle.plan.promise.peak_bytes
    assert promised["disk"] == handle.memory.scratch().peak_bytes
    if handle.memory.host is not None:
        assert promised["ram"] == handle.memory.host.peak_bytes
    assert handle.memory.compute.peak_bytes <= promised[handle.memory.compute.tier]
    handle.remove()


def test_a_scheduler_that_was_there_before() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        torch.manual_seed(1)
        found = []
        for _ in range(STEPS):
            (loss,) = losses_of(model)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def scheduled() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model, optimizer = make()
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    wanted = loop(*scheduled())
    for name in ("all fits", "states on disk", "weights from RAM"):
        model, optimizer, scheduler = scheduled()
        stepped: list[int] = []
        optimizer.register_step_post_hook(lambda *_, stepped=stepped: stepped.append(1))
        handle = brim.fit(model, optimizer, activations=64 * KIB, **BUDGETS[name])
        assert not stepped, "planning stepped the user's own optimizer"
        assert loop(model, optimizer, scheduler) == wanted
        assert len(stepped) == STEPS
        handle.remove()


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", 0.3)


@pytest.mark.thorough
@pytest.mark.parametrize("compute", [nn.utils.weight_norm, pruned])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_a_hook_computes(compute: Callable[[nn.Module], nn.Module]) -> None:
    found = []
    for ram in (None, 8000 * KIB):
        torch.manual_seed(0)
        layers = [(compute(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        model = nn.Sequential(*[nn.Sequential(*block) for block in layers])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if ram is not None:
            example = (torch.zeros(4, WIDTH),)
            choice = brim.fit(model, optimizer, device="cpu", ram=ram, example=example).choice
            assert choice.states != "keep", choice
        found.append(zeroing_in_place(model, optimizer))
    assert found[0] == found[1]
