"""Budgets that fit and are not ample: a bound from a step on tensors without values says so, and never too early."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.run import launch_bound
from brim.run.launch import Settings
from brim.run.launch_ample import Ample
from brim.run.launch_decisions import Decisions
from brim.run.launch_hooks import Call
from brim.run.launch_outcome import UNTOUCHED
from brim.run.launch_watch import Launched
from brim.units import MIB


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Optimizers of other tests are found among what is alive."""
    gc.collect()
    yield


def call(model: nn.Module, *args: Any, others: tuple[nn.Module, ...] = ()) -> Call:
    return Call(model=model, called=model, args=args, kwargs={}, others=others)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(96, 4, 256, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 24, 3, 2, 1), nn.ConvTranspose2d(24, 16, 4, 2, 1)
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(19, 8, 1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        up = self.norm(self.up(torch.relu(self.down(image))))
        return {"map": self.out(torch.cat([up, image], 1))}


Kind = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]
KINDS: dict[str, Kind] = {
    "wide layers": (lambda: nn.Sequential(nn.Linear(256, 768), nn.GELU(), nn.Linear(768, 256)), lambda: x(8, 256)),
    "many small layers": (lambda: nn.Sequential(*[nn.Linear(40, 40) for _ in range(12)]), lambda: x(4, 40)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 16, 3),
            nn.Flatten(),
            nn.Linear(12544, 8),
        ),
        lambda: x(4, 3, 32, 32),
    ),
    "joined and named": (Joined, lambda: x(2, 3, 64, 64)),
    "attention": (lambda: encoder(0.1), lambda: x(4, 32, 96)),
    "fused attention": (lambda: encoder(0.0), lambda: x(4, 32, 96)),
    "long fused attention": (lambda: encoder(0.0), lambda: x(1, 700, 96)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(3000, 64), nn.Linear(64, 3000)),
        lambda: torch.randint(0, 3000, (2, 64)),
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam with all options": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True, maximize=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with all options": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, weight_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, weight_decay=0.1),
}
SOON = ("SGD with all options", "Adam with all options", "RMSprop")
CASES = [
    *[(kind, "AdamW") for kind in KINDS],
    *[
        pytest.param("wide layers", name, marks=[] if name in SOON else pytest.mark.slow)
        for name in OPTIMIZERS
        if name != "AdamW"
    ],
]


def exact_bytes(model: nn.Module, example: torch.Tensor) -> int:
    exact = Decisions(Settings(device="cpu"), lambda *_: None).decide(call(model, example))
    assert exact is not None and not exact.why
    return exact.untouched_bytes["ram"]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_it_fits_by_the_bound_only_where_it_fits_by_the_prediction(kind: str, name: str) -> None:
    build, inputs = KINDS[kind]
    model, example = build(), inputs()
    optimizer = OPTIMIZERS[name](model.parameters())
    exact = exact_bytes(model, example)
    most = launch_bound.most_bytes(model, optimizer, (example,), trains=True)
    assert most is not None and most >= exact
    assert Ample(Settings(device="cpu", ram=exact - 1)).closely(call(model, example)) is None
    assert Ample(Settings(device="cpu", ram=most - 1)).closely(call(model, example)) is None
    found = Ample(Settings(device="cpu", ram=most)).closely(call(model, example))
    assert found is not None
    assert (found.choice, found.task, found.untouched_bytes) == (UNTOUCHED, "train", {"ram": most})
    if name in ("AdamW", "SGD", "SGD with all options") and "fused" not in kind:
        assert most <= 1.45 * exact + MIB, "it would say of too few that they fit"


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_a_forward_pass(kind: str) -> None:
    build, inputs = KINDS[kind]
    model, example = build().eval(), inputs()
    with torch.no_grad():
        exact = exact_bytes(model, example)
        most = launch_bound.most_bytes(model, None, (example,), trains=False)
        assert most is not None and exact <= most
        assert Ample(Settings(device="cpu", ram=exact - 1)).closely(call(model, example)) is None
        assert Ample(Settings(device="cpu", ram=most)).closely(call(model, example)) is not None


def test_what_other_models_hold_is_not_there_for_this_one() -> None:
    model, other, example = nn.Linear(256, 256), nn.Linear(512, 512), x(1, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = launch_bound.most_bytes(model, optimizer, (example,), trains=True)
    assert most is not None
    both = most + 512 * 513 * 4
    for ram, fits in ((both - 1, False), (both, True)):
        found = Ample(Settings(device="cpu", ram=ram)).closely(call(model, example, others=(other,)))
        assert (found is not None) is fits


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(values)


class Own(torch.optim.Adam):
    pass


def sequence() -> nn.Module:
    return nn.GRU(64, 64)


@pytest.mark.parametrize(
    ("build", "make"),
    [
        (Casting, torch.optim.SGD),
        (sequence, torch.optim.SGD),
        (lambda: nn.Linear(64, 64), Own),
        (lambda: nn.Linear(64, 64), torch.optim.Adafactor),
        (lambda: nn.Linear(64, 64), lambda p: torch.optim.Adam(p, foreach=True)),
    ],
    ids=["autocast", "recurrent", "an optimizer of its own", "Adafactor", "all parameters at once"],
)
def test_what_is_not_known_is_left_to_a_prediction(build: Callable[[], nn.Module], make: Callable[..., Any]) -> None:
    model, example = build(), x(4, 2, 64)
    optimizer = make(model.parameters())
    assert optimizer is not None
    assert Ample(Settings(device="cpu", ram="1GiB")).closely(call(model, example)) is None


def test_nothing_of_it_shows() -> None:
    model, example = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout()).eval(), x(4, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert Ample(Settings(device="cpu", ram="1GiB")).closely(call(model, example)) is not None
    assert torch.equal(state, torch.get_rng_state()) and not optimizer.state and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_program_that_fits_narrowly_is_left_alone_without_what_plans() -> None:
    model, example = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)), x(8, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    exact = exact_bytes(model, example)
    launched = Launched(Settings(device="cpu", ram=int(1.2 * exact)))
    launched._decide(call(model, example))
    assert launched._decisions is None and launched._ample is not None and len(launched._ample.outcomes) == 1
    del optimizer


FORWARD = """
    import sys
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 4))
    with torch.no_grad():
        print(model(torch.ones(2, 256)).shape)
    print("torch._dynamo" in sys.modules, "brim.run.launch_ample" in sys.modules)
    print(torch.compile(model, backend="eager")(torch.ones(2, 256)).shape, hasattr(torch._dynamo, "optimize"))
"""


@pytest.mark.parametrize(
    "options", [["--ram", "8MiB"], pytest.param([], marks=pytest.mark.slow)], ids=["narrow", "ample"]
)
def test_a_forward_pass_is_bounded_without_dynamo_which_is_there_when_it_is_asked_for(
    options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(FORWARD))
    command = [sys.executable, "-m", "brim", "run", *options, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["torch.Size([2, 4])", "False True", "torch.Size([2, 4]) True"]
