"""Formulas on whole models: caches by configuration, checkpoints by their headers, and the explanation of a step."""

import json
import struct

import pytest
import torch
import transformers
from safetensors.torch import save_file

from brim import catalog
from brim.errors import ModelError, UsageError
from brim.model_cache import cache_of
from brim.predict import formulas


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3-70b", 327_680),
        ("llama-3-8b", 131_072),
        ("llama-3.1-405b", 516_096),
        ("gpt2", 2 * 12 * 768 * 2),
        ("gpt3-175b", 2 * 96 * 12288 * 2),
        ("falcon-7b", 2 * 32 * 64 * 2),
        ("deepseek-v3", 70_272),
        ("bloom-7b1", 2 * 30 * 4096 * 2),
        ("gpt-neo-125m", 2 * 12 * 768 * 2),
        ("qwen3-8b", 2 * 36 * 8 * 128 * 2),
    ],
)
def test_cache_per_token_by_configuration(name, bytes_per_token):
    assert formulas.kv_cache_of_config(catalog.model(name).config).value == bytes_per_token


def test_windowed_layers_stop_growing():
    config = catalog.model("gemma-2-9b").config  # 42 layers: every other one sees 4,096 tokens
    one = 2 * 8 * 256 * 2
    assert formulas.kv_cache_of_config(config, tokens=4096).value == 42 * 4096 * one
    assert formulas.kv_cache_of_config(config, tokens=8192).value == 21 * (8192 + 4096) * one
    mistral = formulas.kv_cache_of_config(catalog.model("mistral-7b").config, tokens=32768, batch=3)
    assert mistral.value == 3 * 4096 * 2 * 32 * 8 * 128 * 2
    assert mistral.arithmetic.startswith("2 x (32 layers x 4,096 tokens) x 8 heads x 128 x 2 B x 3 sequences")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "falcon-7b", "qwen3-0.6b"])
def test_the_cache_is_the_one_that_transformers_fills(name):
    """A short run of a cut model; what its cache holds is the formula at that many tokens."""
    preset = catalog.model(name)
    cut = {"num_hidden_layers": 2, "n_layer": 2, "vocab_size": 64, "max_window_layers": 2}
    config = transformers.AutoConfig.for_model(**preset.config | {k: v for k, v in cut.items() if k in preset.config})
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with torch.device("meta"):
        model = getattr(transformers, preset.architecture)(config).to(torch.bfloat16).eval()
        cache = cache_of(model(torch.zeros(3, 17, dtype=torch.long), use_cache=True))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    cut_config = dict(preset.config) | {k: v for k, v in cut.items() if k in preset.config}
    assert formulas.kv_cache_of_config(cut_config, tokens=17, batch=3).value == held


def test_a_model_without_attention_has_no_cache():
    with pytest.raises(ModelError, match="num_attention_heads"):
        formulas.kv_cache_of_config(catalog.model("mamba-130m").config)


def test_weights_from_headers(tmp_path):
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model-2.safetensors")
    found = formulas.checkpoint_weights(tmp_path)
    assert found.value == 48 + 10 + 2
    assert found.arithmetic == ("1 BF16 tensors of 10 B + 1 F32 tensors of 48 B + 1 I8 tensors of 2 B = 60 B")
    assert formulas.checkpoint_weights(tmp_path / "model-2.safetensors").value == 2


def test_parameters_from_a_file_size_alone():
    assert formulas.parameters_from_size(16_060_522_496, "bf16").value == 8_030_261_248
    assert formulas.parameters_from_size(10, "int4").value == 20


def damaged_headers():
    good = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    yield b""
    yield b"\x01\x02"
    yield struct.pack("<Q", 1 << 60) + good
    yield struct.pack("<Q", len(good)) + good[:-5]
    yield struct.pack("<Q", 2) + b"[]"
    yield struct.pack("<Q", len(good)) + good.replace(b"[0, 4]", b"[4, 0]")
    yield struct.pack("<Q", len(good)) + good.replace(b"data_offsets", b"data_offs_ts")


@pytest.mark.parametrize("content", list(damaged_headers()))
def test_a_damaged_header_is_a_model_error(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        formulas.checkpoint_weights(file)


def test_a_directory_without_weights_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        formulas.checkpoint_weights(tmp_path)


def build(name):
    preset = catalog.model(name)
    with torch.device("meta"):
        return getattr(transformers, preset.architecture)(transformers.AutoConfig.for_model(**preset.config))


def test_explanation_of_a_training_step():
    preset = catalog.model("gpt2")
    found = formulas.explain_training(
        build("gpt2"), preset.config, batch=8, sequence=1024, dtype="float32", optimizer="adamw"
    )
    assert found["parameters"].value == found["gradients"].value == 4 * preset.parameters
    assert found["optimizer_state"].value == 8 * preset.parameters + 4 * 148
    assert found["activations"].value == 12 * 8 * 1024 * 768 * (34 + 80)
    assert all("=" in line.arithmetic for line in found.values())


def test_explanation_of_generating():
    preset = catalog.model("llama-3.2-1b")
    found = formulas.explain_generation(build("llama-3.2-1b"), preset.config, batch=2, tokens=4096, dtype="bfloat16")
    assert found["parameters"].value == 2 * preset.parameters
    assert found["kv_cache"].value == 2 * 4096 * 2 * 16 * 8 * 64 * 2
    assert "kv_cache" not in formulas.explain_generation(
        build("mamba-130m"), catalog.model("mamba-130m").config, batch=1, tokens=10, dtype="float32"
    )


def test_an_unknown_dtype_names_the_nearest():
    with pytest.raises(UsageError, match="bfloat16"):
        formulas.weights(5, "bflot16")
