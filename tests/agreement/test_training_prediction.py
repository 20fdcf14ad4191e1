"""What a training step is predicted to take in each tier is what it takes, where a pool in RAM plays VRAM.

The pool that plays VRAM takes its bytes from PyTorch, the one of RAM does not: so what PyTorch's profiler sees is
VRAM, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from brim.core import Hardware, Promise, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.pool import HostSource, Pool, TorchSource
from brim.memory.recorder import Recorder
from brim.memory.tiers import Memory
from brim.planning.inference.machine import emulated_hardware
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.prediction import Prediction, TrainingStep
from brim.planning.strategy.step import apply_choice
from brim.techniques.blocks import find_blocks
from brim.techniques.micro_batch import split
from brim.techniques.streaming.weight_streaming import (
    FROM_DISK,
    FROM_RAM,
    RESIDENT,
    RING_SLOTS,
    STAGING_SLOTS,
    Weights,
)
from support.cpu.truth import measured_peak_bytes

GIB = 1 << 30
BATCH, SEQ, WORDS, LAYERS = 4, 192, 600, 3


def language_model(*, lora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=768, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    for parameter in model.parameters():  # where the profiler does not see them: the model was there before
        place = HostSource().make(parameter.numel() * 4).view(torch.float32).view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
    return model.train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def ids(count: int) -> dict[str, torch.Tensor]:
    made = torch.zeros(count, SEQ, dtype=torch.long)
    return {"input_ids": made, "labels": made.clone()}


def streamed(names: list[str], home: str) -> dict[str, Any]:
    """Every other block."""
    homes = {name: home if index % 2 else RESIDENT for index, name in enumerate(names)}
    return {"streaming": homes, "streaming_settings": {RING_SLOTS: 2, STAGING_SLOTS: 2}}


BLOCKS = [f"model.layers.{i}" for i in range(LAYERS)]
LORA_BLOCKS = [f"base_model.model.model.layers.{i}" for i in range(LAYERS)]
CHOICES: dict[str, Callable[[list[str], list[str]], dict[str, Any]]] = {
    "plain": lambda blocks, parts: {},
    "states in ram": lambda blocks, parts: {"states": "ram"},
    "states in ram, during backward": lambda blocks, parts: {"states": "ram", "in_backward": True},
    "states on disk": lambda blocks, parts: {"states": "disk"},
    "gradients in ram": lambda blocks, parts: {"states": "ram", "gradients": "ram"},
    "weights from ram": lambda blocks, parts: streamed(parts, FROM_RAM),
    "weights from disk": lambda blocks, parts: streamed(parts, FROM_DISK),
    "activations": lambda blocks, parts: {"activations": tuple(blocks), "states": "ram"},
    "checkpointing": lambda blocks, parts: {"checkpointing": dict.fromkeys(blocks, "full")},
    "everything": lambda blocks, parts: {
        "states": "ram", "gradients": "ram", "activations": tuple(blocks),
        "checkpointing": dict.fromkeys(blocks, "full"), **streamed(parts, FROM_RAM),
    },
}  # fmt: skip
_IN_HALVES = ("states in ram, during backward", "gradients in ram", "weights from disk", "everything")


def training_step(model: nn.Module, hardware: Hardware, **changes: Any) -> TrainingStep:
    return TrainingStep(
        **{
            "name": "tiny",
            "model": model,
            "partition": find_blocks(model, stay=stay(model)),
            "weights": Weights(),
            "optimizer": adamw,
            "inputs": ids,
            "batch": BATCH,
            "hardware": hardware,
            "device": "emulated",
            "budget_bytes": {RAM: GIB},
            **changes,
        }
    )


def stay(model: nn.Module) -> frozenset[str]:
    return frozenset(n for n, _ in model.named_parameters() if "lora_" in n)


def measure(model: nn.Module, choice: Choice) -> dict[str, int]:
    """Peak bytes per tier of two steps that are really made."""
    recorder = Recorder(Timeline("tiny", measured=True))
    host = Pool(RAM, GIB, HostSource(), recorder)
    compute = Pool(VRAM, GIB, TorchSource(torch.device("cpu")), recorder)
    memory = Memory(compute=compute, host=host, recorder=recorder)
    plan = choice.plan(model="tiny", hardware="test", budget_bytes={}, promise=Promise(peak_bytes={}))
    held: list[Any] = []

    def build() -> Callable[[], None]:
        optimizer = adamw(model)
        fitted = apply_choice(model, optimizer, plan, memory, find_blocks(model, stay=stay(model)), Weights())
        held.append(fitted)
        return lambda: held.append(fitted.step(split(ids(BATCH), choice.micro_batch)).item())

    peak = measured_peak_bytes(build, steps=2)
    found = {VRAM: peak, RAM: host.peak_bytes, DISK: memory.scratch().peak_bytes}
    held[0].close()
    return found


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))


def assert_agree(predicted: Prediction, measured: dict[str, int]) -> None:
    assert predicted.peak_bytes[VRAM] == pytest.approx(measured[VRAM], rel=0.02)
    assert predicted.peak_bytes[RAM] == measured[RAM]
    assert predicted.peak_bytes[DISK] == measured[DISK]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "micro_batch"), [("plain", 2), *((name, 2 if name in _IN_HALVES else BATCH) for name in CHOICES)]
)
def test_the_peaks_of_full_training(name: str, micro_batch: int, known_machine: Hardware) -> None:
    model = language_model()
    parts = [block.name for block in find_blocks(model).blocks]
    choice = Choice(micro_batch=micro_batch, **CHOICES[name](BLOCKS, parts))
    predicted = training_step(model, emulated_hardware(known_machine)).predict(choice)
    assert_agree(predicted, measure(model, choice))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["states in ram", "everything"])
def test_the_peaks_of_lora(name: str, known_machine: Hardware) -> None:
    model = language_model(lora=True)
    parts = [block.name for block in find_blocks(model, stay=stay(model)).blocks]
    choice = Choice(micro_batch=2, **CHOICES[name](LORA_BLOCKS, parts))
    predicted = training_step(model, emulated_hardware(known_machine)).predict(choice)
    assert_agree(predicted, measure(model, choice))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_step_on_cuda_goes_through_the_caching_allocator(known_machine: Hardware) -> None:
    """No GPU is needed to say what leaves VRAM, and in what steps VRAM is reserved."""
    hardware, model = emulated_hardware(known_machine), language_model()
    on_cuda = training_step(model, hardware, device="cuda")
    plain, offloaded = (
        on_cuda.predict(Choice(micro_batch=BATCH, states=states)).peak_bytes for states in ("keep", "ram")
    )
    assert plain[VRAM] % (2 << 20) == offloaded[VRAM] % (2 << 20) == 0
    states = 2 * sum(p.numel() * 4 for p in model.parameters())
    assert plain[VRAM] - offloaded[VRAM] == pytest.approx(states, rel=0.25)
    assert plain[RAM] == 0 and offloaded[RAM] >= states
