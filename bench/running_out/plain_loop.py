"""A loop of one's own around a network of one's own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from _settings import autocast, kept, language_loss, moved, optimizer, settings, without_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

given = settings()
WIDTHS = {"optimizer": 2048, "states": 2048, "gradients": 2048, "loading": 2048, "checkpoint": 2048}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            recomputed = "checkpointing" in given and torch.is_grad_enabled() and self.training
            x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        return self.head(x)


words = 48000 if given.case == "loss" else 1024
width = 256 if given.case == "loss" else WIDTHS.get(given.case, 512)
if given.case == "checkpoint":
    path = Path(tempfile.mkdtemp()) / "model.pt"
    torch.save(Network(width, words).state_dict(), path)
model = moved(Network(width, words), given)
if given.case == "checkpoint":
    where = "cpu" if "checkpoints to the CPU" in given else "cuda"
    model.load_state_dict(torch.load(path, map_location=where))


def step(updates):
    tokens = torch.randint(0, words, (given.batch, 64), device="cuda")
    with autocast(given):
        logits = model(tokens)
    if given.case == "loss":
        loss = language_loss(logits.bfloat16().flatten(0, 1), tokens.flatten(), given)
    else:
        loss = logits.square().mean()
    loss.backward()
    updates.step()
    updates.zero_grad()


def evaluate():
    model.eval()
    outputs = []
    with without_gradients(given):
        for _ in range(40 if given.case == "outputs" else 2):
            tokens = torch.randint(0, words, (given.batch, 64), device="cuda")
            outputs.append(kept(model(tokens), given))
            if given.case != "outputs":
                outputs.clear()
    return len(outputs)


if given.case in ("forward", "loss", "optimizer", "states"):
    updates = optimizer(model.parameters(), given)
    if given.case == "states" and "fused optimizer" not in given:
        updates = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(5):
        step(updates)
elif given.case == "gradients":
    updates = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    for _ in range(5):
        step(updates)
elif given.case == "outputs":
    with torch.no_grad():
        evaluate()
elif given.case == "evaluation":
    evaluate()
else:
    with torch.no_grad():
        model(torch.randint(0, words, (given.batch, 64), device="cuda"))
