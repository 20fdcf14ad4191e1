"""Published checkpoints of 2023 to 2026: the catalog's configuration, and how their maker stores it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import brim
from support.hub_checkpoints import (
    Scheme,
    Tensors,
    awq,
    blocks_of_128,
    by_channel,
    compressed_nvfp4,
    fp4,
    gptq,
    int8,
    mlx,
    modelopt_fp8,
    modelopt_nvfp4,
    nf4,
    per_tensor,
    static_fp8,
    torchao_fp8,
    torchao_int4,
    w4a16,
    weights_of,
)

_CATALOG = Path(brim.__file__).parent / "catalog" / "models"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A checkpoint. ``config``: the catalog's entry; ``changes`` of it; ``extra`` tensors that are stored beside."""

    config: str
    scheme: Scheme = field(default_factory=Scheme)
    changes: Mapping[str, Any] = field(default_factory=dict)
    extra: Callable[[Mapping[str, Any]], Tensors] = field(default=lambda config: {})

    def configuration(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((_CATALOG / f"{self.config}.json").read_text())["config"]
        settings = {} if self.scheme.settings is None else {"quantization_config": dict(self.scheme.settings)}
        return {**config, **self.changes, **settings}

    def headers(self) -> Tensors:
        config = self.configuration()
        return self.scheme.headers(weights_of(config)) | self.extra(config)


def _bitsandbytes(bits: int, kind: str = "nf4", *, nested: bool = True, **settings: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8,
        "_load_in_4bit": bits == 4, "_load_in_8bit": bits == 8, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None, **settings,
    }  # fmt: skip


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None, *ignore: str) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group},
        "ignore": list(ignore), "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def _fp8(*kept: str, **settings: Any) -> dict[str, Any]:
    names = {"modules_to_not_convert": list(kept)} if kept else {}
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        **names, **settings,
    }  # fmt: skip


def _gptq(bits: int) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": False, "sym": True,
        "damp_percent": 0.01, "static_groups": False, "true_sequential": True,
    }  # fmt: skip


def _awq(*kept: str) -> dict[str, Any]:
    names = list(kept) or None
    return {
        "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": names,
    }  # fmt: skip


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_NVFP4 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False,
}  # fmt: skip
_TOKEN8 = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_HEAD = r"lm_head|embed_tokens"
_VISION = rf"{_HEAD}|visual|vision_tower|multi_modal_projector"
_MLX_NAMES = {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head",
              "model.visual.": "vision_tower."}  # fmt: skip


def _mlx_name(name: str) -> str:
    for ours, theirs in _MLX_NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _experts_together(tensors: Tensors) -> Tensors:
    """mlx-lm stores the experts of a layer as one tensor, behind switch_mlp."""
    joined: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        before, inside, after = name.partition(".experts.")
        number, _, part = after.partition(".")
        name = f"{before}.switch_mlp.{part}" if inside else name
        joined[name] = (dtype, (int(number) + 1, *shape)) if inside else (dtype, shape)
    return joined


class _Mlx(Scheme):
    """MLX joins experts, drops multi-token prediction and casts all but the decays of linear attention."""

    def headers(self, weights: Any) -> Tensors:
        tensors = super().headers(replace(w, dtype=w.dtype if "A_log" in w.name else "") for w in weights)
        return _experts_together({name: entry for name, entry in tensors.items() if not name.startswith("mtp")})


_BNB4 = Scheme(settings=_bitsandbytes(4), stored=nf4)
_BLOCKS = Scheme(settings=_fp8(), stored=blocks_of_128("BF16"))
_MXFP4 = Scheme(settings={
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
})  # fmt: skip

