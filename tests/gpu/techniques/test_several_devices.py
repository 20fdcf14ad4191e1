"""A model on one of several GPUs: everything of it is there, and nothing on the first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brim
from brim.errors import UsageError
from support.placed import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
MIB = 1 << 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()) for _ in range(8)])


@pytest.mark.parametrize("where", ["named", "model"])
@torch.no_grad()
def test_a_model_streams_on_the_device_that_is_named_or_that_it_lies_on(where):
    x = torch.ones(2, 256)
    expected = net().eval()(x)
    model = net().eval()
    before = torch.cuda.memory_allocated(0)
    if where == "named":
        handle = place(model, vram=MIB, ram="64MiB", device="cuda:1", activations="64KiB")
    else:
        model.to("cuda:1")
        handle = place(model, vram=MIB, ram="64MiB", activations="64KiB")
    assert torch.cuda.current_device() == 0
    assert {p.device for p in [*model.parameters(), *model.buffers()]} == {torch.device("cuda", 1)}
    for _ in range(3):
        torch.testing.assert_close(model(x.to("cuda:1")).cpu(), expected)
    assert torch.cuda.memory_allocated(0) == before
    handle.remove()
    came_from = torch.device("cpu") if where == "named" else torch.device("cuda", 1)
    assert {p.device for p in model.parameters()} == {came_from}


def test_two_models_on_two_devices():
    x = torch.ones(2, 256)
    with torch.no_grad():
        expected = net().eval()(x)
        models = [net().eval() for _ in range(2)]
        handles = [
            place(model, vram=MIB, ram="64MiB", device=f"cuda:{index}", activations="64KiB")
            for index, model in enumerate(models)
        ]
        for _ in range(2):
            for index, model in enumerate(models):
                torch.testing.assert_close(model(x.to(f"cuda:{index}")).cpu(), expected)
        for handle in handles:
            handle.remove()


def test_a_model_on_two_devices_and_names_of_none_are_refused():
    model = net()
    model[0].to("cuda:0")
    model[1].to("cuda:1")
    with pytest.raises(UsageError, match="several devices: cuda:0, cuda:1"):
        brim.fit(model, vram=MIB)
    for name in ("cuda:7", "cuda:x", "tpu", "cpu:1"):
        with pytest.raises(UsageError, match="device"):
            brim.fit(net(), vram=MIB, device=name)


def test_a_fitted_model_is_not_moved_to_another_device():
    model = net()
    place(model, vram=MIB, ram="64MiB", device="cuda:1", activations="64KiB")
    model.to("cuda:1")
    with pytest.raises(brim.errors.UnsupportedError, match="move or cast"):
        model.to("cuda:0")
    model.brim.remove()
