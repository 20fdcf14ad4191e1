"""Activations work in place where that changes no bit, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.errors import UnsupportedError, UsageError
from brim.techniques.activation_offload import inplace as inplace_activations
from brim.techniques.checkpointing import technique as checkpointing
from support import trained


class Net(nn.Module):
    """``how`` is what is done with an activation's input."""

    def __init__(self, how: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act, self.other, self.drop = nn.ReLU(), nn.ReLU(), nn.Dropout(0.5)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.how(self, x))


def with_a_leaf_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    first, second = net.first(x).chunk(2, -1)  # autograd refuses to write to one of several views
    return torch.cat([net.act(first), second.detach() * 0 + 1], -1)


HOWS: dict[str, tuple[Callable[[Net, torch.Tensor], torch.Tensor], list[str]]] = {
    "alone": (lambda net, x: net.act(net.first(x)), ["act"]),
    "of the input": (lambda net, x: net.first(net.act(x)), []),
    "of a weight": (lambda net, x: net.first(x) * net.act(net.first.bias), []),
    "read later by a sum": (lambda net, x: (lambda h: h + net.act(h))(net.first(x)), []),
    "read earlier": (lambda net, x: (lambda h: h * 2 + net.act(h))(net.first(x)), ["act"]),
    "kept by another operation": (lambda net, x: net.act(net.first(x).sigmoid()), []),
    "twice, one after another": (lambda net, x: net.other(net.act(net.first(x))), ["act"]),
    "two of one input": (lambda net, x: (lambda h: net.act(h) + net.other(h))(net.first(x)), ["other"]),
    "one module, safe and not": (lambda net, x: net.act(net.act(net.first(x)) * 2 + net.act(x)), []),
    "the input itself in evaluation": (lambda net, x: (lambda h: net.act(net.drop(h)) + h)(net.first(x)), []),
    "a view that autograd refuses": (with_a_leaf_view, []),
    "a view that is read later": (lambda net, x: (lambda h: net.act(h.view(-1, 3)).view_as(h) + h)(net.first(x)), []),
}


def steps(model: nn.Module, inputs: list[torch.Tensor]) -> list[Any]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = []
    for x in inputs:
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(loss.detach())
    model.eval()
    return [*made, model(inputs[0]).detach(), *(t.detach() for t in model.state_dict().values())]


@pytest.mark.parametrize("name", HOWS)
def test_where_it_is_safe_and_only_there(name: str) -> None:
    how, wanted = HOWS[name]
    results = []
    for applied in (False, True):
        torch.manual_seed(0)
        model = Net(how)
        inputs = [torch.randn(4, 6) for _ in range(5)]
        before = [x.clone() for x in inputs]
        if applied:
            assert list(inplace_activations.apply(model, inputs[0]).names) == wanted
        results.append(steps(model, inputs))
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("module", "gains"),
    [
        (nn.ReLU(), True), (nn.LeakyReLU(0.1), True),
        (nn.SiLU(), False), (nn.Mish(), False), (nn.Hardswish(), False),  # autograd keeps a copy of the input
        (nn.ReLU6(), False), (nn.Hardtanh(), False), (nn.Threshold(0.1, 0.0), False),  # so it does for these
        (nn.ELU(), False),  # its gradient is rounded another way
        (nn.Dropout(0.5), False), (nn.RReLU(), False),  # they draw random numbers
        (nn.GELU(), False),  # has no such form
    ],
)  # fmt: skip
def test_kinds_that_gain(module: nn.Module, gains: bool) -> None:
    state = torch.get_rng_state()
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4))
    state = torch.get_rng_state()
    assert (inplace_activations.apply(model, torch.randn(2, 4, generator=torch.Generator())).names == ("1",)) == gains
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_residual_network(checkpointed: bool) -> None:
    plain, other = trained.make("resnet"), trained.make("resnet")
    if checkpointed:
        checkpointing.apply(other, dict.fromkeys(trained.BLOCKS["resnet"], "full"))
    handle = inplace_activations.apply(other, trained.batch("resnet", 0))
    assert "stem.2" in handle.names
    assert trained.same_state(plain, other)  # the trial has left no trace, in batch norm's statistics least of all
    assert trained.train(other, "resnet") == trained.train(plain, "resnet")
    assert trained.same_state(plain, other)


class Preactivated(nn.Module):
    """Its first operation is an activation of what it was given, which a checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_what_a_checkpoint_keeps_is_not_written_over(kind: str) -> None:
    results = []
    for applied in (False, True):
        torch.manual_seed(0)
        model = Preactivated()
        if applied:
            checkpointing.apply(model, {f"blocks.{i}": kind for i in range(3)})
            handle = inplace_activations.apply(model, torch.randn(3, 6, generator=torch.Generator().manual_seed(1)))
            assert (handle.names == ()) == (kind != "none")
        results.append(steps(model, [torch.randn(4, 6) for _ in range(5)]))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_remove_restores_exactly() -> None:
    model = trained.make("resnet")
    before = trained.surface(model)
    handle = inplace_activations.apply(model, trained.batch("resnet", 0))
    assert handle.names
    handle.remove()
    handle.remove()
    assert trained.surface(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_activations_is_not_tried() -> None:
    assert inplace_activations.apply(nn.Linear(2, 2), "no example").names == ()


def test_misuse() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.first = nn.ReLU(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.first(x)) if x.sum() > 0 else x

    with pytest.raises(UnsupportedError, match="fake"):
        inplace_activations.apply(Deciding(), torch.ones(2))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inplace_activations.apply(model, torch.ones(2))
    with pytest.raises(UsageError, match="already"):
        inplace_activations.apply(model, torch.ones(2))


def test_the_largest_input_is_saved() -> None:
    model = trained.make("resnet")
    assert inplace_activations.saved_bytes(model, trained.batch("resnet", 0)) == 3 * 8 * 8 * 8 * 4
    assert inplace_activations.saved_bytes(nn.Linear(2, 2), torch.ones(2)) == 0


def test_on_fake_tensors_it_decides_the_same_and_leaves_no_trace() -> None:
    found: list[tuple[str, ...]] = []

    def build(applied: bool) -> Callable[[], Any]:
        model, inputs = trained.make("resnet"), trained.batch("resnet", 0)
        if applied:
            found.append(inplace_activations.apply(model, inputs).names)
        return lambda: model(**inputs).loss.backward()

    plain, other = (brim.trace(lambda applied=applied: build(applied), target="cpu", steps=1) for applied in (0, 1))
    assert found == [inplace_activations.apply(trained.make("resnet"), trained.batch("resnet", 0)).names]
    assert len(other.ops) == len(plain.ops)
    assert len(other.storages) == len(plain.storages) - 1 - 2 * 6  # two activations in each block, one in the stem
