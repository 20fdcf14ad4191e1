"""What ``brim train`` promises of RAM is what its process grows by, whatever the shape of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.tiny_model import save_tokenizer

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the high water of a process is read from /proc"),
    pytest.mark.timeout(600),
]


def llama(width: int, layers: int) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=8, vocab_size=300, bos_token_id=0,
        )
    )  # fmt: skip


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_heads=8, vocab_size=3000, decoder_start_token_id=0
        )
    )


SHAPES: dict[str, Callable[[], Any]] = {
    "deep and thin": lambda: llama(128, 20),
    "short and wide": lambda: llama(1024, 2),
    "encoder and decoder": t5,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=pytest.mark.slow) if shape == "short and wide" else shape for shape in SHAPES],
)
def test_the_process_grows_as_promised(shape: str, tmp_path: Path, probed_home: Path) -> None:
    found = trained(SHAPES[shape](), tmp_path, probed_home, "--ram", "8GiB")
    promised, measured = found["promised_bytes"]["ram"], found["measured_bytes"]["ram"]
    assert measured <= promised
    assert measured >= 0.95 * promised


@pytest.mark.slow
def test_a_tight_budget_holds_where_gradients_are_clipped_and_checkpoints_saved(
    tmp_path: Path, probed_home: Path
) -> None:
    """Then weights that come and go are updated after backward, and read once more when they are saved."""
    budget_bytes = 260 << 20  # weights and gradients take 380
    limits = ["--ram", str(budget_bytes), "--offload-optimizer", "disk", "--disk", f"{tmp_path}:2GiB"]
    found = trained(
        llama(768, 6), tmp_path, probed_home, *limits, "--seq", "64", "--clip-norm", "1.0", "--save-every", "1"
    )
    assert any(decision["choice"] == "stream:disk" for decision in found["plan"]["decisions"])
    assert not found["plan"]["settings"]["update_in_backward"]
    assert found["measured_bytes"]["ram"] <= budget_bytes


def trained(model: Any, folder: Path, home: Path, *options: str) -> dict[str, Any]:
    """What three steps of ``brim train`` print."""
    torch.manual_seed(0)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text(
        "".join(f"{number} pieces of text, one after another. " for number in range(400))
    )
    command = [sys.executable, "-m", "brim", "train", str(folder / "model"), "--data", str(folder / "text.txt")]
    command += ["--output", str(folder / "out"), "--seq", "128", "--batch", "4", "--steps", "3", *options]
    settings = {"XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [*command, "--device", "cpu", "--json"], capture_output=True, text=True, env=os.environ | settings
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
