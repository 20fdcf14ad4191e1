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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from brim.core import EventKind, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, predict, put_in_force
from brim.techniques.blocks import adapters
from brim.techniques.streaming.weight_streaming import NAME, RESIDENT, Weights, WeightStreaming

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # between two libraries

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
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 4,
            "num_heads": 4,
            "vocab_size": WORDS,
            "decoder_start_token_id": 0,
        },
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*MODELS, "llama-lora"])
def test_five_steps_of_adamw(name: str, device: str) -> None:
    assert_same_training(make(name), make(name), device, name)


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit", "llama-lora"])
def test_with_the_checkpointing_of_transformers(name: str, device: str, reentrant: bool) -> None:
    pair = [make(name), make(name)]
    for model in pair:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if "lora" in name:
            model.enable_input_require_grads()
    assert_same_training(*pair, device, name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "resnet"])
def test_with_the_whole_model_checkpointed(name: str, device: str) -> None:
    assert_same_training(make(name), make(name), device, name, checkpointed_as_a_whole)


# -- predicted and measured

Events = dict[str, list[tuple[str, str, int, str]]]


def lanes(timeline: Timeline) -> Events:
    """Events by lane: between lanes there is no order."""
    found: Events = {}
    for e in timeline:
        if e.kind is EventKind.IDLE:
            continue  # how long compute waited differs from run to run
        lane = f"{e.source} -> {e.tier}" if e.kind is EventKind.COPY else f"{e.tier} pool"
        found.setdefault(lane, []).append((e.kind.name, e.tier, e.bytes, e.label))
    return found


def settle(handle: WeightStreaming) -> None:
    handle.settle()
    engine: Any = handle.memory.engine
    for lane in (engine._disk, engine._copy, engine._back, engine._write):
        lane.submit(lambda: None).wait()


def small_steps(model: nn.Module, ids: torch.Tensor, handle: WeightStreaming, updating: bool) -> None:
    """Steps of a user's own loop, the optimizer at once or block by block."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    gradients: dict[int, torch.Tensor | None] = {}
    for _ in range(3):
        model(ids).logsumexp(-1).sum().backward()
        if not updating:
            optimizer.step()
        else:
            gradients = {id(p): p.grad for p in model.parameters()}
            for name, block in handle.blocks:
                for parameter in model.parameters():
                    parameter.grad = gradients[id(parameter)] if any(parameter is p for p in block) else None
                with handle.updating(name):
                    optimizer.step()
        optimizer.zero_grad()


@pytest.mark.thorough
@pytest.mark.parametrize("updating", [False, True], ids=["at once", "by block"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "adapters"])
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("cpu", {RAM: 0.6}),
        ("emulated", {VRAM: 0.6, RAM: 1.5}),
        ("emulated", {VRAM: 0.6, RAM: 0.8}),
    ],
)
def test_what_is_predicted_is_what_happens(
    make_tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    shares: dict[str, float],
    tied: bool,
    frozen: bool,
    updating: bool,
) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm")

    def build() -> nn.Module:
        model = make_tiny(tied=tied).train()
        if frozen:
            model.requires_grad_(False)
            model.batch_norm.requires_grad_(True)
            model.layers[0].norm.requires_grad_(True)
        return model

    model = build()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    hardware, need = machine(kind), Need(step_bytes=1000, stay=adapters(model))  # type: ignore[arg-type]
    budget = {tier: int(size * share) for tier, share in shares.items()}
    partition, plan = make_plan(model, hardware, budget, need, Weights(), task="train")
    handle = put_in_force(model, partition, plan, hardware, Weights(), kind, training=True)
    small_steps(model, torch.arange(10).view(2, 5), handle, updating)
    settle(handle)
    real, measured = lanes(handle.timeline()), handle.timeline()
    peaks = {pool.tier: pool.peak_bytes for pool in (handle.memory.compute, handle.memory.ram)}
    misses = handle.misses
    handle.remove()
    with FakeTensorMode():
        fake = build()
        foreseen = predict(fake, partition, plan, hardware, Weights(), training=True)
        small_steps(fake, torch.zeros(2, 5, dtype=torch.long), foreseen, updating)
    assert lanes(foreseen.timeline()) == real
    assert foreseen.misses == misses
    assert {p.tier: p.peak_bytes for p in (foreseen.memory.compute, foreseen.memory.ram)} == peaks
    assert measured.copied_bytes(*((DISK, RAM) if kind == "cpu" else (RAM, VRAM))) > 0
    back = (RAM, DISK) if kind == "cpu" else (VRAM, RAM)
    assert (measured.copied_bytes(*back) > 0) == (not frozen and (updating or kind == "cpu"))
