"""Whatever is combined of the lossless techniques: losses and weights are plain PyTorch's, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from brim.core import Promise, Timeline
from brim.memory.tiers import Memory, cpu_memory, emulated_memory
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.step import apply_choice
from brim.techniques.blocks import Partition, find_blocks
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.micro_batch import split
from brim.techniques.streaming.weight_streaming import (
    FROM_DISK,
    FROM_RAM,
    RESIDENT,
    RING_SLOTS,
    STAGING_SLOTS,
    Weights,
)

STEPS, COUNT = 5, 60
GIB = 1 << 30


def make(*, tied: bool, dropout: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 64, (4, 12), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone()}


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, micro: int, clip: float | None) -> list[float]:
    torch.manual_seed(2)
    losses = []
    for batch in batches():
        total = 0.0
        for piece in split(batch, micro):
            loss = model(**piece.inputs).loss
            if piece.weight != 1:
                loss = loss * piece.weight
            loss.backward()
            total += loss.detach()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def draw(seed: int) -> dict[str, Any]:
    """One combination: the machine, the model, the choice."""
    dice = random.Random(seed)
    emulated, clip = dice.random() < 0.5, dice.choice([None, None, 0.5])
    model = make(tied=True, dropout=0.0)
    blocks, partition = checkpointing.blocks(model), find_blocks(model)
    homes = [RESIDENT, FROM_DISK, FROM_RAM] if emulated else [RESIDENT, FROM_DISK]
    streams = dice.random() < 0.6
    places = ["keep", "ram", "disk"] if emulated else ["keep", "disk"]
    choice = Choice(
        micro_batch=dice.choice([4, 4, 2, 1]),
        checkpointing={b: dice.choice(["full", "selective", "none"]) for b in blocks} if dice.random() < 0.6 else {},
        activations=tuple(b for b in blocks if dice.random() < 0.5) if dice.random() < 0.5 else (),
        in_backward=clip is None and dice.random() < 0.6,
        states=dice.choice(places),
        gradients=dice.choice(places),
        streaming={b.name: dice.choice(homes) for b in partition.blocks} if streams else {},
        streaming_settings={RING_SLOTS: dice.choice([2, 3]), STAGING_SLOTS: 2},
    )
    return {
        "emulated": emulated,
        "clip": clip,
        "choice": choice,
        "tied": dice.random() < 0.5,
        "dropout": dice.choice([0.0, 0.2]),
        "optimizer": dice.choice(["fused", "loop", "sgd"]),
    }


def memory(emulated: bool) -> Memory:
    timeline = Timeline("combination", measured=True)
    if emulated:
        return emulated_memory(timeline, vram_bytes=GIB, ram_bytes=GIB)
    return cpu_memory(timeline, ram_bytes=GIB)


def complete(choice: Choice, partition: Partition) -> Choice:
    """An untied model has another block: it is resident."""
    streaming = {b.name: choice.streaming.get(b.name, RESIDENT) for b in partition.blocks} if choice.streaming else {}
    return replace(choice, streaming=streaming)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_combination_of_lossless_techniques_changes_no_bit(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))
    drawn = draw(seed)
    twin = make(tied=drawn["tied"], dropout=drawn["dropout"])
    wanted = plain(twin, make_optimizer(drawn["optimizer"], twin), drawn["choice"].micro_batch, drawn["clip"])

    model = make(tied=drawn["tied"], dropout=drawn["dropout"])
    optimizer = make_optimizer(drawn["optimizer"], model)
    partition = find_blocks(model)
    choice = complete(drawn["choice"], partition)
    plan = choice.plan(model="tiny", hardware="test", budget_bytes={}, promise=Promise(peak_bytes={}))
    assert replace(Choice.of(plan)) == choice
    fitted = apply_choice(model, optimizer, plan, memory(drawn["emulated"]), partition, Weights())
    torch.manual_seed(2)
    found = []
    try:
        for batch in batches():
            found.append(fitted.step(split(batch, choice.micro_batch), clip_norm=drawn["clip"]).item())
    finally:
        fitted.remove()
    assert found == wanted
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    twins = make_optimizer(drawn["optimizer"], twin)
    assert optimizer.state_dict()["param_groups"] == twins.state_dict()["param_groups"]
