"""Every command that plans goes through the one search and the one proof."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import brim
from brim.cli import main
from brim.planning import proof, ranks
from brim.requests.plan import MeshRequest
from brim.run.script.run import run
from brim.run.script.script import Program
from brim.run.script.settings import Settings
from brim.units import MIB
from support.generating import save_words_llama
from support.launching import Told, in_child
from support.trainings import write_text

X = torch.zeros(2, 384)
PROGRAM = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(384, 384) for _ in range(8)])
with torch.no_grad():
    model(torch.zeros(2, 384))
"""
GRADIENTS = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(384, 384) for _ in range(8)])
model(torch.randn(2, 384)).sum().backward()
"""


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(384, 384) for _ in range(8)])


def plan(folder: Path, task: str) -> None:
    assert main(["plan", str(folder / "llama"), "--task", task, "--ram", "2GiB", "--seq", "16", "--json"]) == 0


def generate(folder: Path) -> None:
    words = ["--prompt", "a", "--max-new-tokens", "2", "--ram", "400MiB", "--device", "cpu"]
    assert main(["generate", str(folder / "llama"), *words]) == 0


def train(folder: Path) -> None:
    words = ["--data", str(write_text(folder / "text.txt")), "--output", str(folder / "out"), "--device", "cpu"]
    assert main(["train", str(folder / "llama"), *words, "--seq", "16", "--batch", "1", "--steps", "1"]) == 0


def run_program(folder: Path, text: str, ram_bytes: int) -> None:
    (folder / "program.py").write_text(text)
    assert run(Program(target=str(folder / "program.py")), Settings(ram=ram_bytes)) == 0


def fit_training(folder: Path) -> None:
    model = layers()
    brim.fit(model, torch.optim.AdamW(model.parameters()), ram="1GiB", device="cpu", example=X)


def split(folder: Path, engine: str) -> None:
    request = MeshRequest(
        model="gpt2", task="train", gpu="H100", gpus=2, seq=64, global_batch=2, engine=engine, top=1
    )  # type: ignore[arg-type]
    assert ranks.fastest(request).rows


# A model that takes at most half of its budget would not be planned.
COMMANDS: dict[str, Callable[[Path], object]] = {
    "brim plan --task generate": lambda folder: plan(folder, "generate"),
    "brim plan --task train": lambda folder: plan(folder, "train"),
    "brim plan --gpus": lambda folder: split(folder, "torch"),
    "brim plan --gpus --engine megatron": lambda folder: split(folder, "megatron"),
    "brim generate": generate,
    "brim train": train,
    "brim run": lambda folder: run_program(folder, PROGRAM, 3 * MIB),
    "brim run of gradients alone": lambda folder: run_program(folder, GRADIENTS, 7 * MIB),
    "brim.load": lambda folder: brim.load(folder / "llama", ram="400MiB", device="cpu"),
    "brim.fit": lambda folder: brim.fit(layers(), ram="3MiB", device="cpu", example=X),
    "brim.fit with an optimizer": fit_training,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_words_llama(made / "llama", layers=2)
    return made


def count_calls(name: str, calls: list[str]) -> None:
    """Add ``name`` to ``calls`` whenever that function of ``proof`` is called, by whatever name it was imported."""
    function = getattr(proof, name)
    before = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    before.__kwdefaults__ = function.__kwdefaults__
    made: dict[str, types.FunctionType] = {}
    exec(f"def {name}(*a, **k):\n _calls.append({name!r})\n return _{name}(*a, **k)", made)
    function.__globals__.update({"_calls": calls, f"_{name}": before})
    function.__code__ = made[name].__code__


@pytest.mark.parametrize("name", COMMANDS)
def test_it_searches_and_proves(name: str, folder: Path, tmp_path: Path) -> None:
    def work(told: Told) -> None:
        calls: list[str] = []
        for function in ("search", "prove"):
            count_calls(function, calls)
        COMMANDS[name](folder)
        told.value = calls

    ended = in_child(work, tmp_path)
    assert ended.code == 0, ended.err
    assert {"search", "prove"} <= set(ended.found), ended.err
