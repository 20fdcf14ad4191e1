"""torchtitan's Llama 3.1 8B under FSDP2 on 8 and 128 H100, end of 2024: local batch 2, 8,192 tokens, peak reserved.

The model, its selective checkpointing (products saved but every second one, attention saved) and FSDP2 are written
after torchtitan of that time (torchtitan/models/llama/model.py, parallelisms/parallelize_llama.py): float32
parameters, bfloat16 compute, float32 reduction, AdamW by ``foreach``, gradients clipped. One rank is traced in
PyTorch's fake process group.

All rows, compiled ones too, are in ``torchtitan_ranks``, with transformers' Llama.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import brim
from brim.core import Trace
from brim.estimation.extrapolation import extend_depth
from brim.techniques.parallel.sharding import alone
from support.accuracy import ground_truth

_BATCH, _TOKENS, _WIDTH, _INNER, _HEADS, _GROUPS, _VOCABULARY = 2, 8192, 4096, 14336, 32, 8, 128256
_LAYERS, _FEW = 32, (2, 4, 6)
# GPUs and method of the table -> ranks
RUNS = {("8x H100", "FSDP"): 8, ("128x H100", "FSDP"): 128}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        narrow = _WIDTH // _HEADS * _GROUPS
        self.wq, self.wo = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(_WIDTH, narrow, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part(x).view(batch, tokens, -1, _WIDTH // _HEADS) for part in (self.wq, self.wk, self.wv))
        q, k = _rotated(q, angles), _rotated(k, angles)
        k, v = _repeated(k), _repeated(v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, tokens, -1))


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * angles.view(1, angles.shape[0], 1, angles.shape[1])
    return torch.view_as_real(turned).flatten(3).type_as(x)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    batch, tokens, groups, width = x.shape
    times = _HEADS // _GROUPS
    wide = x.unsqueeze(3).expand(batch, tokens, groups, times, width)
    return wide.reshape(batch, tokens, groups * times, width)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = Attention(), Norm(), Norm()
        self.w1, self.w3 = (nn.Linear(_WIDTH, _INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(_INNER, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            self._forward, x, angles, use_reentrant=False, context_fn=_contexts, preserve_rng_state=False
        )

    def _forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        hidden = x + self.attention(self.attention_norm(x), angles)
        normed = self.ffn_norm(hidden)
        return hidden + self.w2(functional.silu(self.w1(normed)) * self.w3(normed))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.output = Norm(), nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.register_buffer("angles", torch.zeros(_TOKENS, _WIDTH // _HEADS // 2, dtype=torch.complex64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.angles)
        return self.output(self.norm(hidden))


def _contexts() -> Any:
    """Every product's result is kept but every second one's, and attention's."""
    counts: dict[bool, int] = defaultdict(int)
    kept = (torch.ops.aten._scaled_dot_product_flash_attention.default,
            torch.ops.aten._scaled_dot_product_efficient_attention.default)  # fmt: skip

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = function in kept
        if function is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            saves = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _program(layers: int, mesh: DeviceMesh) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        model = Model(layers)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for number, block in enumerate(model.layers):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=number < layers - 1)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.zeros(_BATCH, _TOKENS, dtype=torch.long)

        def step() -> None:
            optimizer.zero_grad()
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(0, 1))
            del logits
            loss.backward()
            optimizer.step()

        return step

    return build


def _traced(layers: int, ranks: int) -> Trace:
    with alone(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        made = brim.trace(_program(layers, mesh), steps=2, target="cuda", capability=(9, 0))
    start = made.step_starts[0]  # torchtitan builds on meta: only shards are ever made
    kept = [s for s in made.storages if s.died is None or s.died >= start]
    return replace(made, storages=tuple(replace(s, id=index) for index, s in enumerate(kept)))


def peak_bytes(ranks: int) -> int:
    """Reserved at the peak, by a trace of a few layers of which one is repeated."""
    found = extend_depth([_traced(layers, ranks) for layers in _FEW], _LAYERS - _FEW[0], unit=2)
    if found is None:
        raise RuntimeError("the layers of torchtitan's model do not repeat")
    return int(brim.simulate(found[0], None).peak_bytes.reserved)


def measured() -> Iterator[tuple[tuple[str, str], float]]:
    """(GPUs, method) and bytes of the runs in RUNS."""
    for row in ground_truth.rows("published_tables.csv"):
        if not row["source"].startswith("torchtitan"):
            continue
        key = (row["gpu"], row["method"].rpartition("| ")[2])
        if row["method"].startswith("1D FSDP") and key in RUNS:
            yield key, float(row["peak"]) * 2**30
