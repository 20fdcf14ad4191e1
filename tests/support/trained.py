"""Small models of four families, each with dropout, and five steps of training as a user would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

WORDS, CLASSES = 61, 7
Batch = dict[str, torch.Tensor]


class Residual(nn.Module):
    """A pre-activation block: its first operation is on what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.2)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.drop(self.act(self.first(self.act(self.norm(x))))))


class ResNet(nn.Module):
    """Stages in a sequence of sequences, batch norm and dropout. Gives a loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.Sequential(*(nn.Sequential(*(Residual(8) for _ in range(2))) for _ in range(3)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.stages(self.stem(pixel_values)).mean((2, 3)))
        return transformers.modeling_outputs.ImageClassifierOutput(
            loss=nn.functional.cross_entropy(logits, labels), logits=logits
        )


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=3, n_head=2, n_positions=32, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "resnet": ResNet}
BLOCKS = {
    "llama": [f"model.layers.{i}" for i in range(3)],
    "gpt2": [f"transformer.h.{i}" for i in range(3)],
    "vit": [f"vit.layers.{i}" for i in range(3)],
    "resnet": [f"stages.{i}.{j}" for i in range(3) for j in range(2)],
}


def make(family: str, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return FAMILIES[family]().train()


def batch(family: str, seed: int, rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    if family in ("llama", "gpt2"):
        ids = torch.randint(0, WORDS, (rows, 12), generator=generator)
        return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}
    pixels = torch.randn(rows, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def train(model: nn.Module, family: str, *, steps: int = 5, optimizer: Any = None) -> list[float]:
    """Losses of ``steps`` steps of AdamW. Dropout draws from the same seed every time."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(**batch(family, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same_state(one: nn.Module, other: nn.Module) -> bool:
    """Parameters and buffers, bit for bit."""
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def surface(model: nn.Module) -> list[dict[str, Any]]:
    """Every attribute of every part, to be compared before and after."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]
