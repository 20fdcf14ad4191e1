"""Lossless techniques together, at random: losses, parameters and buffers are bit for bit those of plain training."""

from __future__ import annotations

import random

import pytest
import torch

from brim.techniques import precision
from brim.techniques.activation_offload import inplace as inplace_activations
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.loss import chunked as chunked_loss
from brim.techniques.saved_tensor_hooks import Saving, Unpack
from support import trained


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
def test_five_steps_are_bit_for_bit_the_same(seed: int) -> None:
    draw = random.Random(seed)
    family, kind = draw.choice(list(trained.FAMILIES)), draw.choice(["fp32", "bf16-mixed"])
    plain, other = trained.make(family), trained.make(family)
    before = trained.surface(other)
    choices = {name: draw.choice(checkpointing.CHOICES) for name in checkpointing.blocks(other)}
    handles = [
        precision.apply(other, None, kind),
        checkpointing.apply(other, choices),
        inplace_activations.apply(other, trained.batch(family, 0)),
    ]
    losses = []
    for model in (plain, other):
        with handles[0].forward():
            losses.append(trained.train(model, family))
    assert losses[0] == losses[1]
    assert trained.same_state(plain, other)
    for handle in reversed(handles):
        handle.remove()
    assert trained.surface(other) == before


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "resnet"])
def test_a_compiled_model_computes_the_same(family: str) -> None:
    plain, other = trained.make(family), trained.make(family)
    checkpointing.apply(other, dict.fromkeys(checkpointing.blocks(other), "selective"))
    if family == "llama":
        chunked_loss.apply(other, 5)
    compiled = torch.compile(other, backend="eager")
    assert trained.train(compiled, family, steps=2) == trained.train(plain, family, steps=2)
    torch.compiler.reset()


class _Taking:
    """Takes every tensor, as offloading does: it must be asked for all that is kept, and by nobody else."""

    def __init__(self) -> None:
        self.taken: list[torch.Size] = []

    def pack(self, tensor: torch.Tensor) -> Unpack:
        self.taken.append(tensor.shape)
        return _Copied(tensor).unpack


class _Copied:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach().clone()

    def unpack(self) -> torch.Tensor:
        return self._tensor


@pytest.mark.parametrize("checkpointed", ["none", "full", "selective"])
def test_beside_a_technique_that_keeps_saved_tensors_elsewhere(checkpointed: str) -> None:
    """What a checkpoint keeps of its inputs goes through the hooks around it."""
    plain, other = trained.make("gpt2"), trained.make("gpt2")
    checkpointing.apply(other, dict.fromkeys(checkpointing.blocks(other), checkpointed))
    keeper = _Taking()
    torch.manual_seed(1)
    plain(**trained.batch("gpt2", 0)).loss.backward()
    torch.manual_seed(1)
    with Saving(keeper):
        loss = other(**trained.batch("gpt2", 0)).loss
    loss.backward()
    hidden = torch.Size([3, 12, 16])
    assert keeper.taken.count(hidden) >= 3
    for one, wanted in zip(other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, wanted.grad)
