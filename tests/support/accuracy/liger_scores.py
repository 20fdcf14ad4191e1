"""Sparsemax, attention over several tokens, Llama 4's rotary embedding, Megatron's cross entropy: plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], Any]


def _dtype(config: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, config["dtype"].removeprefix("torch."))
    return found


def _sparsemax(source: torch.Tensor) -> torch.Tensor:
    ordered, _ = torch.sort(source, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    size = source.size(-1)
    places = torch.arange(1, size + 1, device=source.device, dtype=source.dtype).unsqueeze(0)
    bound = 1 + places * ordered
    support = bound > sums
    count = support.sum(dim=-1, keepdim=True).clamp(min=1)
    supported = (ordered * support).sum(dim=-1, keepdim=True)
    threshold = (supported - 1) / count
    return torch.clamp(source - threshold, min=0)


def sparsemax(config: dict[str, Any], size: int, mode: str) -> Step:
    source = torch.randn((config["B"] * config["T"], size), dtype=_dtype(config), device="cuda")
    grad = torch.randn_like(source)
    source.requires_grad_(True)

    def full() -> None:
        out = _sparsemax(source)
        out.backward(grad, retain_graph=True)

    return full


class _TokenAttention(nn.Module):
    """Scores of (batch, channels, tokens, tokens): masked, normalized, convolved."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        shape = (config["C_out"], config["C_in"] // config["groups"], config["K"], config["K"])
        self.weight = nn.Parameter(torch.empty(shape, dtype=_dtype(config), device="cuda"))
        self.bias = nn.Parameter(torch.empty(config["C_out"], dtype=_dtype(config), device="cuda"))
        self.padding, self.groups = config["K"] // 2, config["groups"]

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        tokens = scores.size(-1)
        mask = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device))[None, None]
        low = torch.tensor(-1e9, device=scores.device, dtype=scores.dtype)
        zero = torch.tensor(0.0, device=scores.device, dtype=scores.dtype)
        masked = scores.masked_fill(~mask, low)
        weights = F.softmax(masked, dim=-1)
        mixed = F.conv2d(weights, self.weight, self.bias, stride=1, padding=self.padding, groups=self.groups)
        return mixed.masked_fill(~mask, zero)


class _SparseTokenAttention(_TokenAttention):
    """With sparsemax in the place of softmax."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        tokens = scores.size(-1)
        mask = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device))[None, None]
        low = torch.tensor(-1e9, device=scores.device, dtype=torch.float32)
        zero = torch.tensor(0.0, device=scores.device, dtype=torch.float32)
        wide = scores.to(torch.float32)
        masked = wide.masked_fill(~mask, low)
        ordered, _ = torch.sort(masked, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        places = torch.arange(1, tokens + 1, device=scores.device, dtype=masked.dtype).view(1, 1, 1, tokens)
        positive = ordered > -1e8
        condition = (1 + places * ordered > sums) & positive
        count = torch.sum(condition, dim=-1, keepdim=True)
        safe = torch.max(count, torch.ones_like(count))
        supported = torch.gather(sums, dim=-1, index=safe.long() - 1)
        threshold = (supported - 1) / safe.to(masked.dtype)
        threshold = torch.where(count == 0, torch.full_like(threshold, float("inf")), threshold)
        weights = torch.clamp(masked - threshold, min=0)
        kernel, bias = self.weight.to(torch.float32), self.bias.to(torch.float32)
        mixed = F.conv2d(weights, kernel, bias, stride=1, padding=self.padding, groups=self.groups)
        return mixed.masked_fill(~mask, zero).to(scores.dtype)


def _token_attention(kind: type[_TokenAttention], config: dict[str, Any], size: int) -> Step:
    other, layer = _TokenAttention(config), kind(config)
    source = torch.randn((config["B"], config["C_in"], size, size), dtype=_dtype(config), device="cuda")
    grad = torch.randn_like(source)
    source.requires_grad_(True)

    def full(held: nn.Module = other) -> None:
        out = layer(source)
        out.backward(grad, retain_graph=True)

    return full


def multi_token_attention(config: dict[str, Any], size: int, mode: str) -> Step:
    return _token_attention(_TokenAttention, config, size)


def sparse_multi_token_attention(config: dict[str, Any], size: int, mode: str) -> Step:
    return _token_attention(_SparseTokenAttention, config, size)


def llama4_rope(config: dict[str, Any], size: int, mode: str) -> Step:
    """The frequencies are a matrix product, as transformers had them in 2025 (later ones multiply), and cuBLAS's, as
    PyTorch had them (from 2.13 on, Triton makes batches of outer products)."""
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    hidden, tokens, dtype = config.get("hidden_size", size), config.get("seq_len", size), _dtype(config)
    head = hidden // config["num_q_heads"]
    query, key = (
        torch.randn((1, tokens, n, head), device="cuda", requires_grad=True, dtype=dtype)
        for n in (config["num_q_heads"], config["num_kv_heads"])
    )
    grads = torch.randn_like(query), torch.randn_like(key)
    inverse = (10000.0 ** -(torch.arange(0, head, 2).float() / head)).to("cuda")
    positions = torch.arange(tokens, device="cuda", dtype=torch.long).unsqueeze(0)
    angles = (inverse[:, None] @ positions.float())[None].transpose(1, 2)
    frequencies = torch.polar(torch.ones_like(angles), angles) * 1.0

    def full(held: tuple[torch.Tensor, ...] = (inverse, positions)) -> None:
        out = apply_rotary_emb(query, key, frequencies)
        torch.autograd.grad(out, (query, key), grads, allow_unused=True, retain_graph=True)

    return full


class _VocabularyParallel(torch.autograd.Function):
    """Megatron-core's cross entropy on one rank, not fused: probabilities in float32, their gradient in place."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wide = logits.float()
        wide -= torch.max(wide, dim=-1)[0].unsqueeze(dim=-1)
        outside = (target < 0) | (target >= wide.size(-1))
        inside = target.clone() - 0
        inside[outside] = 0
        rows, columns = wide.view(-1, wide.size(-1)), inside.view(-1)
        places = torch.arange(start=0, end=rows.size(0), device=rows.device)
        predicted = rows[places, columns].clone().contiguous().view_as(target)
        predicted[outside] = 0.0
        torch.exp(wide, out=wide)
        sums = wide.sum(dim=-1)
        loss = torch.log(sums) - predicted
        wide.div_(sums.unsqueeze(dim=-1))
        context.save_for_backward(wide, outside, columns)
        return loss

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        probabilities, outside, columns = context.saved_tensors
        rows = probabilities.view(-1, probabilities.size(-1))
        places = torch.arange(start=0, end=rows.size(0), device=rows.device)
        rows[places, columns] -= 1.0 - outside.view(-1).float()
        probabilities.mul_(gradient.unsqueeze(dim=-1))
        return probabilities, None


def megatron_cross_entropy(config: dict[str, Any], size: int, mode: str) -> Step:
    logits = torch.randn(config["S"], config["B"], size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, size, (config["S"], config["B"]), device="cuda", dtype=torch.long)

    def full() -> None:
        logits.grad = None
        losses: Any = _VocabularyParallel.apply(logits, target)
        losses.sum().backward()

    return full
