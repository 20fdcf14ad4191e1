"""Quantized checkpoints are estimated as large as their headers say, or as the settings of their method do."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import brim
from brim.cli import main
from brim.models.prequantized import METHODS
from brim.planning.opening import open_subject
from brim.planning.request import Request, machine_of
from support.hub import Hub, hub, tensor_bytes

__all__ = ["hub"]
WIDTH, INNER, VOCABULARY, LAYERS = 256, 512, 512, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def packed_int32(out: int, inside: int) -> Tensors:
    return {
        "weight_packed": ("I32", (out, inside // 8)), "weight_scale": ("BF16", (out, inside // 128)),
        "weight_shape": ("I64", (2,)),
    }  # fmt: skip


def nf4(out: int, inside: int) -> Tensors:
    blocks = out * inside // 64
    return {
        "weight": ("U8", (out * inside // 2, 1)), "weight.absmax": ("U8", (blocks,)),
        "weight.nested_absmax": ("F32", (blocks // 256,)), "weight.nested_quant_map": ("F32", (256,)),
        "weight.quant_map": ("F32", (16,)),
    }  # fmt: skip


def fp4(out: int, inside: int) -> Tensors:
    blocks = out * inside // 64
    return {
        "weight": ("U8", (out * inside // 2, 1)), "weight.absmax": ("F32", (blocks,)),
        "weight.quant_map": ("F32", (16,)),
    }  # fmt: skip


def gptq(out: int, inside: int) -> Tensors:
    groups = inside // 128
    return {
        "qweight": ("I32", (inside // 8, out)), "qzeros": ("I32", (groups, out // 8)),
        "scales": ("F16", (groups, out)), "g_idx": ("I32", (inside,)),
    }  # fmt: skip


def awq(out: int, inside: int) -> Tensors:
    groups = inside // 128
    return {
        "qweight": ("I32", (inside, out // 8)), "qzeros": ("I32", (groups, out // 8)),
        "scales": ("F16", (groups, out)),
    }  # fmt: skip


def blocks_of_float8(out: int, inside: int) -> Tensors:
    return {"weight": ("F8_E4M3", (out, inside)), "weight_scale_inv": ("F32", (out // 128, inside // 128))}


def nvfp4(out: int, inside: int) -> Tensors:
    return {
        "weight": ("U8", (out, inside // 2)), "weight_scale": ("F8_E4M3", (out, inside // 16)),
        "weight_scale_2": ("F32", ()), "input_scale": ("F32", ()),
    }  # fmt: skip


def mlx(out: int, inside: int) -> Tensors:
    scales = "BF16", (out, inside // 64)
    return {"weight": ("U32", (out, inside // 8)), "scales": scales, "biases": scales}


_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
Kind = tuple[dict[str, Any], Callable[[int, int], Tensors]]
KINDS: dict[str, Kind] = {
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, nf4,
    ),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, fp4),
    "int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        lambda out, inside: {"weight": ("I8", (out, inside)), "SCB": ("F32", (out,))},
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, awq),
    "w4a16": (
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"weights": _GROUP, "targets": ["Linear"]}},
        },
        packed_int32,
    ),
    "w8a8": (
        {
            "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["re:.*lm_head"],
            "config_groups": {"group_0": {"weights": _CHANNEL, "targets": ["Linear"]}},
        },
        lambda out, inside: {"weight": ("I8", (out, inside)), "weight_scale": ("BF16", (out, 1))},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        blocks_of_float8,
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4),
    "mlx": ({"group_size": 64, "bits": 4}, mlx),
}  # fmt: skip


def llama_tensors(linear: Callable[[int, int], Tensors], *, everything: bool = False) -> Tensors:
    """The tensors of a checkpoint, and its embeddings quantized too with ``everything``."""

    def quantized(name: str, out: int, inside: int) -> Tensors:
        return {f"{name}.{part}": entry for part, entry in linear(out, inside).items()}

    tensors: Tensors = {}
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for name in "qkvo":
            tensors |= quantized(f"{path}.self_attn.{name}_proj", WIDTH, WIDTH)
        for name in ("gate", "up"):
            tensors |= quantized(f"{path}.mlp.{name}_proj", INNER, WIDTH)
        tensors |= quantized(f"{path}.mlp.down_proj", WIDTH, INNER)
        tensors |= {f"{path}.{name}_layernorm.weight": ("BF16", (WIDTH,)) for name in ("input", "post_attention")}
    for name in ("model.embed_tokens", "lm_head"):
        table: Tensors = {f"{name}.weight": ("BF16", (VOCABULARY, WIDTH))}
        tensors |= quantized(name, VOCABULARY, WIDTH) if everything else table
    return tensors | {"model.norm.weight": ("BF16", (WIDTH,))}


def estimated(model: str, **settings: Any) -> Any:
    return brim.estimate(model, "generate", seq=8, new_tokens=2, gpu="H100", **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("headers", [True, False], ids=["headers", "settings"])
def test_weights_are_as_large_as_stored(kind: str, headers: bool, hub: Hub) -> None:
    settings, linear = KINDS[kind]
    tensors = llama_tensors(linear, everything=kind == "mlx")
    hub.add("org/packed", CONFIG | {"quantization_config": settings}, *([tensors] if headers else []))
    result = estimated("org/packed")
    assert result.workload.precision == "stored"
    stored_bytes = sum(tensor_bytes(*entry) for entry in tensors.values())
    assert result.stored_bytes == (stored_bytes if headers else None)
    if settings.get("quant_method") == "compressed-tensors":  # unpacked before the first pass, with their scales
        scales = {name: entry for name, entry in tensors.items() if name.endswith(("_scale", "_shape"))}
        stored_bytes = sum(tensor_bytes(*entry) for entry in (llama_tensors(dense) | scales).values())
    assert result.at_peak_bytes["parameters"] - stored_bytes in range(1024)  # its buffers


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_moves_weights_as_large_as_stored(kind: str, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    settings, linear = KINDS[kind]
    tensors = llama_tensors(linear, everything=kind == "mlx")
    hub.add("org/packed", CONFIG | {"quantization_config": settings}, tensors)
    request = Request(model="org/packed", task="generate", gpu="RTX 4090", seq=8, new_tokens=2, prefer="memory")
    is_run = settings.get("quant_method") in METHODS
    words = ["--gpu", "RTX 4090", "--seq", "8", "--new-tokens", "2", "--json"]
    with nullcontext() if is_run else pytest.warns(UserWarning, match="does not run weights quantized by"):
        subject = open_subject(request, machine_of(request))
        assert main(["plan", "org/packed", *words]) == 0
    assert subject.precision == "stored"
    stored_bytes = sum(tensor_bytes(*entry) for entry in tensors.values())
    assert sum(source.bytes for source in subject.weights.sources.values()) - stored_bytes in range(-1024, 1)
    first = json.loads(capsys.readouterr().out)["plans"][0]
    assert stored_bytes < first["peak_bytes"]["vram"]


def dense(out: int, inside: int) -> Tensors:
    return {"weight": ("BF16", (out, inside))}


@pytest.mark.parametrize("kind", ["nf4", "gptq", "fp8"])
def test_adapters_train_on_quantized_weights(kind: str, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    settings, linear = KINDS[kind]
    hub.add("org/packed", CONFIG | {"quantization_config": settings}, llama_tensors(linear))
    packed = brim.estimate("org/packed", seq=64, method="lora", gpu="H100")
    full = brim.estimate("org/packed", seq=64, method="lora", precision="bf16", gpu="H100")
    assert packed.at_peak_bytes["parameters"] < full.at_peak_bytes["parameters"]
    assert packed.at_peak_bytes["gradients"] == full.at_peak_bytes["gradients"]
    assert main(["estimate", "org/packed"]) == 2
    assert "take no gradient" in capsys.readouterr().err


def test_float8_is_unpacked_for_gpus_without_it(hub: Hub) -> None:
    settings, linear = KINDS["fp8"]
    tensors = llama_tensors(linear)
    hub.add("org/packed", CONFIG | {"quantization_config": settings}, tensors)
    result = brim.estimate("org/packed", "generate", seq=8, new_tokens=2, gpu="A100 80GB")
    unpacked_bytes = sum(tensor_bytes(*entry) for entry in llama_tensors(dense).values())
    assert result.at_peak_bytes["parameters"] - unpacked_bytes in range(1024)
    assert any("no float8 products" in note for note in result.notes)


def test_experts_are_packed_where_the_files_have_them_so(hub: Hub) -> None:
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 128, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "head_dim": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }  # fmt: skip
    dense_bytes = estimated_bytes(hub, config, precision="bf16")
    packed_bytes = estimated_bytes(hub, config)
    weights = 2 * 4 * (256 * 128 + 128 * 128)  # layers, experts, both products
    assert dense_bytes - packed_bytes == weights * 2 - weights // 2 - weights // 32


def estimated_bytes(hub: Hub, config: dict[str, Any], **settings: Any) -> int:
    hub.add("org/experts", config)
    bytes: int = estimated("org/experts", **settings).at_peak_bytes["parameters"]
    return bytes


def test_layers_that_are_quantized_differently_are_all_traced(hub: Hub) -> None:
    """A trace of a few layers repeated would miss the ones that stay in 16 bits."""
    layers = 12
    config = CONFIG | {"num_hidden_layers": layers, "quantization_config": KINDS["nf4"][0]}
    small = llama_tensors(nf4)
    tensors = {name: entry for name, entry in small.items() if ".layers." not in name}
    for layer in range(layers):
        for name, entry in llama_tensors(dense if layer == layers - 2 else nf4).items():
            if ".layers.0." in name:
                tensors[name.replace(".0.", f".{layer}.")] = entry
    hub.add("org/mixed", config, tensors)
    stored_bytes = sum(tensor_bytes(*entry) for entry in tensors.values())
    assert estimated("org/mixed").at_peak_bytes["parameters"] - stored_bytes in range(1024)


def test_stored_is_for_quantized_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "gpt2", "--task", "generate", "--precision", "stored"]) == 2
    assert "not quantized" in capsys.readouterr().err
