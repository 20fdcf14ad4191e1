"""A Llama-shaped model of any size in host memory that several processes share, made once."""

from __future__ import annotations

import mmap
import os
from math import prod
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from _checkpoint import Shape

# 46 blocks of 634 MB in bf16 and 655 MB of embeddings and head: 14.9 B parameters, 29.8 GB.
FULL = Shape(hidden=5120, intermediate=13_824, layers=46, heads=40, kv_heads=40, vocabulary=32_000)
TINY = Shape(hidden=128, intermediate=352, layers=6, heads=4, kv_heads=4, vocabulary=500)
_ALIGN = 4096
_PATTERN = (1 << 23) + 9  # values repeat after that many: odd, so that rows differ


def empty_model(shape: Shape) -> Any:
    """The model in bf16 on the meta device, its computed buffers in place."""
    from accelerate import init_empty_weights

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with init_empty_weights(include_buffers=False):
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def weights_bytes(shape: Shape) -> int:
    return sum(t.numel() * t.element_size() for t in empty_model(shape).parameters())


def make_shared(shape: Shape) -> int:
    """The weights in anonymous shared memory (not bounded by the size of /dev/shm); returns its descriptor."""
    descriptor = os.memfd_create("bench-weights")
    layout = _layout(shape)
    os.ftruncate(descriptor, sum(size for _, _, size in layout.values()))
    pattern = make_pattern()
    for name, tensor in _tensors(descriptor, shape).items():
        fill(name, tensor, pattern)
    return descriptor


def shared_model(descriptor: int, shape: Shape) -> Any:
    """The model with its weights in the shared memory of ``make_shared``."""
    model = empty_model(shape)
    model.load_state_dict(_tensors(descriptor, shape), strict=True, assign=True)
    return model.requires_grad_(False)


def make_pattern() -> torch.Tensor:
    return torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))


def fill(name: str, tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Norms of one, the rest N(0, 1/fan-in), starting at another place of the pattern for each weight."""
    flat = tensor.view(-1)
    if tensor.dim() == 1:
        flat.fill_(1.0)
        return
    scale = 1.0 if "embed_tokens" in name else tensor.shape[1] ** -0.5
    values = (torch.roll(pattern, sum(name.encode())) * scale).to(tensor.dtype)
    for start in range(0, flat.numel(), values.numel()):
        piece = flat[start : start + values.numel()]
        piece.copy_(values[: piece.numel()])


def _layout(shape: Shape) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Weight -> shape, offset, bytes with padding."""
    layout, offset = {}, 0
    for name, tensor in empty_model(shape).state_dict().items():
        size = -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        layout[name] = (tuple(tensor.shape), offset, size)
        offset += size
    return layout


def _tensors(descriptor: int, shape: Shape) -> dict[str, torch.Tensor]:
    layout = _layout(shape)
    memory = mmap.mmap(descriptor, sum(size for _, _, size in layout.values()))
    return {
        name: torch.frombuffer(memory, dtype=torch.bfloat16, count=prod(dims), offset=offset).view(dims)
        for name, (dims, offset, _) in layout.items()
    }