PUBLISHED: dict[str, Published] = {
    # as trained
    "meta-llama/Llama-3.1-8B-Instruct": Published(config="llama-3.1-8b"),
    "meta-llama/Llama-3.2-1B-Instruct": Published(config="llama-3.2-1b"),
    "Qwen/Qwen3-0.6B": Published(
        config="qwen3-0.6b",  # it ties its head, and its files have it nevertheless
        extra=lambda c: {"lm_head.weight": ("BF16", (c["vocab_size"], c["hidden_size"]))},
    ),
    "Qwen/Qwen2.5-7B-Instruct": Published(config="qwen2.5-7b"),
    "Qwen/Qwen3-VL-8B-Instruct": Published(config="qwen3-vl-8b"),
    "google/gemma-3-4b-it": Published(config="gemma-3-4b"),
    "microsoft/phi-4": Published(config="phi-4"),
    "mistralai/Mistral-Small-24B-Instruct-2501": Published(config="mistral-small-24b"),
    "HuggingFaceTB/SmolLM3-3B": Published(config="smollm3-3b"),
    "allenai/OLMo-2-1124-7B": Published(config="olmo-2-7b", scheme=Scheme(dtype="F32")),
    "Qwen/Qwen3-30B-A3B": Published(config="qwen3-30b-a3b"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Published(config="mixtral-8x7b"),
    # bitsandbytes
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": Published(config="llama-3.1-8b", scheme=_BNB4),
    "unsloth/Qwen3-14B-unsloth-bnb-4bit": Published(
        config="qwen3-14b",  # the layers that suffer most stay in bfloat16
        scheme=Scheme(
            settings=_bitsandbytes(
                4,
                llm_int8_skip_modules=[
                    "lm_head",
                    "model.layers.4.mlp",
                    "model.layers.5.self_attn",
                    "model.layers.39.mlp",
                ],
            ),
            stored=nf4,
            kept=rf"{_HEAD}|layers\.4\.mlp|layers\.5\.self_attn|layers\.39\.mlp",
        ),
    ),
    "unsloth/gemma-3-12b-it-bnb-4bit": Published(
        config="gemma-3-12b",
        scheme=Scheme(
            settings=_bitsandbytes(4, llm_int8_skip_modules=["lm_head", "multi_modal_projector", "vision_tower"]),
            stored=nf4,
            kept=_VISION,
        ),
    ),
    "example/Mistral-7B-fp4": Published(
        config="mistral-7b", scheme=Scheme(settings=_bitsandbytes(4, "fp4", nested=False), stored=fp4)
    ),
    "example/Llama-3.2-3B-Instruct-8bit": Published(
        config="llama-3.2-3b", scheme=Scheme(settings=_bitsandbytes(8, "fp4", nested=False), stored=int8)
    ),
    # GPTQ and AWQ
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4": Published(
        config="llama-3.1-8b",
        scheme=Scheme(settings=_gptq(4), stored=gptq(4), dtype="F16"),
        changes={"torch_dtype": "float16"},
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": Published(
        config="qwen2.5-7b",
        scheme=Scheme(settings=_gptq(8), stored=gptq(8), dtype="F16"),
        changes={"torch_dtype": "float16"},
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": Published(
        config="qwen3-30b-a3b",
        scheme=Scheme(settings=_gptq(4), stored=gptq(4), dtype="F16"),
        changes={"torch_dtype": "float16"},
    ),
    "Qwen/Qwen3-8B-AWQ": Published(
        config="qwen3-8b", scheme=Scheme(settings=_awq(), stored=awq, dtype="F16"), changes={"torch_dtype": "float16"}
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct-AWQ": Published(
        config="qwen2.5-vl-7b",
        scheme=Scheme(settings=_awq("visual"), stored=awq, kept=_VISION, dtype="F16"),
        changes={"torch_dtype": "float16"},
    ),
    # compressed-tensors
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Published(
        config="llama-3.1-8b",
        scheme=Scheme(
            settings=_compressed("pack-quantized", _INT4, None, "lm_head"), stored=w4a16(128, symmetric=True)
        ),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Published(
        config="llama-3.1-8b",
        scheme=Scheme(settings=_compressed("int-quantized", _INT8, _TOKEN8, "lm_head"), stored=by_channel("I8")),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": Published(
        config="llama-3.1-8b",
        scheme=Scheme(
            settings=_compressed(
                "float-quantized",
                _FP8 | {"strategy": "tensor"},
                _FP8 | {"strategy": "tensor"},
                "lm_head",
            ),
            stored=static_fp8,
        ),
    ),
    "RedHatAI/Qwen3-32B-NVFP4": Published(
        config="qwen3-32b",
        scheme=Scheme(
            settings=_compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"}, "lm_head"),
            stored=compressed_nvfp4,
        ),
    ),
    "cyankiwi/Qwen3.5-27B-AWQ-4bit": Published(
        config="qwen3.5-27b",
        scheme=Scheme(
            settings=_compressed(
                "pack-quantized",
                _INT4 | {"symmetric": False, "group_size": 32},
                None,
                "lm_head",
                "re:.*visual.*",
                "re:.*linear_attn.in_proj_a",
                "re:.*linear_attn.in_proj_b",
                "re:mtp.*",
            ),
            stored=w4a16(32, symmetric=False),
            kept=rf"{_VISION}|in_proj_[ab]$|^mtp",
        ),
    ),
    "zai-org/GLM-4.5-Air-FP8": Published(
        config="glm-4.5-air",
        scheme=Scheme(
            settings=_compressed(
                "float-quantized", _FP8, _FP8 | {"strategy": "token", "dynamic": True}, "lm_head", "re:.*mlp.gate$"
            ),
            stored=by_channel("F8_E4M3"),
            kept=rf"{_HEAD}|shared_head|eh_proj",
        ),
    ),
    # FP8 in blocks, and for each tensor
    "Qwen/Qwen3-8B-FP8": Published(config="qwen3-8b", scheme=_BLOCKS),
    "Qwen/Qwen3-30B-A3B-FP8": Published(
        config="qwen3-30b-a3b",
        scheme=Scheme(
            settings=_fp8(
                "lm_head",
                *(
                    f"model.layers.{n}.{name}"
                    for n in range(48)
                    for name in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
                ),
            ),
            stored=blocks_of_128("BF16"),
        ),
    ),
    "deepseek-ai/DeepSeek-V3.1": Published(
        config="deepseek-v3",
        scheme=Scheme(settings=_fp8(), stored=blocks_of_128("F32"), kept=rf"{_HEAD}|shared_head|eh_proj"),
    ),
    "MiniMaxAI/MiniMax-M2.7": Published(
        config="minimax-m2.7",
        scheme=Scheme(
            settings=_fp8("gate", "e_score_correction_bias", "lm_head", fmt="float8_e4m3fn"),
            stored=blocks_of_128("F32"),
        ),
    ),
    "mistralai/Devstral-Small-2-24B-Instruct-2512": Published(
        config="devstral-small-2-24b",
        scheme=Scheme(
            settings=_fp8(
                "model.vision_tower",
                "model.multi_modal_projector",
                "lm_head",
                "model.lm_head",
                activation_scheme="static",
                weight_block_size=None,
                dequantize=False,
            ),
            stored=per_tensor,
            kept=_VISION,
        ),
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP8": Published(  # its settings are in a file of their own
        config="llama-3.1-8b", scheme=Scheme(stored=modelopt_fp8)
    ),
    # four-bit floating types
    "openai/gpt-oss-20b": Published(config="gpt-oss-20b", scheme=_MXFP4),
    "openai/gpt-oss-120b": Published(config="gpt-oss-120b", scheme=_MXFP4),
    "nvidia/Qwen3-30B-A3B-NVFP4": Published(
        config="qwen3-30b-a3b",
        scheme=Scheme(
            settings={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
            stored=modelopt_nvfp4,
        ),
    ),
    # torchao and MLX
    "pytorch/Qwen3-8B-FP8": Published(
        config="qwen3-8b",
        scheme=Scheme(
            settings={
                "quant_method": "torchao",
                "quant_type": {
                    "default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": {}},
                },
            },
            stored=torchao_fp8,
        ),
    ),
    "pytorch/SmolLM3-3B-INT8-INT4": Published(
        config="smollm3-3b",
        scheme=Scheme(
            settings={
                "quant_method": "torchao",
                "quant_type": {
                    "default": {"_type": "Int8DynamicActivationIntxWeightConfig", "_version": 2, "_data": {}},
                },
            },
            stored=torchao_int4,
        ),
    ),
    "mlx-community/Qwen3-4B-4bit": Published(
        config="qwen3-4b",
        scheme=_Mlx(settings={"group_size": 64, "bits": 4}, stored=mlx(4), kept="^$", tables=True),
    ),
    "mlx-community/Qwen3-30B-A3B-4bit": Published(
        config="qwen3-30b-a3b",
        scheme=_Mlx(settings={"group_size": 64, "bits": 4}, stored=mlx(4), kept="^$", tables=True),
    ),
    "leo-kreisman/Qwen3.5-9B-MLX-8bit": Published(
        config="qwen3.5-9b",
        scheme=_Mlx(
            settings={"group_size": 64, "bits": 8, "mode": "affine"},
            stored=mlx(8),
            kept="visual|^mtp",
            tables=True,
            rename=_mlx_name,
        ),
    ),
}
