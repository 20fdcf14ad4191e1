"""The formulas for optimizer states against the states that the optimizers make."""

import pytest
import torch
from torch import nn

from brim.errors import UsageError
from brim.predict.optimizer_states import state_bytes


def model():
    return nn.Sequential(nn.Embedding(70, 24), nn.LayerNorm(24), nn.Conv1d(24, 6, 3), nn.Linear(6, 5))


def shapes_and_state_bytes(make, dtype=torch.float32):
    parameters = [nn.Parameter(p.detach().to(dtype)) for p in model().parameters()]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [tuple(p.shape) for p in parameters], sum(t.nbytes for t in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd-momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_state_bytes_are_those_of_torch(name, make, dtype):
    shapes, measured = shapes_and_state_bytes(make, dtype)
    assert sum(state_bytes(name, shape, dtype.itemsize) for shape in shapes) == measured


def test_lion_keeps_one_moment():
    assert state_bytes("lion", (4, 5), item_bytes=2) == 2 * 20


def test_torchaos_adam_quantizes_what_is_large_and_whole_blocks():
    """A table of 256 float32 per moment and parameter; the rest keeps the parameters' dtype."""
    for shape in ((4096, 4096), (32, 256)):
        count = shape[0] * shape[1]
        assert state_bytes("adamw8bit", shape, item_bytes=2) == 2 * (count + 4 * (count // 256) + 1024) + 4
    for count in (1000, 4097):
        assert state_bytes("adamw8bit", (count,), item_bytes=2) == 2 * 2 * count + 4


def test_an_unknown_optimizer_names_the_nearest():
    with pytest.raises(UsageError, match="adamw"):
        state_bytes("adam_w", (1,), 4)
