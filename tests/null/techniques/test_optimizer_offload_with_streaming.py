"""Optimizer offload and weight streaming together: weights, gradients and states rest elsewhere; all is exact."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from brim.core.hardware import RAM, VRAM
from brim.techniques.blocks import find_blocks
from brim.techniques.optimizer_offload import technique as optimizer_offload
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.weight_streaming import FROM_RAM
from support import streamed_training as streamed
from support.offloaded import ON_GPU

PLACES = [
    ("disk", "disk", "keep"),
    ("disk", "disk", "disk"),
    ("ram", "ram", "ram"),
    ("three tiers", "disk", "ram"),
    ("ram", "keep", "ram"),
    ("ram", ON_GPU, "keep"),
    ("ram", ON_GPU, "ram"),
    ("three tiers", ON_GPU, "ram"),
]
# early, tied, twice, repeats
WAYS = [
    (False, False, False, False),
    (True, False, False, False),
    (True, True, False, False),
    (True, False, True, True),
    (True, True, True, True),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "states", "gradients"), PLACES)
@pytest.mark.parametrize(("early", "tied", "twice", "repeats"), WAYS)
def test_nothing_stays_and_nothing_differs(
    kind: str, states: str, gradients: str, early: bool, tied: bool, twice: bool, repeats: bool, tmp_path: Path
) -> None:
    net, twin = streamed.Net(tied=tied), streamed.Net(tied=tied)
    for one in (net, twin):
        one.order = [0, 1, 0, 2, 3, 4, 5, 1] if twice else one.order
        for layer in one.layers:
            layer.repeats = repeats
    optimizer, plain = (torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (net, twin))
    partition, memory = find_blocks(net), streamed.memory_for(kind)
    memory.use_disk(folder="/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path), limit_bytes=None)
    plan = streamed.plan_of(partition, streamed.CHOICES[kind], 3)
    weights = weight_streaming.apply(net, partition, plan, memory, weight_streaming.Weights(), training=True)
    on_gpu = states == ON_GPU
    handle = optimizer_offload.apply(
        net,
        optimizer,
        memory,
        states=RAM if on_gpu else states,
        gradients=gradients,
        streaming=weights,
        block_bytes=10_000,
        gpu_sixteenths=3 * on_gpu,
    )
    for _ in range(3):
        for part in range(2):
            loss, want = streamed.loss_of(net), streamed.loss_of(twin)
            with handle.final() if early and part == 1 else contextlib.nullcontext():
                loss.backward()
            want.backward()
            assert loss.item() == want.item()
        for its in (optimizer, plain):
            its.step()
            its.zero_grad()
    handle.remove()
    weights.remove()
    for (name, one), other in zip(net.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one, other[1]), name


@pytest.mark.parametrize("gradients", ["keep", "ram"])
@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
def test_weights_that_rest_in_ram_are_stepped_there(early: bool, gradients: str) -> None:
    """No weight crosses the link for an update, down or up again: only gradients go down."""
    net, twin = streamed.Net(), streamed.Net()
    optimizer, plain = (torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (net, twin))
    partition, memory = find_blocks(net), streamed.memory_for("ram")
    plan = streamed.plan_of(partition, FROM_RAM, 3)
    weights = weight_streaming.apply(net, partition, plan, memory, weight_streaming.Weights(), training=True)
    offload = optimizer_offload.apply(net, optimizer, memory, states=RAM, gradients=gradients, streaming=weights)
    moved = memory.recorder.copied_bytes
    for _ in range(3):
        down = moved.get((VRAM, RAM), 0)
        with offload.final() if early else contextlib.nullcontext():
            streamed.loss_of(net).backward()
        streamed.loss_of(twin).backward()
        streamed.finish_copies(memory)  # those ahead of use among them
        up = moved[RAM, VRAM]
        optimizer.step()
        assert moved[VRAM, RAM] - down == sum(p.nbytes for p in twin.parameters())  # the gradients
        assert moved[RAM, VRAM] == up
        plain.step()
        for one in (optimizer, plain):
            one.zero_grad()
        assert streamed.loss_of(net).item() == streamed.loss_of(twin).item()
        for name, value in twin.state_dict().items():
            assert torch.equal(weights.value(name), value), name
    offload.remove()
    weights.remove()
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_an_update_that_fails_leaves_weights_and_gradients_where_they_were() -> None:
    net = streamed.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    partition, memory = find_blocks(net), streamed.memory_for("ram")
    plan = streamed.plan_of(partition, FROM_RAM, 3)
    weights = weight_streaming.apply(net, partition, plan, memory, weight_streaming.Weights(), training=True)
    before = {name: weights.value(name) for name in net.state_dict()}
    streamed.loss_of(net).backward()
    gradients = [p.grad for p in net.parameters()]
    streamed_ones = [p for _, block in weights.blocks for p in block]
    with pytest.raises(ZeroDivisionError), weights.updating_at_rest(streamed_ones):
        assert all(p.grad is None for p in streamed_ones)
        raise ZeroDivisionError
    assert [p.grad for p in net.parameters()] == gradients
    assert all(torch.equal(weights.value(name), value) for name, value in before.items())
    optimizer.zero_grad()
    weights.remove()
