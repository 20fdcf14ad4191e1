"""Activation offload beside checkpointing, other hooks, and others' hold on graphs and modules."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from brim.core import Category, Op, Phase, Storage, Trace
from brim.core.hardware import RAM, VRAM
from brim.errors import UsageError
from brim.memory.tiers import Memory
from brim.techniques.activation_offload.technique import apply, offloadable_bytes
from support.offloaded_activations import (
    BLOCKS,
    KIB,
    TIERS,
    Block,
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


def test_offloadable_bytes_are_those_of_large_activations() -> None:
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
    by_block = offloadable_bytes(trace, ["a.0", "a.01", "a.2"], compute=VRAM, smallest_bytes=100)
    assert by_block == {"a.0": 1500, "a.01": 300, "a.2": 0}
    assert offloadable_bytes(trace, [""], compute=RAM, smallest_bytes=100) == {"": 1800}
