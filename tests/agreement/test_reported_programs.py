"""Small programs after public reports of people whose memory ran out, or whose offload did not help.

Each is written anew, for a CPU, after what the report says happens. What it takes on a GPU is worked out by hand from
its shapes, and is what a trace of the program says. Under ``brim run``, in a budget that it does not fit, it prints
what it prints plainly, or is refused in words.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401  # warm in the children

import brim.estimation.simulation
import brim.predict.tracer  # noqa: F401
from brim.errors import ABOVE_BUDGET, BudgetError
from brim.run.script.script import Program, execute
from brim.units import MIB
from support.launching import Ended, Told, budgeted, in_child, plainly

HEAD = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
"""
CHAIN = """
model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]).to(device)
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A program, where it is from, and what each further ``count`` adds to its peak on a GPU, by hand."""

    source: str
    text: str
    adds_mib: float
    counts: tuple[int, int] = (2, 4)
    ram: str = "2MiB"
    choice: str = "fitted"


# 4,096 rows of 256 floats are 4 MiB; each weight is 0.25 MiB.
REPORTS = {
    # Losses are added up, and no backward pass frees what they keep: the inputs of four layers, and the last output.
    "losses_added_up": Report(
        source="pytorch/pytorch#4420",
        text=CHAIN
        + """
total = 0
for _ in range(count):
    total = total + model(torch.randn(4096, 256, device=device)).square().mean()
print(f"{total.item():.5f}")
""",
        adds_mib=20,
        ram="30MiB",
        choice="untouched",
    ),
    # Predictions of an evaluation stay on the device until all are there.
    "predictions_kept": Report(
        source="huggingface/transformers#7232",
        text=CHAIN
        + """
model.eval()
kept = []
with torch.no_grad():
    for _ in range(count):
        kept.append(model(torch.randn(4096, 256, device=device)))
print(f"{torch.cat(kept).double().sum().item():.5f}")
""",
        adds_mib=16,  # kept, once more in what they are joined to, and twice in its copy in double precision
        ram="13500KiB",
        choice="untouched",
    ),
    # As above, but of a step's outputs in a list that an epoch's end would read.
    "validation_outputs": Report(
        source="Lightning-AI/pytorch-lightning#8453",
        text=CHAIN
        + """
outputs = []
for _ in range(count):
    with torch.no_grad():
        y = model(torch.randn(4096, 256, device=device))
        outputs.append({"loss": y.square().mean(), "y": y})
print(f"{sum(output['loss'].item() for output in outputs):.5f}")
""",
        adds_mib=4,
        ram="13500KiB",
        choice="untouched",
    ),
    # A graph that is retained for a second gradient, and held by a list of losses.
    "retained_graphs": Report(
        source="hosseinshn/GradNorm#9",
        text=CHAIN
        + """
history = []
for _ in range(count):
    loss = model(torch.randn(4096, 256, device=device)).square().mean()
    torch.autograd.grad(loss, model[3].weight, retain_graph=True)
    history.append(loss)
print(f"{sum(loss.item() for loss in history):.5f}")
""",
        adds_mib=20,
        ram="30MiB",
        choice="untouched",
    ),
    # Logits over a large vocabulary: of 1,024 tokens and 8,192 words 32 MiB, once as they are, once as log softmax,
    # and once as their gradient. The count is of 1,024 tokens.
    "large_vocabulary": Report(
        source="unslothai/unsloth#91",
        text="""
head = nn.Linear(64, 8192, bias=False).to(device)
tokens = 1024 * count
hidden = torch.randn(tokens, 64, device=device)
loss = nn.functional.cross_entropy(head(hidden), torch.randint(0, 8192, (tokens,), device=device))
loss.backward()
print(f"{loss.item():.5f}")
""",
        adds_mib=3 * 32 + 0.25 + 8 / 1024,
        ram="20MiB",
        choice="refused",
    ),
    # Every layer of an offloaded model is moved in for its call and out again: one is there at a time.
    "layers_by_hand": Report(
        source="Sarania/blissful-tuner#10",
        text="""
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4 * count)])
with torch.no_grad():
    x = torch.randn(8, 1024, device=device)
    for layer in model:
        x = layer.to(device)(x)
        layer.to("cpu")
print(f"{x.double().sum().item():.5f}")
""",
        adds_mib=0,
        ram="10MiB",
    ),
    # Gradient checkpointing of layers whose inputs need no gradient works without the reentrant form: of each layer
    # only its input stays, 4 MiB.
    "checkpointed_adapters": Report(
        source="huggingface/peft#1142",
        text="""
from torch.utils.checkpoint import checkpoint
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = (nn.Linear(256, 256, bias=False) for _ in range(3))
        self.base.requires_grad_(False)
    def forward(self, x):
        return (self.base(x) + self.b(self.a(x))).relu()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(count))
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x
model = Model().to(device)
loss = model(torch.randn(4096, 256, device=device)).square().mean()
loss.backward()
print(f"{loss.item():.5f}")
""",
        adds_mib=4 + 0.75,  # an input and weights; for each gradient of 0.5 MiB such an input has been freed
        ram="45MiB",
        choice="",
    ),
    # States of the optimizer, moved to the host by hand between steps: weights, gradients and both states are there
    # in each step, so four times the weights.
    "states_by_hand": Report(
        source="meta-pytorch/torchtune#385",
        text="""
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(count)]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(3):
    loss = model(torch.randn(8, 1024, device=device)).square().mean()
    loss.backward()
    for state in optimizer.state.values():
        state.update({name: value.to(device) for name, value in state.items() if name != "step"})
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state.update({name: value.to("cpu") for name, value in state.items()})
    print(f"{loss.item():.6f}")
""",
        adds_mib=16 + 1 / 32,
        ram="24MiB",
    ),
    # A cache of keys and values that a loop of its own passes on: 8 KiB a token of two layers.
    "own_cache": Report(
        source="huggingface/transformers#30704",
        text="""
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(512, 512, bias=False) for _ in range(3))
    def forward(self, x, cache):
        cache.append((self.k(x), self.v(x)))
        keys, values = (torch.cat(parts) for parts in zip(*cache))
        return (self.q(x) @ keys.T).softmax(-1) @ values
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x, caches):
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cache)
        return x
model, caches = Model().to(device), [[], []]
with torch.no_grad():
    for _ in range(count):
        x = model(torch.randn(256, 512, device=device), caches)
print([len(cache) for cache in caches], f"{x.double().sum().item():.5f}")
""",
        # Two layers' keys and values, those of one joined, and its scores before and after the softmax.
        adds_mib=4 * 0.5 + 2 * 0.5 + 2 * 0.25,
        counts=(4, 8),
        ram="7MiB",
    ),
    # The top or the bottom layers are trained: below the lowest that is trained nothing is kept.
    "top_layers_trained": Report(
        source="huggingface/transformers#26221",
        text="""
model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)]).to(device)
for number, layer in enumerate(model):
    layer.requires_grad_(number >= 8 - count)
loss = model(torch.randn(4096, 256, device=device)).square().mean()
loss.backward()
print(f"{loss.item():.5f}")
""",
        adds_mib=4,  # for each gradient of a weight an input has been freed
        counts=(3, 6),
        ram="25MiB",
    ),
}


