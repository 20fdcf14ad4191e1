"""The ways to cut a model into blocks, from coarse to fine."""

from __future__ import annotations

import torch
from torch import nn

from brim.estimation.step_memory import Observation
from brim.planning.inference.choosing import Need, partitions


class Layer(nn.Module):
    """The shape of a decoder's layer: a fifth of it is attention, the rest three matrices."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(hidden, hidden, bias=False) for name in "qkvo"})
        inner = 5 * hidden
        self.wide = nn.ModuleDict(
            {"gate": nn.Linear(hidden, inner), "up": nn.Linear(hidden, inner), "down": nn.Linear(inner, hidden)}
        )


def test_a_deep_model_is_cut_down_to_its_matrices() -> None:
    """Each layer's attention is too small to be a block of its own; all of them are a fifth of the model."""
    with torch.device("meta"):
        model = nn.Sequential(*[Layer(64) for _ in range(80)])
    found = list(partitions(model, Need(step_bytes=0, observation=Observation(step_bytes=0, uses={}))))
    largest = [max(block.bytes for block in one.blocks) for one in found]
    assert [len(one.blocks) for one in found] == sorted({len(one.blocks) for one in found})
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] <= (5 * 64 * 64 + 5 * 64) * 4  # one matrix
    assert found[-1].loose_bytes < found[-1].bytes / 16


class Stage(nn.Module):
    """A stage of a UNet: its lists are not modules that are called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.attentions = nn.ModuleList([Layer(width) for _ in range(2)])


def test_no_block_is_a_list_of_modules_and_sizes_that_are_close_are_opened_at_once() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([Stage(width) for width in range(256, 512, 2)])
    ladder = list(partitions(model, Need(step_bytes=0, observation=Observation(step_bytes=0, uses={}))))
    triggers = {t for one in ladder for block in one.blocks for t in block.triggers}
    assert not any(isinstance(model.get_submodule(trigger), nn.ModuleList) for trigger in triggers)
    assert len(ladder) <= 20
