"""RamTorch ``OffloadModel`` with its NVMe tier: chunks in a scratch file, a loader thread, a window of two."""

from __future__ import annotations

from typing import Any

import torch
from ramtorch import OffloadModel
from safetensors.torch import load_file
from torch import nn

from peers import Loaded, Setting, empty_model

TITLE = "RamTorch nvme_layers"
PACKAGE = "ramtorch"
LIMITED = True
CONVERTS_IN_LOAD = True


class _Embed(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.embed, self.rotary = base.embed_tokens, base.rotary_emb

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.embed(ids)
        cosine, sine = self.rotary(hidden, torch.arange(ids.shape[1])[None])
        return hidden, cosine, sine


class _Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(hidden, position_embeddings=(cosine, sine)), cosine, sine


class _Head(nn.Module):
    def __init__(self, base: Any, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = base.norm, head

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def prepare(setting: Setting) -> None:
    setting.scratch.mkdir(parents=True, exist_ok=True)


def load(setting: Setting) -> Loaded:
    """Writes its scratch file anew each time: RamTorch cannot open one that is there."""
    model = empty_model(setting.checkpoint)
    for file in sorted(setting.checkpoint.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False, assign=True)
    chunks = [
        _Embed(model.model),
        *(_Block(layer) for layer in model.model.layers),
        _Head(model.model, model.lm_head),
    ]
    # Two window slots and the one being dropped, one of which may hold the embedding or the head, and half a block.
    room = setting.budget_bytes - setting.largest_bytes - int(2.5 * setting.block_bytes)
    pinned = max(0, min(len(model.model.layers), room // setting.block_bytes))
    layers = _evenly(len(model.model.layers), pinned)
    _own_memory(chunks, layers)
    path = setting.scratch / "weights.bin"
    streamed = [i for i in range(len(chunks)) if i not in layers]
    runner = OffloadModel(
        chunks, device="cpu", window=2, pin_layers=layers, nvme_layers=streamed, nvme_path=str(path)
    )
    return Loaded(forward=runner, facts=lambda: {"pinned": len(layers), "stats": runner.stats}, close=runner.close)


def _evenly(layers: int, pinned: int) -> list[int]:
    """Chunk numbers (the embedding is 0) of ``pinned`` blocks, evenly spread."""
    return [1 + int((i + 0.5) * layers / pinned) for i in range(pinned)]


def _own_memory(chunks: list[nn.Module], layers: list[int]) -> None:
    for number in layers:  # else "pinned" would only mean mapped from the checkpoint
        for parameter in chunks[number].parameters():
            parameter.data = parameter.data.clone()