def reported(name: str, folder: Path, count: int) -> Program:
    path = folder / f"{name}.py"
    path.write_text(HEAD + textwrap.dedent(REPORTS[name].text), encoding="utf-8")
    return Program(target=str(path), arguments=(str(count),))


def peak_on_gpu(what: Program, folder: Path) -> int:
    def work(told: Told) -> int:
        from brim.estimation.simulation import simulate
        from brim.predict.tracer import trace

        told.value = simulate(trace(lambda: lambda: execute(what), steps=1)).peak_bytes.allocated
        return 0

    ended = in_child(work, folder)
    assert ended.code == 0, ended.err
    return int(ended.found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", REPORTS)
def test_what_a_reported_program_takes_is_foreseen(name: str, tmp_path: Path) -> None:
    report = REPORTS[name]
    few, many = (peak_on_gpu(reported(name, tmp_path, count), tmp_path) for count in report.counts)
    added_mib = (many - few) / MIB / (report.counts[1] - report.counts[0])
    assert added_mib == pytest.approx(report.adds_mib, rel=0.01, abs=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("name", REPORTS)
def test_a_reported_program_runs_inside_a_budget(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))
    report = REPORTS[name]
    what = reported(name, tmp_path, report.counts[0])
    plain: Ended = plainly(what, tmp_path, measure=False)
    ended = budgeted(what, tmp_path, ram=report.ram)
    assert "Traceback" not in ended.err
    if report.choice == "refused":
        assert ended.code == BudgetError.exit_code
        assert ended.err.startswith("Error: Cannot run ")
        return
    assert (ended.code, ended.out) == (plain.code, plain.out), ended.err
    assert not report.choice or report.choice in [model["choice"] for model in ended.found["models"]]


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are Linux's")
@pytest.mark.parametrize("name", [name for name in REPORTS if REPORTS[name].choice == "untouched"])
def test_a_reported_program_that_outgrows_its_budget_is_told_of(name: str, tmp_path: Path) -> None:
    what = reported(name, tmp_path, 60)
    command = [
        sys.executable,
        "-m",
        "brim",
        "run",
        "--device",
        "cpu",
        "--ram",
        "100MiB",
        what.target,
        *what.arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == ABOVE_BUDGET, done.stderr
    assert "of RAM, and its budget is 100 MiB (Sequential as it is: make the largest call first)" in done.stderr
