"""Unified memory on a GPU: beyond its budget PyTorch's tensors lie in page-locked RAM, and compute the same."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA"),
]
PROGRAM = textwrap.dedent("""
    import torch
    torch.manual_seed(0)
    weights = [torch.randn(2048, 2048).cuda() for _ in range(16)]  # 16 MiB each
    x = torch.randn(8, 2048).cuda()
    for w in weights:
        x = torch.tanh(x @ w)
    print(x.double().sum().item())
""")


def run(program: str, *options: str, report: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "brim", "run", *options, *(["--report", report] if report else []), program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_what_does_not_fit_spills_and_the_numbers_are_the_same(tmp_path: object) -> None:
    pytest.importorskip("rmm")
    path, report = f"{tmp_path}/program.py", f"{tmp_path}/report.json"
    with open(path, "w") as file:
        file.write(PROGRAM)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    done = run(path, "--mode", "unified", "--vram", "96MiB", "--ram", "1GiB", report=report)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    with open(report) as file:
        found = json.load(file)["unified"]
    assert found["vram_peak"] <= 96 << 20
    assert found["spilled_peak"] >= 128 << 20
    assert "were in RAM" in done.stderr


def test_managed_memory_beyond_what_is_free_is_refused(tmp_path: object) -> None:
    pytest.importorskip("rmm")
    path = f"{tmp_path}/program.py"
    with open(path, "w") as file:
        file.write(PROGRAM)
    total = torch.cuda.get_device_properties(0).total_memory
    done = run(path, "--mode", "unified", "--managed", "--vram", "96MiB", "--ram", str(2 * total))
    assert done.returncode == 2 and "hang a driver" in done.stderr


def test_a_program_s_own_memory_fraction_bounds_the_budget(tmp_path: object) -> None:
    path, report = f"{tmp_path}/program.py", f"{tmp_path}/report.json"
    with open(path, "w") as file:
        file.write(
            textwrap.dedent("""
            import torch
            from torch import nn
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((256 << 20) / total)
            model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(32)])
            with torch.no_grad():
                print(model(torch.randn(2, 2048).cuda()).shape)
        """)
        )
    done = run(path, "--vram", "8GiB", report=report)
    assert done.returncode == 0, done.stderr
    with open(report) as file:
        (model,) = json.load(file)["models"]
    assert model["choice"] == "fitted" and model["budget_bytes"]["vram"] <= 256 << 20


def test_a_program_cannot_have_an_allocator_of_its_own_beside_unified_memory(tmp_path: object) -> None:
    pytest.importorskip("rmm")
    path = f"{tmp_path}/program.py"
    with open(path, "w") as file:
        file.write(
            "import torch\nfrom rmm.allocators.torch import rmm_torch_allocator\n"
            "torch.cuda.memory.change_current_allocator(rmm_torch_allocator)\n"
        )
    done = run(path, "--mode", "unified", "--vram", "96MiB", "--ram", "1GiB")
    assert done.returncode == 1 and "already initialized allocator" in done.stderr


def test_a_program_with_an_allocator_of_its_own_is_planned_through_it(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, report = f"{tmp_path}/program.py", f"{tmp_path}/report.json"
    with open(path, "w") as file:
        file.write(
            textwrap.dedent("""
            import torch
            from torch import nn
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(32)])
            with torch.no_grad():
                print(model(torch.randn(2, 2048).cuda()).shape, torch.cuda.memory.get_allocator_backend())
        """)
        )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    done = run(path, "--vram", "256MiB", report=report)
    assert done.returncode == 0, done.stderr
    assert "cudaMallocAsync" in done.stdout and "has its own allocator" in done.stderr
    with open(report) as file:
        (model,) = json.load(file)["models"]
    assert model["choice"] == "fitted"
