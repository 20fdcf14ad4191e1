"""Training through streamed weights on a real CUDA device: what the device computes with all weights there."""

from __future__ import annotations

import contextlib

import pytest
import torch

from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.tiers import device_memory
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.blocks import find_blocks
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.optimizer_offload import technique as optimizer_offload
from brim.techniques.streaming.weight_streaming import FROM_DISK, FROM_RAM, Weights
from brim.techniques.weights import place_weights
from support.streamed_training import IDS, WORDS, Net, plan_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def loss_of(net: torch.nn.Module) -> torch.Tensor:
    ids = IDS.cuda()
    return torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("choice", [FROM_RAM, FROM_DISK])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("repeats", [False, True], ids=["", "checkpointed"])
def test_steps_of_adamw_block_by_block(choice: str, tied: bool, repeats: bool) -> None:
    net, twin = Net(tied=tied), Net(tied=tied).cuda()
    for layer in [*net.layers, *twin.layers]:
        layer.repeats = repeats
    partition, device = find_blocks(net), torch.device("cuda", torch.cuda.current_device())
    memory = device_memory(
        Timeline("training", measured=True), vram_bytes=64 << 20, ram_bytes=64 << 20, device=device
    )
    handle = place_weights(net, partition, plan_of(partition, choice, 2), memory, Weights(), training=True)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (net, twin))
    for _ in range(4):
        losses = [loss_of(net), loss_of(twin)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        gradients = {id(p): p.grad for p in net.parameters()}
        for name, block in handle.blocks:
            for parameter in net.parameters():
                parameter.grad = gradients[id(parameter)] if any(parameter is p for p in block) else None
            with handle.updating(name):
                ours.step()
        ours.zero_grad()
        theirs.step()
        theirs.zero_grad()
    handle.settle()
    for name, value in twin.state_dict().items():
        assert torch.equal(handle.value(name), value.cpu()), name
    moved = memory.recorder.copied_bytes
    assert moved[RAM, VRAM] > 0 and moved[(VRAM, RAM) if choice == FROM_RAM else (RAM, DISK)] > 0
    handle.remove()
    for name, value in twin.state_dict().items():
        assert torch.equal(net.state_dict()[name], value.cpu()), name


@pytest.mark.parametrize("gradients", ["keep", RAM])
@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
def test_weights_that_rest_in_ram_are_stepped_there(early: bool, gradients: str) -> None:
    """What the processor steps, and what the device computes with from then on, is the RAM that weights rest in."""
    net, twin = Net(), Net().cuda()
    partition, device = find_blocks(net), torch.device("cuda", torch.cuda.current_device())
    memory = device_memory(
        Timeline("training", measured=True), vram_bytes=64 << 20, ram_bytes=64 << 20, device=device
    )
    plan = plan_of(partition, FROM_RAM, 3)
    weights = place_weights(net, partition, plan, memory, Weights(), training=True)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (net, twin))
    offload = optimizer_offload.apply(net, ours, memory, states=RAM, gradients=gradients, streaming=weights)
    moved = memory.recorder.copied_bytes
    for _ in range(4):
        losses = [loss_of(net), loss_of(twin)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        down = moved.get((VRAM, RAM), 0)
        with offload.final() if early else contextlib.nullcontext():
            losses[0].backward()
        losses[1].backward()
        up = moved[RAM, VRAM]
        ours.step()
        assert moved[VRAM, RAM] - down == sum(p.nbytes for p in twin.parameters())  # the gradients
        assert moved[RAM, VRAM] == up
        theirs.step()
        for one in (ours, theirs):
            one.zero_grad()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(weights.value(name), value.cpu(), rtol=1e-4, atol=1e-5)
    offload.remove()
    weights.remove()


def bytes_copied_in_pieces(choice: str, rows: int) -> dict[tuple[str, str], int]:
    """The bytes over each link in three steps of checkpointed, streamed blocks whose inputs are offloaded."""
    net, twin = Net(), Net().cuda()
    partition, device = find_blocks(net), torch.device("cuda", torch.cuda.current_device())
    memory = device_memory(
        Timeline("training", measured=True), vram_bytes=64 << 20, ram_bytes=64 << 20, device=device
    )
    names = checkpointing.blocks(net)
    repeats = checkpointing.apply(net, dict.fromkeys(names, checkpointing.FULL), rows=rows)
    weights = place_weights(net, partition, plan_of(partition, choice, 2), memory, Weights(), training=True)
    offload = activation_offload.apply(net, names, memory, smallest_bytes=1024, window_bytes=4096)
    ids = torch.arange(96).view(3, 32).cuda() % WORDS
    for _ in range(3):
        losses = [model(ids).square().mean() for model in (net, twin)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        for loss in losses:
            loss.backward()
    for (name, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)
    for handle in (offload, weights, repeats):
        handle.remove()
    return dict(memory.recorder.copied_bytes)


@pytest.mark.parametrize("choice", [FROM_RAM, FROM_DISK])
def test_pieces_of_a_batch_move_no_more_bytes_than_one_pass(choice: str) -> None:
    whole = bytes_copied_in_pieces(choice, 0)
    assert whole[VRAM, RAM] > 0
    for rows in (1, 2):
        assert bytes_copied_in_pieces(choice, rows) == whole
