"""What goes wrong with a checkpoint that another library quantized: one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AwqConfig,
    BitsAndBytesConfig,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from brim.errors import ModelError, UnsupportedError
from brim.models.opening import open_model
from brim.models.quantized import open_as
from brim.models.training_model import open_training_model
from support.packed_checkpoints import packed

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
    with pytest.raises(UnsupportedError, match=r"requires bitsandbytes: `pip install(.|\n)*pip install bitsandbytes"):
        open_model(stated)


@pytest.mark.parametrize(
    ("method", "missing", "packages"),
    [
        ("gptq", "is_optimum_available", "gptqmodel optimum"),
        ("gptq", "is_gptqmodel_available", "gptqmodel optimum"),
        ("awq", "is_gptqmodel_available", "gptqmodel"),
    ],
)
def test_a_missing_package_of_packed_weights_is_named(
    plain: Path, monkeypatch: pytest.MonkeyPatch, method: str, missing: str, packages: str
) -> None:
    config = AwqConfig(bits=4) if method == "awq" else GPTQConfig(bits=4)
    path = plain / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config.to_dict()}))
    monkeypatch.setattr(f"transformers.quantizers.quantizer_{method}.{missing}", lambda: False)
    with pytest.raises(UnsupportedError, match=rf"\({method}\)(.|\n)*pip install {packages}, or give a checkpoint"):
        open_model(plain)


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


PACKED = "model.layers.0.mlp.up_proj"


def shorter(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PACKED}.qweight"] = tensors[f"{PACKED}.qweight"][:-1].clone()


def scales_left_out(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{PACKED}.scales"]


def in_float(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PACKED}.qweight"] = tensors[f"{PACKED}.qweight"].float()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shorter, r"up_proj.qweight has the shape \["),
        (scales_left_out, "lacks model.layers.0.mlp.up_proj.scales"),
        (in_float, r"needs model.layers.0.mlp.up_proj.\w*qweight in int32"),
    ],
)
@pytest.mark.parametrize("kind", [GPTQConfig, AwqConfig])
def test_damaged_packed_weights_are_found_when_the_model_is_opened(
    plain: Path, tmp_path: Path, kind: Any, damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    packed(plain, tmp_path / "packed", kind(bits=4, group_size=32))
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        open_model(file.parent)


@pytest.mark.parametrize(
    ("stated", "message"),
    [({"version": "gemv"}, "format is gemv of 4 bits"), ({"bits": 8}, "format is gemm of 8 bits")],
)
def test_packed_weights_of_another_format_are_refused(
    plain: Path, tmp_path: Path, stated: dict[str, Any], message: str
) -> None:
    pytest.importorskip("gptqmodel")
    packed(plain, tmp_path / "packed", AwqConfig(bits=4, group_size=32))
    path = tmp_path / "packed" / "config.json"
    described = json.loads(path.read_text())
    described["quantization_config"] |= {"format": None} | stated
    path.write_text(json.dumps(described))
    with pytest.raises(UnsupportedError, match=message):
        open_model(path.parent)
