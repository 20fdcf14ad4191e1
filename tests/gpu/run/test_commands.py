"""The commands and calls of the README with a budget of VRAM, end to end: what is computed, and what is reserved."""

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
from transformers import LlamaForCausalLM

import brim
from brim.cli import main
from brim.planning.solver import cost_model
from brim.run.train.loop import train
from brim.run.train.request import Request as Training
from support.generating import save_words_llama
from support.gpu import DONE
from support.trainings import write_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 123 MiB."""
    folder = save_words_llama(tmp_path_factory.mktemp("llama"), layers=11)
    write_text(folder / "text.txt")
    return folder


@pytest.fixture
def reserved() -> Iterator[Any]:
    """A function that tells what was reserved at most since the test began."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    yield lambda: torch.cuda.max_memory_reserved() - before


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    made: torch.Tensor = model(input_ids=IDS.cuda()).logits.cpu()
    return made


def resident(saved: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(saved).eval()


def test_generate(saved: Path, reserved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    budget = ["--vram", "140MiB", "--ram", "2GiB", "--device", "cuda", "--max-new-tokens", "4", "--json"]
    assert main(["generate", str(saved), "--prompt", "one more thing", *budget]) in DONE
    assert reserved() <= 140 * MIB
    found = json.loads(capsys.readouterr().out)
    assert found["measured_bytes"]["vram"] <= found["promised_bytes"]["vram"] <= 140 * MIB
    assert {decision["choice"] for decision in found["plan"]["decisions"]} > {"resident"}


def test_while_steps_are_taken_pytorch_is_held_to_the_budget(saved: Path, tmp_path: Path, reserved: Any) -> None:
    shares: list[float] = []

    def seen(*_: Any) -> None:
        shares.append(torch.cuda.get_per_process_memory_fraction())

    def held_bytes() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    total = torch.cuda.mem_get_info()[1]
    before = held_bytes()
    training = Training(
        model=saved, data=saved / "text.txt", output=tmp_path / "out", seq=16, batch=1, steps=1, precision="fp32",
        vram="280MiB", ram="3GiB", device="cuda",
    )  # fmt: skip
    train(training, on_step=seen)
    assert shares[-1] * total == pytest.approx(before + 280 * MIB, abs=MIB)
    assert torch.cuda.get_per_process_memory_fraction() == 1


@pytest.mark.parametrize("options", [[], ["--method", "lora"]], ids=["full", "lora"])
def test_train(
    options: list[str], saved: Path, tmp_path: Path, reserved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, gradients and states are 492 MiB and more, cuBLAS's workspaces 64."""
    command = ["train", str(saved), "--data", str(saved / "text.txt"), "--output", str(tmp_path / "out")]
    command += ["--seq", "16", "--batch", "1", "--steps", "2", "--save-every", "1", "--precision", "fp32", "--json"]
    assert main([*command, "--vram", "280MiB", "--ram", "3GiB", "--device", "cuda", *options]) in DONE
    found = json.loads(capsys.readouterr().out)
    assert reserved() <= found["promised_bytes"]["vram"] <= 280 * MIB
    assert found["measured_bytes"]["vram"] <= 280 * MIB
    assert main([*command, "--vram", "280MiB", "--ram", "3GiB", "--device", "cuda", *options, "--resume"]) in DONE


@pytest.mark.parametrize(("vram_mib", "sixteenths"), [(300, 1), (340, 3), (380, 6)])
def test_train_with_states_that_visit_the_gpu(
    vram_mib: int,
    sixteenths: int,
    saved: Path,
    tmp_path: Path,
    reserved: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updated in backward: in the smallest budget beside weights that are streamed."""
    monkeypatch.setattr(cost_model, "_VISITING_PARTS", (sixteenths,))  # else by this machine's rates
    command = ["train", str(saved), "--data", str(saved / "text.txt"), "--output", str(tmp_path / "out"), "--json"]
    command += ["--seq", "16", "--batch", "1", "--steps", "2", "--precision", "fp32", "--device", "cuda"]
    assert main([*command, "--vram", f"{vram_mib}MiB", "--ram", "3GiB"]) in DONE
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["settings"]["gpu_sixteenths"] == sixteenths
    assert found["plan"]["settings"]["update_in_backward"]
    assert reserved() <= found["promised_bytes"]["vram"] <= vram_mib * MIB
    if len(DONE) == 1:  # in a rehearsal RAM also has the VRAM, and what a simulated GPU takes beside it
        assert found["measured_bytes"]["ram"] <= found["promised_bytes"]["ram"]


def test_load(saved: Path, reserved: Any) -> None:
    expected = logits(resident(saved).cuda())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = brim.load(saved, vram="140MiB", ram="2GiB", device="cuda", host_compute=False)
    assert torch.equal(logits(model), expected)
    assert reserved() <= 140 * MIB
    model.brim.remove()


def test_two_models_on_one_device_keep_to_a_budget_each(saved: Path, reserved: Any) -> None:
    models = [resident(saved) for _ in range(2)]
    with torch.no_grad():
        models[1].lm_head.weight.mul_(2)
    expected = [logits(model.cuda()) for model in models]
    for model in models:
        model.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    handles = [brim.fit(m, vram="100MiB", ram="1GiB", device="cuda", example={"input_ids": IDS}) for m in models]
    for _ in range(2):
        for model, wanted in zip(models, expected, strict=True):
            assert torch.equal(logits(model), wanted)
    assert reserved() <= sum(handle.plan.promise.peak_bytes["vram"] for handle in handles) <= 200 * MIB
    for handle in handles:
        handle.remove()


def test_a_model_is_fitted_again_and_again(saved: Path, reserved: Any) -> None:
    model = resident(saved)
    expected = logits(model.cuda())
    model.cpu()
    for vram_bytes in (100 * MIB, 140 * MIB, 90 * MIB, 100 * MIB):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        handle = brim.fit(model, vram=vram_bytes, ram="1GiB", device="cuda", example={"input_ids": IDS})
        assert torch.equal(logits(model), expected)
        assert reserved() <= handle.plan.promise.peak_bytes["vram"] <= vram_bytes
        handle.remove()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.equal(logits(model.cuda()), expected)


PROGRAM = textwrap.dedent("""
    import sys, torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])
    x = torch.randn(2, 1024)
    task = sys.argv[1]
    if task == "forward":
        with torch.no_grad():
            made = model(x.cuda())
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            made = model(x.cuda()).square().mean()
            made.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(made.double().sum().item(), torch.cuda.max_memory_reserved())
""")


@pytest.mark.parametrize("task", ["forward", "train"])
def test_run(task: str, tmp_path: Path) -> None:
    """A model of 96 MiB, made on the CPU: a budget that holds none of it whole."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "brim", "run", "--vram", "116MiB", "--ram", "1GiB", "--device", "cuda"]
    done = subprocess.run([*command, str(path), task], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made, found = done.stdout.split()
    assert f"fitted for {task}" in done.stderr
    assert int(found) <= 116 * MIB
    assert made != "nan"
