"""A program that copies a module, as adapters and averaged weights do, is traced like any other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import brim


def test_a_deep_copy_of_a_module_takes_the_memory_of_its_parameters_again() -> None:
    def build() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)).cuda()
        average = copy.deepcopy(model)
        return lambda: average.load_state_dict(model.state_dict())

    made = brim.trace(build, steps=1)
    weights = [storage for storage in made.storages if storage.bytes == 256 * 256 * 4 and storage.died is None]
    assert len(weights) == 2


def test_tied_parameters_stay_tied_in_a_copy() -> None:
    def build() -> Callable[[], None]:
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        second.weight = first.weight
        copied = copy.deepcopy(nn.Sequential(first, second).cuda())
        assert copied[0].weight is copied[1].weight
        assert isinstance(copied[0].weight, nn.Parameter) and copied[0].weight.requires_grad
        return lambda: copied(torch.empty(1, 64, device="cuda")).sum().backward()

    brim.trace(build, steps=1)
