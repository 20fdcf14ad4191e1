"""Optimizer offload: whatever rests where, the same weights and states as the plain optimizer, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.errors import UnsupportedError, UsageError
from brim.memory.tiers import Memory
from brim.techniques.offloaded_tensor import OffloadedTensor
from support.offloaded import (
    ON_GPU,
    OPTIMIZERS,
    PLACES,
    WIDTH,
    assert_same,
    assert_same_state,
    backward,
    groups,
    machine,
    make,
    offloaded,
    train,
)


@pytest.fixture
def memory(folder: Path) -> Iterator[Memory]:
    made = machine("cpu", folder)
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "states"), PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
def test_every_optimizer_computes_what_it_computes_in_memory(
    name: str, kind: str, states: str, early: bool, folder: Path
) -> None:
    model, twin = make(), make()
    optimizer, plain = OPTIMIZERS[name](groups(model)), OPTIMIZERS[name](groups(twin))
    want = train(twin, plain)
    with offloaded(model, optimizer, machine(kind, folder), states=states) as handle:
        assert len(handle.blocks) > 3
        assert train(model, optimizer, final=handle.final if early else None) == want
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    assert train(model, optimizer, steps=range(4, 6)) == train(twin, plain, steps=range(4, 6))
    assert_same(model, twin)


@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
@pytest.mark.parametrize(("kind", "states"), [("cpu", "disk"), ("emulated", ON_GPU)])
def test_room_for_states_can_be_there_during_the_update_only(
    kind: str, states: str, early: bool, folder: Path
) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(groups(m), lr=1e-2) for m in (model, twin))
    memory = machine(kind, folder)
    want = train(twin, plain)
    with offloaded(model, optimizer, memory, states=states, brief=True) as handle:
        held_bytes = memory.compute.held_bytes
        assert train(model, optimizer, final=handle.final if early else None) == want
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        assert memory.compute.held_bytes == held_bytes < memory.compute.peak_bytes


@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("kind", "states", "gradients"),
    [
        ("cpu", "disk", "disk"),
        ("cpu", "keep", "disk"),
        ("emulated", "ram", "ram"),
        ("emulated", ON_GPU, "keep"),
        ("emulated", ON_GPU, "ram"),
        ("emulated", ON_GPU, "disk"),
        ("emulated", "keep", "ram"),
        ("emulated", "disk", "disk"),
        ("emulated", "ram", "disk"),
    ],
)
def test_gradients_that_leave_add_up_as_autograd_adds_them(
    kind: str, states: str, gradients: str, parts: int, early: bool, folder: Path
) -> None:
    model, twin = make(tied=True), make(tied=True)
    optimizer, plain = (torch.optim.AdamW(groups(m), lr=1e-2) for m in (model, twin))
    want = train(twin, plain, parts=parts)
    with offloaded(model, optimizer, machine(kind, folder), states=states, gradients=gradients) as handle:
        final = handle.final if early else None
        assert train(model, optimizer, parts=parts, final=final) == want
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(
    ("kind", "states", "gradients"),
    [
        ("cpu", "disk", "keep"),
        ("cpu", "disk", "disk"),
        ("emulated", "ram", "ram"),
        ("emulated", ON_GPU, "keep"),
        ("emulated", ON_GPU, "ram"),
    ],
)
def test_the_global_norm_is_exact(
    kind: str, states: str, gradients: str, norm_type: float, parts: int, folder: Path
) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(groups(m), lr=1e-2) for m in (model, twin))
    clip = lambda: torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.3, norm_type)  # noqa: E731
    want = train(twin, plain, parts=parts, clip=clip)
    with offloaded(model, optimizer, machine(kind, folder), states=states, gradients=gradients) as handle:
        mine = lambda: handle.clip_grad_norm_(0.3, norm_type)  # noqa: E731
        assert train(model, optimizer, parts=parts, clip=mine) == want
        assert_same(model, twin)


def test_clipping_twice_and_going_on_after_it_is_what_pytorch_does(memory: Memory) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
    with offloaded(model, optimizer, memory, states="disk", gradients="disk") as handle:
        for step in range(3):
            norms = []
            for fitted, clip in ((model, handle.clip_grad_norm_), (twin, None)):
                found = []
                for part in range(2):
                    backward(fitted, 10 * step + part)
                    for most in (0.5, 0.2):
                        norm = clip(most) if clip else torch.nn.utils.clip_grad_norm_(twin.parameters(), most)
                        found.append(norm.item())
                norms.append(found)
            assert norms[0] == norms[1]
            optimizer.step()
            plain.step()  # and no zero_grad: the gradients stay, and more is added
            assert_same(model, twin)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_pytorchs_own_clipping_sees_gradients_that_are_away(norm_type: float, parts: int, memory: Memory) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(groups(m), lr=1e-2) for m in (model, twin))
    clips = [lambda m=m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3, norm_type) for m in (model, twin)]
    want = train(twin, plain, parts=parts, clip=clips[1])
    with offloaded(model, optimizer, memory, states="disk", gradients="disk"):
        assert train(model, optimizer, parts=parts, clip=clips[0]) == want
        assert_same(model, twin)


def test_a_gradient_that_is_away_is_read_and_written_like_another(memory: Memory) -> None:
    model, twin = make(), make()
    with offloaded(model, torch.optim.SGD(model.parameters()), memory, states="disk", gradients="disk"):
        for one in (model, twin):
            backward(one, 0)
        gradient, wanted = model.embed.weight.grad, twin.embed.weight.grad
        assert type(gradient) is OffloadedTensor and gradient.shape == wanted.shape
        assert torch.equal(gradient.abs().sum(), wanted.abs().sum())
        for one in (gradient, wanted):
            one.clamp_(-1e-3, 1e-3)
        assert type(model.embed.weight.grad) is OffloadedTensor
        assert torch.equal(model.embed.weight.grad.clone(), wanted)
        with pytest.raises(UnsupportedError, match="not in memory"):
            torch._foreach_add_([gradient], 1.0)


@pytest.mark.parametrize("how", ["none", "zeros", "model", "foreach"])
def test_gradients_that_are_away_can_be_zeroed(how: str, memory: Memory) -> None:
    model, twin = make(), make()
    options = {"lr": 0.1, "momentum": 0.9, "foreach": how == "foreach"}
    optimizer, plain = (torch.optim.SGD(m.parameters(), **options) for m in (model, twin))
    with offloaded(model, optimizer, memory, states="disk", gradients="disk"):
        for step in range(3):
            for fitted, its in ((model, optimizer), (twin, plain)):
                backward(fitted, 50 + step)
                if how == "model":
                    fitted.zero_grad()
                else:
                    its.zero_grad(set_to_none=how == "none")
                if step == 1:
                    fitted.embed.weight.grad = None
                backward(fitted, step)
                its.step()
            assert_same(model, twin)


def test_gradients_come_back_in_the_end(memory: Memory) -> None:
    model, twin = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offloaded(model, optimizer, memory, states="disk", gradients="disk"):
        for fitted in (model, twin):
            backward(fitted, 0, parts=2)
        assert type(model.head.weight.grad) is OffloadedTensor
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or (type(one.grad) is torch.Tensor and torch.equal(one.grad, other.grad))


# -- final


@pytest.mark.parametrize("gradients", ["keep", "disk"])
def test_gradients_never_exist_whole_in_a_final_pass(gradients: str, memory: Memory) -> None:
    model = make(layers=8)
    optimizer = torch.optim.AdamW(model.parameters())
    held, most = 0, 0
    with offloaded(model, optimizer, memory, states="disk", gradients=gradients) as handle:

        def count(_: nn.Parameter) -> None:
            nonlocal most
            here = [p.grad for p in model.parameters() if p.grad is not None and type(p.grad) is not OffloadedTensor]
            most = max(most, sum(g.numel() * 4 for g in here))

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(count)
        for step in range(3):
            backward(model, step, final=handle.final)
            held = sum(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert held == 0
    assert most <= 3000 + 4 * 2 * WIDTH * WIDTH


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_updated_while_backward_needs_it(
    reentrant: bool, twice: bool, tied: bool, memory: Memory
) -> None:
    model, twin = make(tied=tied), make(tied=tied)
    for one in (model, twin):
        one.through = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)
        if twice:
            one.order = [0, 1, 0, 2, 3, 1]
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin))
    want = train(twin, plain, parts=2)
    with offloaded(model, optimizer, memory, states="disk") as handle:
        assert train(model, optimizer, parts=2, final=handle.final) == want
        assert_same(model, twin)


class Masked(nn.Module):
    """Its mask depends on the bias without a gradient, and the bias is complete before the rest is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x * (self.bias.detach() >= 0) + self.bias


