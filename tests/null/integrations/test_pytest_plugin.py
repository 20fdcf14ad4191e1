"""The fixture ``brim_memory`` in a pytest of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_STEP = """
    optimizer = torch.optim.{optimizer}(model.parameters())
    def step():
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def test_memory(brim_memory):
    assert brim_memory("{limit}", lambda: build({arguments}), gpu="RTX 4090") > 0
"""
TEST = (
    """
import torch

def build(width=1024, layers=4, batch=64):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    inputs = torch.empty(batch, width)
"""
    + _STEP
)

# Three small histories: a first version, one that computes the same in other words, and one that takes 1 % more.
HISTORIES = {
    "more images": (
        "torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3))",
        "torch.nn.Sequential(*[torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3)])",
        ("torch.randn(600, 3, 32, 32)", "torch.randn((600, 3, 32, 32))", "torch.randn(606, 3, 32, 32)"),
    ),
    "longer texts": (
        "torch.nn.TransformerEncoderLayer(64, 4, 1024, batch_first=True)",
        "torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=1024, batch_first=True)",
        ("torch.randn(64, 200, 64)", "torch.randn(64, 200, 64)", "torch.randn(64, 202, 64)"),
    ),
    "a wider table": (
        "torch.nn.Embedding(100_000, 64)",
        "torch.nn.Embedding(embedding_dim=64, num_embeddings=100_000)",
        ("torch.arange(64)", "torch.arange(0, 64)", "torch.arange(64); model = torch.nn.Embedding(101_000, 64)"),
    ),
}
VERSION = """
import torch

def build():
    model = {model}
    inputs = {inputs}
""" + _STEP.format(optimizer="AdamW", limit="20GiB", arguments="")


def run(folder: Path, *options: str, limit: str = "1GiB", optimizer: str = "SGD", arguments: str = "") -> str:
    return run_file(folder, TEST.format(limit=limit, optimizer=optimizer, arguments=arguments), *options)


def run_file(folder: Path, text: str, *options: str) -> str:
    (folder / "test_step.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "brim.integrations.pytest_plugin", *options]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=folder, capture_output=True, text=True, timeout=100
    )
    return f"{done.returncode} {done.stdout}"


@pytest.mark.slow
def test_a_peak_that_grows_fails_in_one_line(tmp_path: Path) -> None:
    assert run(tmp_path, "--brim-update").startswith("0 ")
    stored = json.loads((tmp_path / "brim_memory.json").read_text())
    assert stored.keys() == {"test_step.py::test_memory 1"}
    assert run(tmp_path).startswith("0 ")
    for grown in ("batch=256", "layers=5", "width=1040"):  # by 2 to 25 percent
        failed = run(tmp_path, arguments=grown)
        assert failed.startswith("1 ") and "% more than the" in failed
        assert "Traceback" not in failed and "def test_memory" not in failed


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORIES)
def test_one_percent_more_is_found_in_a_history_and_other_words_are_not(name: str, tmp_path: Path) -> None:
    first, other_words, inputs = HISTORIES[name]
    versions = [VERSION.format(model=m, inputs=i) for m, i in zip((first, other_words, first), inputs, strict=True)]
    assert run_file(tmp_path, versions[0], "--brim-update").startswith("0 ")
    assert run_file(tmp_path, versions[1]).startswith("0 ")
    failed = run_file(tmp_path, versions[2])
    grown = re.search(r"([\d.]+)% more than the", failed)
    assert failed.startswith("1 ") and grown and 0.8 <= float(grown[1]) <= 1.2, failed


@pytest.mark.thorough
def test_a_peak_above_the_limit_fails_in_one_line(tmp_path: Path) -> None:
    failed = run(tmp_path, limit="20MiB", optimizer="AdamW")
    assert failed.startswith("1 ") and "on RTX 4090, limit 20MiB." in failed
    assert not (tmp_path / "brim_memory.json").exists()


@pytest.mark.thorough
def test_pytest_within_brim_run_warns_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass")
    command = [sys.executable, "-W", "error", "-m", "brim", "run", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout
