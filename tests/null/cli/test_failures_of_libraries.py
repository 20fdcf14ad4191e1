"""What other people's code raises: a library that cannot be imported, a model that cannot be called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from brim import cli

pytestmark = pytest.mark.thorough

PROGRAM = """
import torch
def build():
    return torch.nn.Linear(1024, 1024), torch.zeros(8, 1024)
"""


def ran(arguments: list[str], folder: Path, library: str, raises: str) -> subprocess.CompletedProcess[str]:
    """``brim`` where ``library`` raises while it is imported."""
    (folder / "broken" / library).mkdir(parents=True)
    (folder / "broken" / library / "__init__.py").write_text(f"raise {raises}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder / "broken")}
    command = [sys.executable, "-c", "import sys; from brim.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=250)


@pytest.mark.parametrize("library", ["transformers", "peft", "accelerate", "diffusers", "tokenizers"])
def test_a_step_of_torch_alone_needs_no_other_library(library: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = ran(["estimate", "program.py:build"], tmp_path, library, "AttributeError('an old name')")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("library", "arguments"),
    [
        ("transformers", ["plan", "llama-3.2-1b"]),
        ("transformers", ["estimate", "llama-3.2-1b"]),
        ("peft", ["estimate", "llama-3.2-1b", "--task", "train", "--method", "lora", "--seq", "16"]),
        ("numpy", ["estimate", "llama-3.2-1b"]),
        ("safetensors", ["estimate", "llama-3.2-1b"]),
    ],
)
def test_a_command_that_needs_a_broken_library_says_which(library: str, arguments: list[str], tmp_path: Path) -> None:
    done = ran(arguments, tmp_path, library, "RuntimeError('numpy.dtype size changed')")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"Cannot import {library}, which this needs." in done.stderr
    assert "RuntimeError: numpy.dtype size changed" in done.stderr
    assert f"pip install --upgrade {library}" in done.stderr


LLAMA4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 1000,
    },
    "vision_config": {
        "model_type": "llama4_vision_model", "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2,
        "num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "projector_input_dim": 64,
        "projector_output_dim": 64, "vision_output_dim": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("task", ["generate", "train"])
def test_a_model_that_raises_when_it_is_called_is_one_error_with_its_line(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama4 import modeling_llama4

    def without_image(self: object, *arguments: object, **named: object) -> None:
        raise AttributeError("no image_outputs")

    monkeypatch.setattr(modeling_llama4.Llama4TextModel, "forward", without_image)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA4), encoding="utf-8")
    assert cli.main(["plan", str(tmp_path), "--task", task]) == 2
    told = capsys.readouterr().err
    assert "Error: The model cannot be called: AttributeError: no image_outputs" in told
    assert "test_failures_of_libraries.py" in told and 'raise AttributeError("no image_outputs")' in told
    assert "Traceback" not in told
