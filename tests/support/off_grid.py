"""The same function with other weights, that lie on no grid.

A model that comes from a file of 4 bits has weights on such a grid already: 4 bits keep them too well to say anything
about 4 bits. Here every channel between two linear layers is scaled at random where it is made and scaled back where
it is used, which changes the weights within each group and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

_LEAST, _MOST = 0.7, 1.4


def leave_the_grid(model: Any, *, seed: int = 0) -> None:
    """Rescale the inner channels of a Llama-shaped causal language model, in place."""
    draw = torch.Generator().manual_seed(seed)
    heads, pairs = model.config.num_attention_heads, model.config.num_key_value_heads
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            _rescale(draw, layer.input_layernorm.weight, [attention.q_proj, attention.k_proj, attention.v_proj])
            _rescale(draw, layer.post_attention_layernorm.weight, [mlp.gate_proj, mlp.up_proj])
            _rescale(draw, mlp.up_proj.weight, [mlp.down_proj])
            _rescale(draw, attention.v_proj.weight, [attention.o_proj], heads // pairs, attention.head_dim)


def _rescale(draw: torch.Generator, makes: torch.Tensor, uses: list[Any], repeats: int = 1, head: int = 0) -> None:
    """Scale the channels that ``makes`` (channels, ...) gives, and the inputs of ``uses`` back: each head of as many
    channels is read ``repeats`` times in a row."""
    factors = torch.empty(len(makes)).uniform_(_LEAST, _MOST, generator=draw)
    makes.mul_(factors.view(-1, *[1] * (makes.dim() - 1)))
    if repeats > 1:
        factors = factors.view(-1, head).repeat_interleave(repeats, 0).reshape(-1)
    for linear in uses:
        linear.weight.div_(factors)
