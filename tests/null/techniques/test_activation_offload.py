"""Activations that leave after forward and come back for backward: the same gradients, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from brim.core import Category, Op, Phase, Storage, Trace
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UsageError
from brim.memory.tiers import Memory
from brim.techniques import activation_offload
from brim.techniques.activation_offload import ActivationOffload, apply, options
from offloaded_activations import BLOCKS, KIB, SMALLEST, TIERS, WINDOW, Block, Net, example, same, step


@pytest.fixture(params=list(TIERS))
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = TIERS[request.param]()
    yield made
    made.close()


def fit(net: nn.Module, memory: Memory, blocks: Any = BLOCKS, **options: Any) -> ActivationOffload:
    return apply(net, blocks, memory, **{"smallest_bytes": SMALLEST, "window_bytes": WINDOW} | options)


def moved_bytes(memory: Memory) -> tuple[int, int]:
    """Out and in."""
    home = DISK if memory.host is None else RAM
    copied, compute = memory.recorder.copied_bytes, memory.compute.tier
    return copied.get((compute, home), 0), copied.get((home, compute), 0)


def held_bytes(memory: Memory) -> tuple[int, int]:
    return memory.compute.held_bytes, memory.ram.held_bytes


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


def selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@pytest.mark.parametrize("context", [None, selective], ids=["full", "selective"])
@pytest.mark.parametrize("around", ["the forward", "the call"])
def test_beside_checkpointing_what_it_keeps_is_what_leaves(memory: Memory, around: str, context: Any) -> None:
    def checkpointed(net: Net) -> Net:
        more = {} if context is None else {"context_fn": context}
        for block in net.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False, **more)
        return net

    def call(net: Net) -> list[torch.Tensor]:
        x = example().requires_grad_()
        if around == "the forward":
            return step(net, x)
        torch.manual_seed(7)
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = net.head(x).pow(2).mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]

    plain, net = Net(), Net()
    if around == "the forward":
        plain, net = checkpointed(plain), checkpointed(net)
    fit(net, memory, window_bytes=0)
    want, got = call(plain), call(net)
    assert same(want, got)
    # Around the forward, each block's input is the block's; around the call, it is the caller's.
    out, _ = moved_bytes(memory)
    assert out <= 64 * KIB * (len(BLOCKS) - 1)
    assert (out > 0) == (around == "the forward")


def test_beside_the_checkpointing_of_transformers(memory: Memory) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def run(offload: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=99,
        )
        model = LlamaForCausalLM(config).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        handle = None
        if offload:
            handle = fit(model, memory, [f"model.layers.{index}" for index in range(4)], window_bytes=0)
        ids = torch.arange(512).view(2, 256) % 99
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        if handle is not None:
            handle.remove()
            assert "Bracket" not in repr(vars(model.model.layers[0]))
        return [loss.detach(), *(p.grad for p in model.parameters())]

    want, got = run(False), run(True)
    assert same(want, got)
    assert 2 * 128 * KIB <= moved_bytes(memory)[0] <= 4 * 128 * KIB  # each layer's input of 128 KiB; never its inside


def test_a_layer_that_checkpoints_around_its_whole_call(memory: Memory) -> None:
    """As layers of older transformers do: hooks and forward are within."""

    class Layer(Block):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self._gradient_checkpointing_func(super().__call__, x)

    def run(offload: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*[Layer(64) for _ in range(4)])
        for layer in net:
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        if offload:
            fit(net, memory, [str(index) for index in range(4)], window_bytes=0)
        return step(net, example().requires_grad_())

    assert same(run(False), run(True))
    assert moved_bytes(memory)[0] == 3 * 64 * KIB // 4096 * 4096 - (3 * 4096 if memory.host is None else 0)


def test_the_users_own_hooks_still_see_what_stays(memory: Memory) -> None:
    net, x, seen = Net(), example(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    fit(net, memory)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = step(net, x)
    assert same(step(Net(), x), got)
    assert any(tensor is parameter for tensor in seen for parameter in net.parameters())
    assert not any(tensor.shape == (4, 64, 256) for tensor in seen)


def test_blocks_within_blocks_take_each_tensor_once(memory: Memory) -> None:
    net, x = Net(), example()
    fit(net, memory, ["blocks.1", "blocks.1.up", "blocks.2"], window_bytes=0)
    assert same(step(Net(), x), step(net, x))


def test_graphs_outlive_the_handle(memory: Memory) -> None:
    net, x, plain = Net(), example(), Net()
    handle = fit(net, memory)
    torch.manual_seed(7)
    loss = net(x).pow(2).mean()
    handle.remove()
    handle.remove()
    loss.backward()
    assert same(step(plain, x)[1:], [p.grad for p in net.parameters()])
    del loss, handle
    gc.collect()
    memory.compute.settle()
    assert held_bytes(memory) == (0, 0)


def test_a_copy_of_the_module_is_a_plain_one(memory: Memory) -> None:
    net, x = Net(), example()
    handle = fit(net, memory)
    copied = copy.deepcopy(net)
    before = moved_bytes(memory)
    want = step(Net(), x)
    assert same(want, step(copied, x))
    assert moved_bytes(memory) == before
    assert same(want, step(net, x))
    assert moved_bytes(memory) > before
    handle.remove()


def test_wrong_blocks_and_a_second_time_are_refused(memory: Memory) -> None:
    net = Net()
    for blocks in ([], "blocks.1", ["blocks.9"], ["blocks"]):
        with pytest.raises(UsageError):
            apply(net, blocks, memory)
    handle = apply(net, ["blocks.1"], memory)
    with pytest.raises(UsageError, match=r"blocks\.1.*already"):
        apply(net, ["blocks.2"], memory)
    handle.remove()
    apply(net, ["blocks.2"], memory).remove()


def test_options_say_what_each_block_would_move() -> None:
    def storage(id: int, module: str, bytes: int, born: int, category: Category = Category.ACTIVATION) -> Storage:
        return Storage(id=id, bytes=bytes, category=category, module=module, born=born, died=born + 50)

    trace = Trace(
        model="net",
        target="cpu",
        ops=(Op(name="op", module="a", phase=Phase.FORWARD, step=0, at=0),),
        storages=(
            storage(0, "a.0.up", 1000, 5),
            storage(1, "a.0.up", 1000, 105),
            storage(2, "a.0", 500, 106),
            storage(3, "a.0", 5, 107),
            storage(4, "a.0", 7000, 108, Category.TEMPORARY),
            storage(5, "a.01", 300, 109),
            storage(6, "a.2", 3, 110),
        ),
        step_starts=(0, 100),
    )
    found = options(trace, ["a.0", "a.01", "a.2"], compute=VRAM, smallest_bytes=100)
    assert [(o.block, o.choice, dict(o.saves_bytes)) for o in found] == [
        ("a.0", RAM, {VRAM: 1500, RAM: -1500}),
        ("a.01", RAM, {VRAM: 300, RAM: -300}),
    ]
    assert found[0].moves_bytes == {(VRAM, RAM): 1500, (RAM, VRAM): 1500}
    assert found[0].technique == activation_offload.NAME
    (whole,) = options(trace, [""], compute=RAM, smallest_bytes=100)
    assert whole.saves_bytes == {RAM: 1800, DISK: -1800}
