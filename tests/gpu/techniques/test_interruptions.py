"""What comes in the middle: memory that runs out in a part of a step, a call that is repeated, a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.errors import UnsupportedError
from brim.run.script.retry import repeat_no_more, repeat_when_out_of_memory
from support.placed import place_least

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
X = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))


class RunningOut(torch.autograd.Function):
    """Passes a tensor on; memory runs out in the pass that ``where`` names."""

    where = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if RunningOut.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if RunningOut.where == "backward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient


class Passing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = RunningOut.apply(x)
        return made


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*layers[:4], Passing(), *layers[4:])


@torch.no_grad()
def test_a_forward_pass_that_ran_out_of_memory_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = net().cuda()(X.cuda()), net()
    handle = place_least(model)
    for _ in range(3):
        monkeypatch.setattr(RunningOut, "where", "forward")
        with pytest.raises(torch.OutOfMemoryError):
            model(X.cuda())
        monkeypatch.setattr(RunningOut, "where", "")
        assert torch.equal(model(X.cuda()), expected)
    handle.remove()


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_step_that_ran_out_of_memory_is_made_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are away and the weights too; before the next try gradients are zeroed, as after any error."""
    model, twin = net(), net().cuda()
    optimizer, plain = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, twin))
    more = {"ram": "1GiB", "device": "cuda", "activations": "256KiB"}
    with pytest.raises(brim.errors.BudgetError) as refused:
        brim.fit(model, optimizer, vram=1, **more)
    brim.fit(model, optimizer, vram=refused.value.smallest_bytes["vram"], **more)
    stepped = torch.optim.AdamW.step

    def step(one: nn.Module, chosen: torch.optim.Optimizer) -> None:
        chosen.zero_grad()
        one(X.cuda()).square().mean().backward()
        chosen.step()

    for _ in range(2):
        step(model, optimizer)
        step(twin, plain)
        if where == "optimizer":
            monkeypatch.setattr("brim.techniques.optimizer_offload.technique.raw_step", lambda _: _run_out)
            monkeypatch.setattr(torch.optim.AdamW, "step", _run_out)
        else:
            monkeypatch.setattr(RunningOut, "where", where)
        before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        with pytest.raises(torch.OutOfMemoryError):
            step(model, optimizer)
        monkeypatch.undo()
        assert torch.optim.AdamW.step is stepped
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
    step(model, optimizer)
    step(twin, plain)
    model.brim.remove()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.cuda(), theirs, rtol=1e-4, atol=1e-6, msg=name)


def _run_out(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@torch.no_grad()
def test_a_repeated_call_draws_what_the_first_one_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Dropout(), Passing()).train()
    x = torch.ones(64, 64, device="cuda")
    torch.manual_seed(7)
    expected = model(x)

    def smaller() -> bool:
        repeat_no_more(model)
        monkeypatch.setattr(RunningOut, "where", "")
        return True

    repeat_when_out_of_memory(model, smaller, (x,))
    monkeypatch.setattr(RunningOut, "where", "forward")
    torch.manual_seed(7)
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_graph_of_a_streamed_model_is_refused() -> None:
    model = net()
    handle = place_least(model)
    x = X.cuda()
    expected = model(x)
    with pytest.raises(UnsupportedError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x * 2)
    assert torch.equal(model(x), expected)
    handle.remove()
