"""Copies of inputs: other tensors, and nothing shared that a model could write to."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from brim.model_inputs import map_tensors


class Cache:
    """What a model writes its keys to, as transformers' caches are."""

    def __init__(self) -> None:
        self.keys = [torch.ones(2, 3)]

    def update(self, new: torch.Tensor) -> None:
        self.keys[0] = torch.cat([self.keys[0], new])


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def test_tensors_inside_of_objects_are_changed_and_the_objects_are_others() -> None:
    cache, history = Cache(), [torch.zeros(1)]
    copied = map_tensors({"cache": cache, "history": history, "flag": True}, on_meta)
    copied["cache"].update(torch.empty(1, 3, device="meta"))
    copied["history"].append(torch.empty(1, device="meta"))
    assert copied["flag"] is True
    assert copied["cache"].keys[0].shape == (3, 3)
    assert copied["cache"].keys[0].is_meta
    assert cache.keys[0].shape == (2, 3)
    assert not cache.keys[0].is_meta
    assert len(history) == 1


def test_a_tensor_that_occurs_twice_is_one_tensor_in_the_copy() -> None:
    tensor = torch.ones(3)
    first, (second,) = map_tensors((tensor, [tensor]), on_meta)
    assert first is second


def test_a_module_shares_its_values_and_nothing_else() -> None:
    model = nn.Linear(2, 2)
    model.scale = torch.ones(1)
    copied = map_tensors(model, torch.Tensor.detach)
    copied.calls = 1
    assert isinstance(copied.weight, nn.Parameter)
    assert copied.weight is not model.weight
    assert copied.weight.data_ptr() == model.weight.data_ptr()
    assert copied.scale.data_ptr() == model.scale.data_ptr()
    assert not hasattr(model, "calls")


def test_a_result_of_an_operation_can_be_in_an_object() -> None:
    cache = Cache()
    cache.keys = [torch.ones(2, requires_grad=True) * 2]  # which ``copy.deepcopy`` refuses by itself
    assert map_tensors([cache], torch.Tensor.detach)[0].keys[0].tolist() == [2, 2]


def test_what_cannot_be_copied_says_so() -> None:
    with pytest.raises(TypeError):
        map_tensors([threading.Lock()], on_meta)


def test_tensors_are_changed_where_torch_functions_are_switched_off() -> None:
    with torch._C.DisableTorchFunction():
        copied = map_tensors({"ids": torch.ones(2)}, on_meta)
    assert copied["ids"].is_meta
