"""The operators and losses whose peak memory was published with Liger-Kernel's benchmarks, rebuilt in plain PyTorch.

Each builder takes a row's configuration and its swept value, and returns the step whose peak was recorded. The
recorded process had run forward and backward before, so both threads' cuBLAS workspaces were there: ``warm`` does so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.accuracy import liger_losses, liger_scores

Step = Callable[[], Any]
CAPABILITIES = {"A100": (8, 0), "3090": (8, 6), "4090": (8, 9), "H100": (9, 0), "B200": (10, 0)}


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, config["dtype"].removeprefix("torch."))
    return found


def warm() -> None:
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    (torch.randn(8, 8, device="cuda", requires_grad=True) @ weight).sum().backward()


def cross_entropy(config: dict[str, Any], size: int, mode: str) -> Step:
    rows = config["B"] * config["T"]
    logits = torch.randn(rows, size, requires_grad=True, device="cuda")
    target = torch.randint(size, (rows, 1), device="cuda").squeeze(1)
    return lambda: nn.CrossEntropyLoss()(logits, target).backward()


def _llama_mlp(config: dict[str, Any], size: int, mode: str) -> Step:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    hidden, dtype = config["hidden_size"], _dtype(config)
    source = torch.randn(
        config.get("bsz", config.get("B")), size, hidden, device="cuda", dtype=dtype, requires_grad=True
    )
    made = LlamaConfig(
        hidden_size=hidden, intermediate_size=config["intermediate_size"], hidden_act=config["hidden_act"]
    )
    layer = LlamaMLP(config=made).to("cuda").to(dtype)
    if mode == "forward":
        return lambda: _drop(layer(source))
    if mode == "backward":
        grad, out = torch.randn_like(source), layer(source)
        return lambda: out.backward(grad, retain_graph=True)

    def full() -> None:
        out = layer(source)
        out.backward(torch.randn_like(out), retain_graph=True)

    return full


def _drop(value: object) -> None:
    """Let a result go."""


def layer_norm(config: dict[str, Any], size: int, mode: str) -> Step:
    layer, other = nn.LayerNorm(size, eps=config["eps"]).to("cuda"), nn.LayerNorm(size).to("cuda")
    source = torch.randn(config["M"], size, device="cuda", dtype=_dtype(config))
    grad = torch.randn_like(source)
    source.requires_grad_(True)

    def full(held: nn.Module = other) -> None:
        layer(source).backward(grad, retain_graph=True)

    return full


def rope(config: dict[str, Any], size: int, mode: str) -> Step:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden, tokens, dtype = config.get("hidden_size", size), config.get("seq_len", size), _dtype(config)
    head = hidden // config["num_q_heads"]
    heads = (config["num_q_heads"], config["num_kv_heads"])
    query, key = (
        torch.randn((1, tokens, n, head), device="cuda", requires_grad=True, dtype=dtype).transpose(1, 2)
        for n in heads
    )
    grads = torch.randn_like(query), torch.randn_like(key)
    inverse = (10000.0 ** -(torch.arange(0, head, 2).float() / head)).to("cuda")
    positions = torch.arange(tokens, device="cuda")
    # A product of matrices, which is cuBLAS's as that of a batch was when this was measured (from PyTorch 2.13 on,
    # Triton makes batches of outer products).
    angles = (inverse[:, None] @ positions[None].float())[None].transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def full(held: tuple[torch.Tensor, ...] = (inverse, positions)) -> None:
        out = apply_rotary_pos_emb(query, key, cos, sin)
        torch.autograd.grad(out, (query, key), grads, allow_unused=True, retain_graph=True)

    return full


class _Divergence(nn.Module):
    """Jensen-Shannon divergence of log-probabilities, in float32."""

    def __init__(self, beta: float = 0.5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.kl, self.beta, self.dtype = nn.KLDivLoss(reduction="none", log_target=True), beta, dtype

    def forward(self, log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        log_p, log_q = log_p.to(torch.float32), log_q.to(torch.float32)
        log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
        mean = torch.lerp(torch.exp(log_q), torch.exp(log_p), self.beta)
        loss = self.beta * self.kl(torch.log(mean), log_p).sum(dim=-1) + (1 - self.beta) * self.kl(
            torch.log(mean), log_q
        ).sum(dim=-1)
        return (loss / log_q.shape[0]).sum().to(self.dtype)


def jsd(config: dict[str, Any], size: int, mode: str) -> Step:
    loss = _Divergence().to("cuda")
    rows, words = (config["B"] * config["T"], size) if "B" in config else (size, config["vocab_size"])
    source = torch.randn(rows, words, requires_grad=True, device="cuda").log_softmax(dim=-1)
    target = torch.randn(rows, words, device="cuda").log_softmax(dim=-1)
    return lambda: loss(source, target).backward(retain_graph=True)


def tvd(config: dict[str, Any], size: int, mode: str) -> Step:
    rows = config["B"] * config["T"]
    source = torch.randn(rows, size, requires_grad=True, device="cuda").softmax(dim=-1)
    target = torch.randn(rows, size, device="cuda").softmax(dim=-1)
    return lambda: (torch.sum(torch.abs(source - target) / 2.0) / source.size(0)).backward(retain_graph=True)


class _Head(nn.Module):
    def __init__(self, hidden: int, words: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lin = nn.Linear(hidden, words, bias=False, dtype=dtype)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.lin(source)
        return self.loss(logits, target)


def fused_linear_cross_entropy(config: dict[str, Any], size: int, mode: str) -> Step:
    hidden, words, dtype = config["H"], config["V"], _dtype(config)
    head, other = (_Head(hidden, words, dtype).to("cuda") for _ in range(2))
    source = torch.randn(size, hidden, requires_grad=True, dtype=dtype, device="cuda")
    target = torch.randint(words, (size, 1), dtype=torch.long, device="cuda").squeeze(1)

    def full(held: nn.Module = other) -> None:
        loss = head(source, target)
        loss.backward()

    return full


class _JsdHead(nn.Module):
    def __init__(self, hidden: int, words: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.student = nn.Linear(hidden, words, bias=False, dtype=dtype, device="cuda")
        self.teacher = nn.Linear(hidden, words, bias=False, dtype=dtype, device="cuda")
        self.jsd = _Divergence(dtype=dtype)

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        student_logits, teacher_logits = self.student(student), self.teacher(teacher)
        student_prob = torch.log_softmax(student_logits / 1.0, dim=-1)
        teacher_prob = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return self.jsd(student_prob, teacher_prob)


def fused_linear_jsd(config: dict[str, Any], size: int, mode: str) -> Step:
    hidden, words, dtype = config["H"], config["V"], _dtype(config)
    head = _JsdHead(hidden, words, dtype)
    student = torch.rand(size, hidden, requires_grad=True, dtype=dtype, device="cuda")
    teacher = torch.rand(size, hidden, dtype=dtype, device="cuda")

    def full() -> None:
        loss = head(student, teacher)
        loss.backward()

    return full


def softmax(config: dict[str, Any], size: int, mode: str) -> Step:
    layer = nn.Softmax(dim=-1)
    source = torch.randn(size, device="cuda", dtype=_dtype(config), requires_grad=True)

    def full() -> None:
        out = layer(source)
        out.backward(torch.ones_like(out), retain_graph=True)

    return full


class _AddNorm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = hidden.dtype
        hidden, residual = hidden.to(torch.float32), residual.to(torch.float32)
        hidden = hidden + residual
        residual = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        return self.weight * hidden.to(dtype), residual.to(dtype)


def fused_add_rms_norm(config: dict[str, Any], size: int, mode: str) -> Step:
    layer = _AddNorm(size, config["eps"]).to("cuda")
    others = [nn.Parameter(torch.ones(size, device="cuda")) for _ in range(3)]
    source, residual = (torch.randn(config["M"], size, dtype=_dtype(config), device="cuda") for _ in range(2))
    grads = torch.randn_like(source), torch.randn_like(residual)
    source.requires_grad_(True)
    residual.requires_grad_(True)

    def full(held: list[nn.Parameter] = others) -> None:
        out = layer(source, residual)
        torch.autograd.backward(out, grads)

    return full


class _Neighbours(nn.Module):
    def __init__(self, hidden: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.scale = heads, (hidden // heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden, hidden, bias=bias) for _ in range(4)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (hidden.size(0), hidden.size(1), self.heads, hidden.size(2) // self.heads)
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        query, key, value = (t.view(shape).transpose(1, 2) for t in (query, key, value))
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale
        mask = torch.zeros(hidden.size(1), hidden.size(1), device=hidden.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, value)
        mixed = mixed.transpose(1, 2).contiguous().view(hidden.shape)
        return self.out_proj(mixed)


def fused_neighborhood_attention(config: dict[str, Any], size: int, mode: str) -> Step:
    hidden, heads, bias = config["hidden_size"], config["num_heads"], config["bias"]
    other, layer = (_Neighbours(hidden, heads, bias).to("cuda").to(_dtype(config)) for _ in range(2))
    source = torch.randn(config["batch_size"], size, hidden, dtype=_dtype(config), device="cuda")
    grad = torch.randn_like(source)
    source.requires_grad_(True)

    def full(held: nn.Module = other) -> None:
        out = layer(source)
        out.backward(grad, retain_graph=True)

    return full


def fused_moe(config: dict[str, Any], size: int, mode: str) -> Step:
    tokens = size if config["sweep_dim"] == "T" else config["T"]
    experts = size if config["sweep_dim"] == "E" else config["E"]
    hidden, inner, dtype = config["H"], config["intermediate_dim"], _dtype(config)
    source = torch.randn(tokens, hidden, dtype=dtype, device="cuda", requires_grad=True)
    up = torch.randn(experts, 2 * inner, hidden, dtype=dtype, device="cuda", requires_grad=True) * 0.02
    down = torch.randn(experts, hidden, inner, dtype=dtype, device="cuda", requires_grad=True) * 0.02
    logits = torch.randn(tokens, experts, device="cuda")
    index = torch.topk(logits, config["K"], dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, index.long()), dim=-1).to(dtype).requires_grad_(True)
    del logits

    def forward() -> torch.Tensor:
        return _experts(source, up, down, index, weights)

    if mode == "forward":
        return lambda: _drop(forward())
    if mode == "backward":
        out = forward()
        grad = torch.randn_like(out)
        return lambda: out.backward(grad, retain_graph=True)

    def full() -> None:
        out = forward()
        out.backward(torch.randn_like(out), retain_graph=True)

    return full


def _experts(
    source: torch.Tensor, up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    final = torch.zeros_like(source)
    with torch.no_grad():
        mask = F.one_hot(index.long(), num_classes=up.shape[0]).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for row in hit:
        place, token = torch.where(mask[row[0]])
        current = source[token]
        gate, value = F.linear(current, up[row[0]]).chunk(2, dim=-1)
        current = F.silu(gate) * value
        current = F.linear(current, down[row[0]])
        current = current * weights[token, place, None]
        final.index_add_(0, token, current.to(final.dtype))
    return final


BUILDERS: dict[tuple[str, str], Callable[[dict[str, Any], int, str], Step]] = {
    ("cross_entropy", "huggingface"): cross_entropy,
    ("distill_cosine_loss", "torch"): liger_losses.distill_cosine,
    ("distill_jsd_loss", "torch"): liger_losses.distill_jsd,
    ("fused_add_rms_norm", "huggingface"): fused_add_rms_norm,
    ("fused_linear_cpo_loss", "huggingface"): liger_losses.cpo,
    ("fused_linear_cross_entropy", "huggingface"): fused_linear_cross_entropy,
    ("fused_linear_grpo_loss_token", "torch"): liger_losses.grpo,
    ("fused_linear_jsd", "torch"): fused_linear_jsd,
    ("fused_moe", "huggingface"): fused_moe,
    ("fused_neighborhood_attention", "torch"): fused_neighborhood_attention,
    ("geglu", "huggingface"): _llama_mlp,
    ("jsd", "torch"): jsd,
    ("kto_loss", "huggingface"): liger_losses.kto,
    ("layer_norm", "huggingface"): layer_norm,
    ("llama4_rope", "huggingface"): liger_scores.llama4_rope,
    ("megatron_cross_entropy", "megatron-unfused"): liger_scores.megatron_cross_entropy,
    ("multi_token_attention", "torch"): liger_scores.multi_token_attention,
    ("rope", "huggingface"): rope,
    ("softmax", "torch"): softmax,
    ("sparse_multi_token_attention", "torch"): liger_scores.sparse_multi_token_attention,
    ("sparsemax", "torch"): liger_scores.sparsemax,
    ("swiglu", "huggingface"): _llama_mlp,
    ("tiled_swiglu", "huggingface"): _llama_mlp,
    ("tvd", "torch"): tvd,
}


def build(row: Mapping[str, str]) -> Callable[[], Step] | None:
    """What to trace for one row of ``liger_ops.csv``; None: no plain PyTorch form of it is here."""
    builder = BUILDERS.get((row["kernel_name"], row["kernel_provider"]))
    if builder is None:
        return None
    config, size, mode = (
        json.loads(row["extra_benchmark_config_str"]),
        int(float(row["x_value"])),
        row["kernel_operation_mode"],
    )

    def made() -> Step:
        if row["kernel_name"] in ("geglu", "swiglu", "tiled_swiglu", "fused_moe"):
            warm()
        return builder(config, size, mode)

    return made


def capability(row: Mapping[str, str]) -> tuple[int, int]:
    return next(value for name, value in CAPABILITIES.items() if name in row["gpu_name"])
