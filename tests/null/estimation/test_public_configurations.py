"""Configurations of 2025 and later by their real keys: what is built of them has the parameters that were published.

The counts are those of the checkpoints' safetensors metadata on the Hugging Face hub, tied weights once; of
gpt-oss-20b that of its model card (arXiv 2508.10925, table 1: 20.91 B).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import UnsupportedError
from brim.estimation.closed_forms import closed_forms
from brim.estimation.models import check_not_quantized, find_model, weight_type
from brim.estimation.silence import quiet
from brim.estimation.steps import Job
from brim.estimation.workload import Workload

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "vocab_size": 151936, "rope_theta": 1000000,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-1.7B": QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-14B": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": True,
        "tie_word_embeddings": False, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 128256, "max_position_embeddings": 65536, "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    },
    "Mistral-Small-24B-2501": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 5120, "head_dim": 128,
        "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 131072, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Phi-4": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "max_position_embeddings": 16384, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "pad_token_id": 100349,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 100352, "max_position_embeddings": 4096, "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "Gemma-3-4B-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
            "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "Qwen3-VL-4B-Instruct": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text", "dtype": "bfloat16", "hidden_size": 2560, "intermediate_size": 9728,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 262144,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
            "patch_size": 16, "out_hidden_size": 2560, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "Llama-4-Scout-17B-16E": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1, "vocab_size": 202048, "torch_dtype": "bfloat16",
        },
        "vision_config": {
            "model_type": "llama4_vision_model", "hidden_size": 1408, "intermediate_size": 5632,
            "num_attention_heads": 16, "num_hidden_layers": 34, "image_size": 336, "patch_size": 14,
            "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096,
        },
    },
    "FLUX.1-dev transformer": {
        "_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True,
        "in_channels": 64, "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19,
        "num_single_layers": 38, "patch_size": 1, "pooled_projection_dim": 768,
    },
}  # fmt: skip
PARAMETERS = {
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "SmolLM3-3B": 3_075_098_624,
    "Mistral-Small-24B-2501": 23_572_403_200,
    "Phi-4": 14_659_507_200,
    "OLMo-2-1124-7B": 7_298_617_344,
    "Gemma-3-4B-it": 4_300_079_472,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Llama-4-Scout-17B-16E": 108_641_793_536,
    "FLUX.1-dev transformer": 11_901_408_320,
}
# MiB of torch.cuda.max_memory_allocated when transformers 4.51 generates 2,048 tokens in bfloat16 on one H20 behind
# so many tokens: QwenLM/Qwen3, docs/source/getting_started/speed_benchmark.md.
MEASURED = {
    "Qwen3-0.6B": {6144: 2066, 14336: 2963, 30720: 4755},
    "Qwen3-1.7B": {6144: 4213, 14336: 5109, 30720: 6902},
    "Qwen3-4B": {6144: 8860, 14336: 10012, 30720: 12317},
    "Qwen3-8B": {6144: 16811, 14336: 17963, 30720: 20267},
    "Qwen3-14B": {6144: 29495, 14336: 30775, 30720: 33336},
    "Qwen3-32B": {6144: 64583, 14336: 66632, 30720: 70728},
    "Qwen3-30B-A3B": {6144: 59037, 14336: 59806, 30720: 61342},
}
TYPES = {
    "gpt-oss-20b": ("float32", "default"),  # its configuration has a quantization and no type
    "OLMo-2-1124-7B": ("float32", "dtype of its configuration"),
    "Qwen3-VL-4B-Instruct": ("bfloat16", "text_config.dtype of its configuration"),
    "FLUX.1-dev transformer": ("float32", "default"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_has_the_parameters_and_the_type_that_were_published(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    source = find_model(tmp_path)
    job = Job(source, Workload(task="generate", seq=16, new_tokens=2, precision="bf16"))
    with quiet(), torch.device("meta"):
        model = job.module()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    dtype, origin = TYPES.get(name, ("bfloat16", "dtype of its configuration"))
    found = weight_type(source)
    assert found.dtype == dtype and found.origin.startswith(origin)


@pytest.mark.parametrize("name", MEASURED)
def test_weights_and_cache_are_what_was_measured_less_the_workspace_of_cublas(name: str, tmp_path: Path) -> None:
    """Which is 32 MiB on Hopper; the rest is what one token's layers hold."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    forms = closed_forms(find_model(tmp_path), Workload(task="generate", seq=6144, new_tokens=2048))
    for tokens, measured_mib in MEASURED[name].items():
        told = forms["parameters"].value + forms["kv_cache_per_token"].value * (tokens + 2048)
        assert 32 < measured_mib - told / (1 << 20) < 50


def test_a_model_that_is_only_there_quantized_is_refused_without_a_precision(tmp_path: Path) -> None:
    """OpenAI's guide says 16 GB as it is, in MXFP4, and 48 GB in bfloat16: float32 is no answer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt-oss-20b"]))
    with pytest.raises(UnsupportedError, match=r"quantized [(]mxfp4[)]"):
        check_not_quantized(find_model(tmp_path))
    assert 2 * PARAMETERS["gpt-oss-20b"] < 48e9 < 4 * PARAMETERS["gpt-oss-20b"]
