"""What a first step leaves in an optimizer, made without stepping every parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from brim.techniques.meta_copy import make_states
from brim.techniques.precision import states_dtype

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
}


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)], nn.Linear(8, 3))


def facts(optimizer: torch.optim.Optimizer) -> list[Any]:
    held = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            held.append({key: _facts(value) for key, value in state.items()})
    return held


def _facts(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else type(value)


@pytest.mark.parametrize("name", MAKERS)
def test_states_are_those_of_a_step_and_each_has_its_own_memory(name: str) -> None:
    stepped, made = model(), model()
    optimizers = [MAKERS[name](one.parameters()) for one in (stepped, made)]
    stepped(torch.ones(2, 8)).sum().backward()
    optimizers[0].step()
    before = [p.detach().clone() for p in made.parameters()]
    make_states(optimizers[1], torch.device("cpu"))
    assert facts(optimizers[1]) == facts(optimizers[0])
    tensors = [v for state in optimizers[1].state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(made.parameters(), before, strict=True))


class Stepping(torch.optim.Optimizer):
    """``shared``: one tensor is every parameter's."""

    def __init__(self, params: Any, shared: bool) -> None:
        super().__init__(params, {})
        self.calls, self.common = 0, torch.zeros(4) if shared else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.calls += 1
                self.state[parameter]["mine"] = torch.zeros(4) if self.common is None else self.common


@pytest.mark.parametrize(("shared", "calls"), [(False, 4 + 2), (True, 12)])
def test_only_states_that_are_alike_and_apart_are_copied(shared: bool, calls: int) -> None:
    optimizer = Stepping(model().parameters(), shared)
    make_states(optimizer, torch.device("cpu"))
    assert optimizer.calls == calls
    held = {state["mine"].data_ptr() for state in optimizer.state.values()}
    assert len(held) == (1 if shared else 12)


class Packed(torch.Tensor):
    """A state around another tensor, which knows no operation but those that its optimizer needs: none here."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Packed:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a packed state")


class Packing(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["packed"] = Packed(torch.zeros_like(parameter))


def test_states_that_wrap_other_tensors_are_made_by_steps_and_never_copied() -> None:
    made = model()
    optimizer = Packing(made.parameters(), {})
    make_states(optimizer, torch.device("cpu"))
    states = [optimizer.state[p]["packed"] for p in made.parameters()]
    assert len({id(state.inner) for state in states}) == len(states)


def test_states_of_bfloat16_weights_with_masters_are_float32() -> None:
    made = model().bfloat16()
    optimizer = torch.optim.AdamW(made.parameters())
    make_states(optimizer, torch.device("cpu"), states_dtype("bf16-master"))
    assert {optimizer.state[p]["exp_avg"].dtype for p in made.parameters()} == {torch.float32}
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
