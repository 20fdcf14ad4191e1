"""Large parameters that are updated in parts: the same weights and states as in memory, bit for bit, in less room."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import BrimError
from brim.techniques.offloaded_tensor import OffloadedTensor
from brim.techniques.optimizer_offload.state_blocks import state_blocks
from brim.techniques.optimizer_offload.technique import apply
from brim.techniques.optimizer_offload.trial import Trial
from support.failing import Allocations, Calls
from support.offloaded import OPTIMIZERS, assert_same, assert_same_state, machine

BOUND_BYTES = 8 << 10
UNCUT = {
    "adafactor",
    "eight_bits",
    "wrapped_eight_bits",
    "adamw fused",
}  # its kernel rounds what fills no vector in another way


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 131), nn.Tanh(), nn.Linear(131, 67), nn.Tanh(), nn.Linear(67, 3, bias=False))


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": [model[2].weight, model[0].bias], "lr": 3e-3}, {"params": [model[0].weight, model[4].weight]}]


def backward(model: nn.Module, step: int) -> float:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, final: Any = None) -> list[float]:
    losses = []
    for step in steps:
        if final is None:
            losses.append(backward(model, step))
        else:
            with final():
                losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def units(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return max(len(block.units) for block in state_blocks(model, optimizer, block_bytes=BOUND_BYTES))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("gradients", "early"), [("keep", False), ("disk", False), ("keep", True)])
def test_parts_are_updated_as_the_whole_is(name: str, gradients: str, early: bool, tmp_path: Path) -> None:
    model, twin = make(), make()
    optimizer, plain = OPTIMIZERS[name](groups(model)), OPTIMIZERS[name](groups(twin))
    assert (units(model, optimizer) > 3) == (name not in UNCUT)
    want = train(twin, plain, range(4))
    memory = machine("cpu", tmp_path)
    handle = apply(model, optimizer, memory, states="disk", gradients=gradients, block_bytes=BOUND_BYTES)
    assert train(model, optimizer, range(4), handle.final if early else None) == want
    assert_same(model, twin)
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    handle.remove()
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    assert train(model, optimizer, range(4, 6)) == train(twin, plain, range(4, 6))
    assert memory.ram.held_bytes == 0
    memory.close()


class PerParameterNorm(torch.optim.SGD):
    """As LARS and LAMB: a step as long as the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm() * p.norm(), alpha=-group["lr"])


class OwnBooks(torch.optim.SGD):
    """Keeps its momentum by parameter, but not in ``state``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.books: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.books[id(p)] = self.books.get(id(p), torch.zeros_like(p)) * 0.9 + p.grad
                    p.add_(self.books[id(p)], alpha=-group["lr"])


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("kind", [PerParameterNorm, OwnBooks])
def test_what_is_not_the_same_in_parts_is_not_cut(kind: Any, on_gpu: bool) -> None:
    model = make()
    optimizer = kind(model.parameters(), lr=0.1)
    assert not Trial(optimizer, on_gpu=on_gpu).is_elementwise(0, model[0].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_what_a_gpu_updates_in_parts_does_not_depend_on_the_cpu(kind: Any, dtype: torch.dtype) -> None:
    """The CPU's vectorized kernels of these round the elements after the last vector otherwise than a vector's."""
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    assert Trial(kind([parameter], fused=True), on_gpu=True).is_elementwise(0, parameter)


@pytest.mark.parametrize("dims", [1, 2, 4])
def test_a_trial_answers_by_shape(dims: int) -> None:
    parameter = nn.Parameter(torch.zeros((2,) * dims))
    assert Trial(torch.optim.AdamW([parameter])).is_elementwise(0, parameter)
    assert Trial(torch.optim.Adafactor([parameter])).is_elementwise(0, parameter) is False


def test_the_room_for_states_is_that_of_a_part(tmp_path: Path) -> None:
    peaks = []
    for bound in (1 << 20, BOUND_BYTES):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128, bias=False))
        optimizer = torch.optim.AdamW(model.parameters())
        memory = machine("cpu", tmp_path)
        handle = apply(model, optimizer, memory, states="disk", block_bytes=bound)
        for step in range(2):
            model(torch.ones(1, 128)).sum().backward()
            optimizer.step()
            assert type(optimizer.state[model[0].weight]["exp_avg"]) is OffloadedTensor, step
        peaks.append(memory.ram.peak_bytes)
        handle.remove()
        memory.close()
    assert peaks == [2 * 4 * 128 * 128, 2 * BOUND_BYTES]


def test_states_are_loaded_read_and_replaced_in_parts(tmp_path: Path) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(groups(m), lr=1e-2, amsgrad=True) for m in (model, twin))
    train(twin, plain, range(3))
    model.load_state_dict(twin.state_dict())
    memory = machine("cpu", tmp_path)
    handle = apply(model, optimizer, memory, states="disk", block_bytes=BOUND_BYTES)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # else they share their counters
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    weight, of_twin = model[2].weight, twin[2].weight
    optimizer.state[weight]["exp_avg"] = torch.full_like(weight, 0.25)  # as a program that resets its momentum does
    plain.state[of_twin]["exp_avg"] = torch.full_like(of_twin, 0.25)
    assert train(model, optimizer, range(3, 6)) == train(twin, plain, range(3, 6))
    assert type(optimizer.state[weight]["exp_avg"]) is OffloadedTensor
    for name, value in list(handle.iter_state()):
        handle.load_state(name, value)
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    handle.remove()
    assert_same(model, twin)
    memory.close()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_gradient_of_a_parameter_in_parts(tmp_path: Path) -> None:
    def build() -> nn.ParameterList:
        torch.manual_seed(1)
        return nn.ParameterList([nn.Parameter(torch.randn(64, 48))])

    model, twin = build(), build()
    optimizer, plain = (torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (model, twin))
    memory = machine("cpu", tmp_path)
    handle = apply(model, optimizer, memory, states="disk", block_bytes=4096)
    assert max(len(block.units) for block in handle.blocks.values()) == 3
    for step in range(4):
        ids = torch.tensor([step, 7, 63])
        for one, its in ((model, optimizer), (twin, plain)):
            nn.functional.embedding(ids, one[0], sparse=step % 2 == 0).square().sum().backward()
            its.step()
            its.zero_grad()
    assert_same(model, twin)
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    handle.remove()
    memory.close()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("what", ["pwrite", "preadv", "memory"])
def test_whatever_fails_once_the_step_goes_on_with_the_next_part(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = make()
    plain = OPTIMIZERS[name](groups(twin))
    train(twin, plain, range(2))
    code = errno.ENOSPC if what == "pwrite" else errno.EIO
    fault = Allocations(monkeypatch) if what == "memory" else Calls(monkeypatch, what, code)
    n, total, seen = 0, 1, 0
    while n <= total:
        model, memory = make(), machine("cpu", tmp_path)
        optimizer = OPTIMIZERS[name](groups(model))
        fault.fail(0)
        handle = apply(model, optimizer, memory, states="disk", block_bytes=BOUND_BYTES, buffer_bytes=1)
        fault.fail(n)
        for step in range(2):
            backward(model, step)
            for _ in range(9):
                try:
                    optimizer.step()
                    break
                except BrimError:
                    seen += 1
            optimizer.zero_grad()
        total = fault.count if n == 0 else total
        fault.fail(0)
        handle.remove()
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        assert memory.ram.held_bytes == 0
        memory.close()
        n += 1
    assert total > 0 or what == "memory"
    # A write that has failed by the time its room is asked for is tried again, and nobody needs to be told.
    assert seen > 0 or what == "pwrite" or total == 0
