"""The catalog's configurations of 2025 and later, read from a file: what is built has the published parameters.

The counts are those of the checkpoints' safetensors metadata on the Hugging Face hub, tied weights once; of
gpt-oss-20b that of its model card (arXiv 2508.10925, table 1: 20.91 B).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from brim import catalog
from brim.errors import UnsupportedError
from brim.estimation.models import check_not_quantized, find_model, weight_type
from brim.estimation.silence import quiet
from brim.estimation.steps import Job
from brim.estimation.workload import Workload

NAMES = (
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b",
    "smollm3-3b", "mistral-small-24b", "phi-4", "olmo-2-7b", "gemma-3-4b", "qwen3-vl-4b", "llama-4-scout",
    "flux.1-dev",
)  # fmt: skip
# MiB of torch.cuda.max_memory_allocated when transformers 4.51 generates 2,048 tokens in bfloat16 on one H20 behind
# so many tokens: QwenLM/Qwen3, docs/source/getting_started/speed_benchmark.md.
MEASURED = {
    "qwen3-0.6b": {6144: 2066, 14336: 2963, 30720: 4755},
    "qwen3-1.7b": {6144: 4213, 14336: 5109, 30720: 6902},
    "qwen3-4b": {6144: 8860, 14336: 10012, 30720: 12317},
    "qwen3-8b": {6144: 16811, 14336: 17963, 30720: 20267},
    "qwen3-14b": {6144: 29495, 14336: 30775, 30720: 33336},
    "qwen3-32b": {6144: 64583, 14336: 66632, 30720: 70728},
    "qwen3-30b-a3b": {6144: 59037, 14336: 59806, 30720: 61342},
}
TYPES = {
    "olmo-2-7b": ("float32", "dtype of its configuration"),
    "qwen3-vl-4b": ("bfloat16", "text_config.dtype of its configuration"),
    "flux.1-dev": ("float32", "default"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_the_parameters_and_the_type_that_were_published(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(catalog.model(name).config))
    source = find_model(tmp_path)
    job = Job(source, Workload(task="generate", seq=16, new_tokens=2, precision="bf16"))
    with quiet(), torch.device("meta"):
        model = job.module()
    assert sum(parameter.numel() for parameter in model.parameters()) == catalog.model(name).parameters
    dtype, origin = TYPES.get(name, ("bfloat16", "dtype of its configuration"))
    found = weight_type(source)
    assert found.dtype == dtype and found.origin.startswith(origin)


@pytest.mark.parametrize("name", MEASURED)
def test_weights_and_cache_are_what_was_measured_less_the_workspace_of_cublas(name: str) -> None:
    """Which is 32 MiB on Hopper; the rest is what one token's layers hold."""
    preset = catalog.model(name)
    assert preset.parameters is not None
    heads = preset.config["num_hidden_layers"] * preset.config["num_key_value_heads"]
    for tokens, measured_mib in MEASURED[name].items():
        cached = 2 * heads * preset.config["head_dim"] * (tokens + 2048)  # keys and values
        assert 32 < measured_mib - 2 * (preset.parameters + cached) / (1 << 20) < 50


def test_a_model_that_is_only_there_quantized_is_refused_without_a_precision(tmp_path: Path) -> None:
    """OpenAI's guide says 16 GB as it is, in MXFP4, and 48 GB in bfloat16: float32 is no answer."""
    preset = catalog.model("gpt-oss-20b")
    config = dict(preset.config) | {"torch_dtype": None, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = find_model(tmp_path)
    assert weight_type(source).dtype == "float32"
    with pytest.raises(UnsupportedError, match=r"quantized [(]mxfp4[)]"):
        check_not_quantized(source)
    assert preset.parameters is not None and 2 * preset.parameters < 48e9 < 4 * preset.parameters
