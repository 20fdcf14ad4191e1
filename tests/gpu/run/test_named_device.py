"""``--device cuda:1``: all of a command, and of a program that says ``cuda``, is on that GPU."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.cli import main
from support.generating import save_words_llama
from support.gpu import DONE
from support.trainings import write_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 123 MiB."""
    folder = save_words_llama(tmp_path_factory.mktemp("llama"), layers=11)
    write_text(folder / "text.txt")
    return folder


@pytest.fixture
def reserved() -> Iterator[Any]:
    """A function that tells what was reserved at most of each GPU since the test began."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = []
    for index in range(2):
        torch.cuda.reset_peak_memory_stats(index)
        before.append(torch.cuda.memory_reserved(index))
    yield lambda: [torch.cuda.max_memory_reserved(index) - before[index] for index in range(2)]
    assert torch.cuda.current_device() == 0


def test_generate(saved: Path, reserved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "generate",
        str(saved),
        "--prompt",
        "one more thing",
        "--max-new-tokens",
        "4",
        "--json",
        "--ram",
        "2GiB",
    ]
    assert main([*command, "--vram", "140MiB", "--device", "cuda:1"]) in DONE
    first, second = reserved()
    assert first == 0 and 0 < second <= 140 * MIB
    found = json.loads(capsys.readouterr().out)
    assert {decision["choice"] for decision in found["plan"]["decisions"]} > {"resident"}
    assert main([*command, "--vram", "140MiB", "--device", "cuda:0"]) in DONE
    assert json.loads(capsys.readouterr().out)["text"] == found["text"]


@pytest.mark.parametrize("stream", [[], ["--offload-optimizer", "ram"]], ids=["streamed", "offloaded"])
def test_train(
    stream: list[str], saved: Path, tmp_path: Path, reserved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(saved), "--data", str(saved / "text.txt"), "--seq", "16", "--batch", "1", "--steps", "2"]
    command += ["--save-every", "1", "--precision", "fp32", "--json", "--ram", "3GiB", "--vram", "280MiB", *stream]
    assert main([*command, "--device", "cuda:1", "--output", str(tmp_path / "one")]) in DONE
    first, second = reserved()
    assert first == 0 and 0 < second <= 280 * MIB
    found = json.loads(capsys.readouterr().out)
    assert main([*command, "--device", "cuda:1", "--output", str(tmp_path / "one"), "--resume"]) in DONE
    capsys.readouterr()
    assert reserved()[0] == 0
    assert main([*command, "--device", "cuda:0", "--output", str(tmp_path / "other")]) in DONE
    assert json.loads(capsys.readouterr().out)["losses"] == found["losses"]


@pytest.mark.parametrize("command", ["generate", "train"])
def test_a_number_that_is_not_there(
    command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "one"] if command == "generate" else ["--data", str(saved / "text.txt")]
    words += [] if command == "generate" else ["--output", str(tmp_path / "out")]
    assert main([command, str(saved), *words, "--device", "cuda:2"]) == 2
    assert "PyTorch sees 2 CUDA devices" in capsys.readouterr().err


PROGRAM = textwrap.dedent("""
    import sys, torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])
    where = sys.argv[1]
    x = torch.randn(2, 1024).to(where)
    if sys.argv[2:]:
        model.to(where)
    with torch.no_grad():
        made = model(x)
    count = torch.cuda.device_count()
    print(count, made.device, *(torch.cuda.max_memory_reserved(index) for index in range(count)))
""")


# After it has imported PyTorch a program may still say which GPUs it sees, and fork children that use them.
LATE = textwrap.dedent("""
    import os, torch
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    if os.fork() == 0:
        torch.ones(1, device="cuda")
        os._exit(0)
    _, status = os.wait()
    print(torch.cuda.device_count(), os.waitstatus_to_exitcode(status))
""")


def run(
    tmp_path: Path, *options: str, program: tuple[str, ...], text: str = PROGRAM
) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(text)
    command = [sys.executable, "-m", "brim", "run", "--vram", "80MiB", "--ram", "1GiB", *options, str(path), *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_program_sees_that_gpu_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cuda:1", program=("cuda",))
    assert done.returncode == 0, done.stderr
    count, device, reserved = done.stdout.split()
    assert (count, device) == ("1", "cuda:0")
    assert 0 < int(reserved) <= 80 * MIB
    assert "fitted for forward" in done.stderr
    refused = run(tmp_path, "--device", "cuda:2", program=("cuda",))
    assert refused.returncode == 2
    assert "PyTorch sees no such GPU (CUDA_VISIBLE_DEVICES=2)" in refused.stderr


def test_a_program_s_model_is_fitted_on_the_gpu_that_it_lies_on(tmp_path: Path) -> None:
    done = run(tmp_path, program=("cuda:1", "moved"))
    assert done.returncode == 0, done.stderr
    count, device, first, second = done.stdout.split()
    assert (count, device) == ("2", "cuda:1")
    assert int(first) == 0 and int(second) > 0
    assert "fitted for forward" in done.stderr


@pytest.mark.parametrize("options", [(), ("--mode", "stream"), ("--vram", "50%")], ids=["auto", "stream", "a share"])
def test_cuda_is_not_set_up_before_the_program_does(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, *options, program=(), text=LATE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0"], done.stderr
