"""Programs with an ample budget: left alone on the word of a bound, without importing what plans."""

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

from brim.run.script.ample import Ample
from brim.run.script.decide import Decisions
from brim.run.script.hooks import Call
from brim.run.script.outcome import UNTOUCHED
from brim.run.script.run import run
from brim.run.script.settings import Settings
from support.launching import in_child, plainly, program

HEAVY = (
    "brim.run.script.decide",
    "brim.planning.inference.machine",
    "brim.planning.solver",
    "brim.predict",
    "brim.techniques",
    "brim.estimation",
    "highspy",
    "transformers",
)
TRAINS = """
    import random, sys
    import torch
    from torch import nn
    torch.manual_seed(0)
    class Telling(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.inner = nn.Sequential(nn.Linear(512, 1024), nn.Dropout(), nn.BatchNorm1d(1024), nn.Linear(1024, 4))
            self.inner.register_forward_hook(lambda *_: print("hooked"))
        def forward(self, x):
            self.calls += 1
            print("forward", random.random())
            return self.inner(x)
    random.seed(0)
    model = Telling()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item(), model.calls, random.random())
    print({name: value.double().sum().item() for name, value in model.state_dict().items()})
    heavy = [name for name in HEAVY if name in sys.modules]
    print(heavy, "brim.run.script.ample" in sys.modules, file=sys.stderr)
""".replace("HEAVY", str(HEAVY))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Optimizers of other tests are found among what is alive."""
    gc.collect()
    yield


def call(model: nn.Module, *args: Any) -> Call:
    return Call(model=model, called=model, args=args, kwargs={})


def ran(command: list[str], folder: Path) -> tuple[int, str, str]:
    (folder / "script.py").write_text(textwrap.dedent(TRAINS))
    done = subprocess.run([sys.executable, *command, "script.py"], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
def test_a_program_that_fits_runs_as_ever_and_imports_nothing_that_plans(tmp_path: Path) -> None:
    plain, ended = ran([], tmp_path), ran(["-m", "brim", "run"], tmp_path)
    assert plain[0] == 0 and plain[1].count("forward") == 5
    assert ended[:2] == plain[:2]
    assert (plain[2], ended[2]) == ("[] False\n", "[] True\n")


@pytest.mark.thorough
def test_a_program_that_does_not_fit_is_planned_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))
    what = program("plain_loop")
    plain = plainly(what, tmp_path, measure=False)
    ended = in_child(lambda _: run(what, Settings(device="cpu", ram="9MiB")), tmp_path)
    assert (ended.code, ended.out) == (plain.code, plain.out), ended.err
    assert "fitted for train" in ended.err


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "wide layers": (lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), lambda: x(8, 256)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        lambda: x(4, 3, 64, 64),
    ),
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
        lambda: x(2, 128, 64),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 5000)),
        lambda: torch.randint(0, 5000, (2, 64)),
    ),
    "slices": (lambda: Slices(), lambda: x(64, 4096)),
}


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


class Slices(nn.Module):
    """The backward of each slice makes a gradient as large as what was sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return torch.stack([x[row].sum() for row in range(x.shape[0])])


@pytest.mark.thorough
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_more_than_what_is_predicted(kind: str, trains: bool) -> None:
    build, inputs = KINDS[kind]
    model, example = build(), inputs()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True) if trains else None
    with torch.set_grad_enabled(trains):
        bound = Ample(Settings(device="cpu")).outcome(call(model, example))
        exact = Decisions(Settings(device="cpu"), lambda *_: None).decide(call(model, example))
    assert bound is not None and exact is not None
    assert (bound.task, bound.choice, bound.has_optimizer) == (exact.task, UNTOUCHED, optimizer is not None)
    assert bound.untouched_bytes["ram"] >= exact.untouched_bytes["ram"]


