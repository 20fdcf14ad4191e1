"""Activations that leave after forward and come back for backward: the same gradients, and nothing left behind."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from brim.memory.tiers import Memory
from support.offloaded_activations import (
    BLOCKS,
    KIB,
    TIERS,
    WINDOW,
    Net,
    example,
    fit,
    held_bytes,
    moved_bytes,
    same,
    step,
)


@pytest.fixture(params=list(TIERS))
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = TIERS[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("blocks", [BLOCKS, BLOCKS[1:4:2], [""]], ids=["all", "two", "model"])
def test_steps_are_plain_ones_bit_for_bit(memory: Memory, blocks: Any) -> None:
    x = example()
    want = [step(Net(), x, seed) for seed in (1, 2, 3)]
    net = Net()
    handle = fit(net, memory, blocks)
    assert same([t for s in want for t in s], [t for seed in (1, 2, 3) for t in step(net, x, seed)])
    out, back = moved_bytes(memory)
    assert out >= back > 3 * WINDOW
    assert handle.misses == 0
    handle.settle()
    assert held_bytes(memory) == (0, 0)
    handle.remove()
    assert "forward" not in vars(net.blocks[1])
    assert same(want[0], step(net, x, 1))
    assert moved_bytes(memory) == (out, back)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_autocast(memory: Memory, dtype: torch.dtype) -> None:
    def run(offload: bool) -> list[torch.Tensor]:
        net, x = Net(), example()
        if offload:
            fit(net, memory)
        if dtype == torch.float64:
            return step(net.double(), x.double())
        with torch.autocast("cpu", dtype=dtype):
            return step(net, x)

    assert same(run(False), run(True))
    assert moved_bytes(memory)[1] > 0


def test_what_is_not_trained_through_is_left_alone(memory: Memory) -> None:
    net, x = Net(), example()
    fit(net, memory, window_bytes=0)
    with torch.no_grad():
        net(x)
    net.eval()
    with torch.inference_mode():
        net(x)
    net.requires_grad_(False)(x)
    assert moved_bytes(memory) == (0, 0)


def test_a_storage_moves_once_however_many_save_it(memory: Memory) -> None:
    class Shared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.exp()  # exp saves its result; so do both products, and so does each of the views
            first, second = wide[:, :32], wide[:, 32:]
            return (
                (first * second).sum() + (wide * wide.t().reshape_as(wide)).sum() + wide[0].expand(64, 64).exp().sum()
            )

    x, net = torch.randn(256, 64, requires_grad=True), nn.Sequential(Shared(), nn.Identity())
    net[0](x).backward()
    want, x.grad = x.grad, None
    fit(net, memory, ["0"], smallest_bytes=60 * KIB, window_bytes=0)
    assert net(x).backward() is None
    assert torch.equal(x.grad, want)
    out, _ = moved_bytes(memory)
    assert out <= 2 * 64 * KIB  # the exponential and the transposed copy; one of them may stay as the newest


def test_parameters_buffers_and_small_tensors_stay(memory: Memory) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)
            self.register_buffer("mask", torch.rand(256, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ (self.linear.weight * self.mask).t()

    net = Layer()
    x = torch.randn(8, 256, requires_grad=True)  # 8 KiB
    fit(net, memory, [""], smallest_bytes=64 * KIB, window_bytes=0)
    net(x).sum().backward()
    assert moved_bytes(memory)[0] == 0  # what is left is the newest: the masked weight itself


def test_odd_strides_come_back_as_they_were(memory: Memory) -> None:
    seen: list[torch.Tensor] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            seen.extend(ctx.saved_tensors)
            return (grad.expand(ctx.saved_tensors[0].shape).clone(), *[None] * (len(ctx.saved_tensors) - 1))

    base = torch.randn(130, 129)
    views = [
        base.t(),
        base[3:, 5:],
        base[::3, ::2],
        base[1].expand(7, -1),
        base.to(torch.complex64).imag,
        base.to(torch.complex64).conj(),  # its bit is not in memory: it stays
        torch.view_as_real(base.to(torch.complex128)),
        base.view(torch.int32) > 0,
        base.to_sparse(),
        torch.empty(0, 5),
    ]

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Keep.apply(x.exp(), *views, x.sin())

    net = Layer()
    fit(net, memory, [""], smallest_bytes=0, window_bytes=0)
    net(torch.randn(50, 50, requires_grad=True)).backward()
    assert moved_bytes(memory)[1] > 0
    for view, back in zip(views, seen[1:-1], strict=True):
        assert (view.dtype, view.shape, view.is_conj()) == (back.dtype, back.shape, back.is_conj())
        assert torch.equal(view.to_dense(), back.to_dense())
        if view.layout is torch.strided:
            assert view.stride() == back.stride()


def test_a_saved_tensor_that_was_modified_raises_what_pytorch_raises(memory: Memory) -> None:
    class Spoiled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = (y * 2).exp().sum()
            y.mul_(2)
            return z + y.sum()

    x = torch.randn(256, 256, requires_grad=True)
    with pytest.raises(RuntimeError) as plain:
        Spoiled()(x).backward()
    net = Spoiled()
    fit(net, memory, [""], window_bytes=0)
    with pytest.raises(RuntimeError) as offloaded:
        net(x).backward()
    kind, version = (
        "[torch.FloatTensor [256, 256]]",
        "is at version 1; expected version 0 instead. Hint: enable anomaly",
    )
    begin = str(plain.value).split("[", 1)[0]
    for message in (str(plain.value), str(offloaded.value)):
        assert message.startswith(f"{begin}{kind}") and version in message
    net.forward(x)  # dropped without a backward


def test_what_is_saved_before_and_after_a_change_are_two(memory: Memory) -> None:
    """The first is lost, but nobody asks for it."""

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.5
            self.unused = y.exp().sum() + (y * y).sum()
            y.add_(1)
            return (y * y).sum()

    x, net = torch.randn(256, 256, requires_grad=True), Layer()
    net(x).backward()
    want, x.grad = x.grad, None
    fit(net, memory, [""], window_bytes=0)
    net(x).backward()
    assert torch.equal(x.grad, want)


def test_memory_falls_as_forward_goes_on_and_as_backward_uses_it(memory: Memory) -> None:
    alive: list[weakref.ref[Any]] = []
    held: list[int] = []

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            alive.append(weakref.ref(y.untyped_storage()))
            held.append(sum(reference() is not None for reference in alive))
            return y

    net = nn.Sequential(*[Watch() for _ in range(12)])
    fit(net, memory, [str(index) for index in range(12)], window_bytes=4 * 64 * KIB)
    x = (torch.randn(128, 128) / 100).requires_grad_()
    loss = torch.tanh(net(x) * 1e-30).sum()
    assert max(held) <= 4 + 2  # the window, what is being made, and what it is made from
    loss.backward()
    assert memory.compute.peak_bytes <= 6 * (64 + 12) * KIB
    end_s = time.monotonic() + 10  # a thread that has just written one may still hold it
    while any(reference() is not None for reference in alive) and time.monotonic() < end_s:
        time.sleep(0.005)
    assert not any(reference() is not None for reference in alive)


@pytest.mark.parametrize("when", ["before backward", "in backward"])
def test_a_graph_that_is_dropped_leaves_nothing(memory: Memory, when: str) -> None:
    net, x = Net(), example()
    handle = fit(net, memory)
    loss = net(x).sum()
    if when == "in backward":
        (grad,) = torch.autograd.grad(loss, net.blocks[4].out.weight, retain_graph=True)
        assert grad.abs().sum() > 0
    del loss
    handle.settle()
    assert held_bytes(memory) == (0, 0)
    assert same(step(Net(), x), step(net, x))
    if memory.host is None:
        reserved = memory.scratch().peak_bytes
        for _ in range(3):
            step(net, x)
        assert memory.scratch().peak_bytes == reserved


def test_a_graph_can_be_kept_and_used_twice(memory: Memory) -> None:
    def run(net: Net) -> list[torch.Tensor]:
        torch.manual_seed(7)
        loss = net(example()).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    net = Net()
    handle = fit(net, memory)
    assert same(run(Net()), run(net))
    handle.settle()
    assert held_bytes(memory) == (0, 0)


def test_gradients_of_gradients(memory: Memory) -> None:
    def run(offload: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh())
        x = torch.randn(256, 64, requires_grad=True)
        if offload:
            fit(net, memory, [""], window_bytes=0)
        (grad,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
        return [p.grad for p in net.parameters()]

    assert same(run(False), run(True))
    assert moved_bytes(memory)[1] > 0


def test_two_forwards_before_a_backward_in_either_order(memory: Memory) -> None:
    for order in ((0, 1), (1, 0)):
        gradients = []
        for offload in (False, True):
            net = Net().eval()
            handle = fit(net, memory) if offload else None
            losses = [net(example()).sum(), net(2 * example()).pow(2).sum()]
            for index in order:
                losses[index].backward()
            gradients.append([p.grad for p in net.parameters() if p.grad is not None])
            if handle is not None:
                handle.remove()
        assert same(*gradients)
    assert held_bytes(memory) == (0, 0)
