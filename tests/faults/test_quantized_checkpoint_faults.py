"""What goes wrong with a checkpoint that another library quantized: one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from brim.errors import ModelError, UnsupportedError
from brim.models.opening import open_model
from brim.models.quantized import open_as
from brim.models.training_model import open_training_model

WEIGHT = "model.layers.0.mlp.up_proj.weight"
OF_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def stated(plain: Path) -> Path:
    """A checkpoint whose configuration says that it is quantized."""
    path = plain / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": OF_BITSANDBYTES}))
    return plain


@pytest.mark.parametrize(
    "open_it",
    [
        lambda folder: open_as(folder, "bf16"),
        lambda folder: open_as(folder, "int8"),
        lambda folder: open_as(folder, None, quantized=False),
        lambda folder: open_training_model(folder, method="full", precision="fp32", seed=0),
    ],
    ids=["--precision bf16", "--precision int8", "over ranks", "training"],
)
def test_what_would_widen_or_train_quantized_weights_is_refused(stated: Path, open_it: Callable[[Path], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"quantized \(bitsandbytes\)(.|\n)*leave out a given precision"):
        open_it(stated)


def test_a_missing_package_is_named_with_how_to_install_it(stated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers import quantizer_bnb_4bit

    monkeypatch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"requires bitsandbytes: `pip install(.|\n)*Install it"):
        open_model(stated)


def without(tensors: dict[str, torch.Tensor], end: str) -> None:
    del tensors[f"{WEIGHT}.{end}"]


def bare(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{WEIGHT}.")]:
        del tensors[name]


def shortened(tensors: dict[str, torch.Tensor], end: str) -> None:
    name = f"{WEIGHT}{end}"
    tensors[name] = tensors[name][:-1].clone()


def redescribed(tensors: dict[str, torch.Tensor], **values: Any) -> None:
    name = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
    described = json.loads(bytes(tensors[name].tolist())) | values
    tensors[name] = torch.tensor([*json.dumps(described).encode()], dtype=torch.uint8)


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "no scales": (lambda tensors: without(tensors, "absmax"), "absmax"),
    "no description": (lambda tensors: without(tensors, "quant_state.bitsandbytes__nf4"), "description"),
    "nothing beside it": (bare, "description"),
    "too few bytes": (lambda tensors: shortened(tensors, ""), "bytes for"),
    "too few scales": (lambda tensors: shortened(tensors, ".absmax"), "scales"),
    "too few scales of scales": (lambda tensors: shortened(tensors, ".nested_absmax"), "scales of scales"),
    "a short code": (lambda tensors: shortened(tensors, ".quant_map"), "16 values"),
    "another shape": (lambda tensors: redescribed(tensors, shape=[64, 128]), "layer has"),
    "no blocks": (lambda tensors: redescribed(tensors, blocksize=0), "ZeroDivision"),
    "no JSON": (lambda tensors: tensors[f"{WEIGHT}.quant_state.bitsandbytes__nf4"].zero_(), "JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_statistics_are_found_when_the_model_is_opened(plain: Path, tmp_path: Path, damage: str) -> None:
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    folder = tmp_path / "quantized"
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change, word = DAMAGES[damage]
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"Cannot read {WEIGHT}(.|\n)*{word}"):
        open_model(folder)
