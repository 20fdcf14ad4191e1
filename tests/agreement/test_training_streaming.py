"""Training with streamed weights is training: losses, gradients and parameters equal plain PyTorch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.core.hardware import RAM, VRAM
from brim.run.fitting import Need, machine, make_plan, put_in_force
from brim.techniques.blocks import adapters
from brim.techniques.weight_streaming import NAME, RESIDENT, Weights, WeightStreaming

STEPS = 5
WORDS = 96
DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
}
# name -> class, configuration class, its values
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 6, "n_head": 4, "vocab_size": WORDS}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4, "vocab_size": WORDS},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
        },
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 24], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    ),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    lora = name.endswith("-lora")
    kind, config, values = MODELS[name.removesuffix("-lora")]
    model = getattr(transformers, kind)(getattr(transformers, config)(**values)).train()
    if lora:
        chosen = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, chosen)
    return model


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 + step)
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 2, (4,))}
    ids = torch.randint(0, WORDS, (2, 8))
    return {"input_ids": ids, "labels": ids}


def fit(model: nn.Module, device: str, share: float = 0.55) -> WeightStreaming:
    size = sum(p.numel() * p.element_size() for p in [*model.parameters(), *model.buffers()])
    budget = {RAM: int(size * share)} if device == "cpu" else {VRAM: int(size * share), RAM: 2 * size}
    hardware = machine(device)  # type: ignore[arg-type]
    need = Need(step_bytes=0, stay=adapters(model))
    partition, plan = make_plan(model, hardware, budget, need, Weights(), task="train")
    assert sum(choice != RESIDENT for choice in plan.choices(NAME).values()) > 2
    return put_in_force(model, partition, plan, hardware, Weights(), device, training=True)


Call = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def plainly(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).loss


def checkpointed_as_a_whole(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return checkpoint(lambda: model(**inputs).loss, use_reentrant=False)


def train(model: nn.Module, name: str, call: Call = plainly, steps: int = STEPS) -> list[torch.Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        inputs = batch(name, step)
        torch.manual_seed(step)
        loss = call(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_same_training(twin: nn.Module, fitted: nn.Module, device: str, name: str, call: Call = plainly) -> None:
    wanted = train(twin, name, call)
    handle = fit(fitted, device)
    found = train(fitted, name, call)
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert_same_state(fitted, twin)
    handle.remove()
    assert_same_state(fitted, twin)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    values = one.state_dict()
    for name, value in other.state_dict().items():
        assert torch.equal(values[name], value), name


@pytest.fixture(params=["cpu", "emulated"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if Path("/dev/shm").is_dir():
        monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm")
    return str(request.param)


@pytest.mark.parametrize("name", [*MODELS, "llama-lora"])
def test_five_steps_of_adamw(name: str, device: str) -> None:
    assert_same_training(make(name), make(name), device, name)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit", "llama-lora"])
def test_with_the_checkpointing_of_transformers(name: str, device: str, reentrant: bool) -> None:
    pair = [make(name), make(name)]
    for model in pair:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if "lora" in name:
            model.enable_input_require_grads()
    assert_same_training(*pair, device, name)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "resnet"])
def test_with_the_whole_model_checkpointed(name: str, device: str) -> None:
    assert_same_training(make(name), make(name), device, name, checkpointed_as_a_whole)