@pytest.mark.thorough
def test_nobody_is_taken_at_his_word_where_room_is_scarce() -> None:
    model, example = nn.Linear(256, 256, bias=False), x(1, 256)  # 256 KiB, 0.5 MiB with what is moved
    with torch.no_grad():
        assert Ample(Settings(device="cpu", ram=4 << 20)).outcome(call(model, example)) is None
        assert Ample(Settings(device="cpu", ram=7 << 20)).outcome(call(model, example)) is not None
        both = Ample(Settings(device="cpu", ram=7 << 20))
        other = nn.Linear(256, 256, bias=False)
        assert both.outcome(call(model, example)) is not None
        assert both.outcome(call(model, example)) is not None, "it is the same model"
        assert both.outcome(call(other, example)) is None, "two do not fit without doubt"
        del model
        assert both.outcome(call(other, example)) is not None, "the first one is gone"


class Odd(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(8, 8), way
        if way == "holds a tensor":
            self.table = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "asks for a value" and x.sum().item() > 0:
            return x
        if self.way == "writes outside":
            OUTSIDE.add_(1)
        return self.inner(x)


OUTSIDE = torch.zeros(())


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["holds a tensor", "asks for a value", "writes outside"])
def test_what_cannot_be_bounded_is_left_to_a_prediction_and_nothing_shows(way: str) -> None:
    state = torch.get_rng_state()
    assert Ample(Settings(device="cpu")).outcome(call(Odd(way), x(2, 8))) is None
    assert OUTSIDE.item() == 0
    assert not torch.equal(state, torch.get_rng_state()), "the input was drawn, so the states can be told apart"


@pytest.mark.thorough
def test_an_optimizer_whose_states_are_not_known_is_left_to_a_prediction() -> None:
    class Own(torch.optim.SGD):
        pass

    for make in (torch.optim.LBFGS, Own):
        model = nn.Linear(8, 8)
        optimizer = make(model.parameters())
        assert Ample(Settings(device="cpu")).outcome(call(model, x(2, 8))) is None
        del optimizer


def test_a_budget_larger_than_the_machine_is_left_to_be_refused() -> None:
    assert Ample(Settings(device="cpu", ram=1 << 60)).outcome(call(nn.Linear(8, 8), x(2, 8))) is None


@pytest.mark.thorough
def test_a_later_model_gets_what_the_first_ones_really_leave() -> None:
    settings = Settings(device="cpu", ram=64 << 20)
    small, large = nn.Linear(256, 256), nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    ample = Ample(settings)
    with torch.no_grad():
        bound = ample.outcome(call(small, x(4, 256)))
        assert bound is not None and ample.outcome(call(large, x(4, 512))) is None
        most = bound.untouched_bytes["ram"]
        decisions = Decisions(settings, lambda *_: None, ample.outcomes)
        later = decisions.decide(call(large, x(4, 512)))
    assert later is not None and later.choice == UNTOUCHED
    taken = (64 << 20) - later.budget_bytes["ram"]
    assert 256 * 256 * 4 <= taken == bound.untouched_bytes["ram"] < most


def test_data_parallel_without_a_gpu_is_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = nn.DataParallel(nn.Linear(256, 256))
    with torch.no_grad():
        found = Decisions(Settings(device="cpu"), lambda *_: None).decide(call(model, x(4, 256)))
    assert found is not None and found.why == "" and found.untouched_bytes["ram"] >= 256 * 257 * 4


OUTGROWS = """
    import torch
    from torch import nn
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    with torch.no_grad():
        for rows in (ROWS):
            print(model(torch.zeros(rows, 512)).shape)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "told"), [("8, 8, 40_000", True), ("8, 8, 8", False)])
def test_a_program_that_outgrows_its_budget_later_is_told_of_when_it_ends(
    rows: str, told: bool, tmp_path: Path
) -> None:
    """It was left alone for its first call; nothing looks at those that follow."""
    script = tmp_path / "outgrows.py"
    script.write_text(textwrap.dedent(OUTGROWS.replace("ROWS", rows)))
    command = [sys.executable, "-m", "brim", "run", "--ram", "100MiB", "--device", "cpu", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == (3 if told else 0), ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "and its budget is 100 MiB" in line]
    assert len(lines) == told
    assert not told or "Sequential as it is: make the largest call first" in lines[0]