def test_a_recomputation_with_new_weights_is_refused(memory: Memory) -> None:
    model = Masked()
    with offloaded(model, torch.optim.SGD(model.parameters(), lr=1), memory, states="disk") as handle:
        x = torch.ones(4, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=False).sum()
        with pytest.raises(UnsupportedError, match="again during backward"), handle.final():
            loss.backward()
        assert handle.partly_updated
        assert not model._forward_pre_hooks
        handle.reset()


class Detached(nn.Module):
    """Computes with its weight twice, once without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight.detach()).sin() + self.weight


@pytest.mark.parametrize(("kind", "states"), PLACES)
def test_a_use_without_a_gradient_that_comes_too_late_is_autograds_error(
    kind: str, states: str, folder: Path
) -> None:
    model = Detached()
    with offloaded(model, torch.optim.SGD(model.parameters(), lr=1), machine(kind, folder), states=states) as handle:
        x = torch.ones(4, requires_grad=True)
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), handle.final():
            loss.backward()
        handle.reset()


def test_a_second_backward_after_final_is_refused(memory: Memory) -> None:
    model = make()
    with offloaded(model, torch.optim.SGD(model.parameters(), lr=1), memory, states="disk") as handle:
        backward(model, 0, final=handle.final)
        assert handle.partly_updated
        with pytest.raises(UsageError, match="updated already"):
            backward(model, 1)
        with pytest.raises(UsageError, match="step"), handle.final():
            pass
        handle.optimizer.step()
        assert not handle.partly_updated
        backward(model, 1, final=handle.final)


def test_clipping_and_final_exclude_each_other(memory: Memory) -> None:
    model = make()
    with offloaded(model, torch.optim.SGD(model.parameters(), lr=1), memory, states="disk") as handle:
        backward(model, 0, final=handle.final)
        with pytest.raises(UsageError, match="clip"):
            handle.clip_grad_norm_(1.0)
        handle.optimizer.step()
        backward(model, 0)
        handle.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match="clip"), handle.final():
            pass
