"""A program that computes gradients and has no optimizer is held to its budget of VRAM."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA"),
]
MIB = 1 << 20
PROGRAM = textwrap.dedent("""
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(16)]).cuda()
    for _ in range(3):
        model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
        print([p.grad.norm().item() for p in model.parameters()])
        model.zero_grad()
    import sys
    print(torch.cuda.max_memory_reserved(), file=sys.stderr)
""")


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, *options, str(folder / "program.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("vram_bytes", [150 * MIB, 180 * MIB], ids=lambda count: f"{count // MIB} MiB")
def test_gradients_without_an_optimizer_are_in_the_promise(vram_bytes: int, tmp_path: Path) -> None:
    """A step takes 206 MiB without a plan: weights, gradients and two workspaces of cuBLAS."""
    report = tmp_path / "report.json"
    words = ["-m", "brim", "run", "--vram", str(vram_bytes), "--ram", "1GiB", "--report", str(report)]
    plain, done = run(tmp_path), run(tmp_path, *words)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    (model,) = json.loads(report.read_text())["models"]
    found: dict[str, Any] = model["promised_bytes"]
    assert model["choice"] == "fitted" and model["task"] == "train"
    assert int(done.stderr.splitlines()[-1]) <= found["vram"] <= vram_bytes
