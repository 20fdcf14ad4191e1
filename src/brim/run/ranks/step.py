"""A training step of a rank: its share of the batch, forward and backward by PyTorch's engine, clipping, update.

The loss of a batch is the mean over its counted tokens, on all ranks: every micro-batch's mean is weighted by its
share of the batch's counted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from brim.estimation.ranks.split import Split
from brim.run.data.dataset import IGNORED
from brim.run.ranks.model import Chunk, Part
from brim.techniques.optimizers import set_lr
from brim.techniques.parallel import context_parallel, sharding


@dataclass(frozen=True, kw_only=True)
class Share:
    """A data-parallel rank's rows of a batch, (rows, tokens) each, and a weight for each micro-batch."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def share_of(batch: dict[str, torch.Tensor], split: Split, shard: int, device: torch.device) -> Share:
    """The rows of the batch, which all ranks have read, for data-parallel rank ``shard``; ranks of a context-parallel
    group have the same rows and count different tokens of them.

    Weights are multiplied by the number of ranks, because FSDP2 averages gradients over them.
    """
    rows = split.micro_batch * split.micro_batches
    labels = batch["labels"]
    counted = torch.nn.functional.pad(labels[:, 1:] != IGNORED, (0, 1))
    dp, cp = divmod(shard, split.cp)
    mine = slice(dp * rows, (dp + 1) * rows)
    counts = context_parallel.own(counted[mine], cp, split.cp).sum(1)
    of_micro = counts.reshape(split.micro_batches, split.micro_batch).sum(1)
    weights = of_micro * split.shards / counted.sum()
    labels = labels[mine].clone()
    for index in (of_micro == 0).nonzero().flatten().tolist():  # the mean of no tokens is NaN, even times 0
        labels[index * split.micro_batch : (index + 1) * split.micro_batch] = 0
    return Share(
        input_ids=batch["input_ids"][mine].to(device), labels=labels.to(device),
        weights=weights.to(device, torch.float32),
    )  # fmt: skip


class Stepper:
    """Executes the training steps of this rank."""

    def __init__(self, part: Part, split: Split, mesh: DeviceMesh, device: torch.device, sequence: int) -> None:
        self._part, self._split, self._mesh, self._device = part, split, mesh, device
        self._schedule = _schedule(part, split, mesh, device, sequence) if split.pp > 1 else None

    def step(self, share: Share, *, lr: float, clip_norm: float | None) -> float:
        """Take a step; returns the loss of the full batch, on every rank."""
        set_lr(self._part.optimizer, lr)
        own = self._backward(share) if self._schedule is None else self._pipelined(share)
        if self._part.tied_weight is not None:
            self._part.tied_weight.add()
        for chunk in self._part.chunks:
            chunk.handle.settle()
        loss = self._total_loss(own)
        if clip_norm is not None:
            self._clip(clip_norm)
        with self._part.chunks[0].handle.stepping():
            self._part.optimizer.step()
        self._part.optimizer.zero_grad()
        return loss

    def _backward(self, share: Share) -> torch.Tensor:
        (chunk,) = self._part.chunks
        own = torch.zeros((), device=self._device)
        many, rows = self._split.micro_batches, self._split.micro_batch
        for index in range(many):
            at = slice(index * rows, (index + 1) * rows)
            with chunk.handle.micro_batch(last=index == many - 1):
                loss = chunk.module(share.input_ids[at], share.labels[at]) * share.weights[index]
                loss.backward()
            own += _local(loss.detach())
            del loss  # it would keep parts of the graph through the next forward pass
        return own

    def _pipelined(self, share: Share) -> torch.Tensor:
        chunks = self._part.chunks
        losses: list[torch.Tensor] = []
        inputs = (share.input_ids,) if chunks[0].module.part.embeds else ()
        last = chunks[-1].module.part.has_head
        named: dict[str, Any] = {"labels": share.labels} if last else {}
        target = share.weights if last else None
        assert self._schedule is not None
        with chunks[-1].handle.losses():
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **named)
        return sum((_local(loss.detach()) for loss in losses), torch.zeros((), device=self._device))

    def _total_loss(self, own: torch.Tensor) -> float:
        """The loss of the full batch, counting each tensor-parallel group once."""
        mine = own.to(torch.float64) * (self._mesh["tp"].get_local_rank() == 0)
        dist.all_reduce(mine)
        return float(mine) / self._split.shards

    def _clip(self, most: float) -> None:
        """Scale all gradients so that their norm over all ranks is at most ``most``.

        Like ``torch.nn.utils.clip_grad_norm_``, which supports neither several meshes nor pipelines.
        """
        trained = [p for group in self._part.optimizer.param_groups for p in group["params"] if p.grad is not None]
        kinds = sharding.by_mesh(trained)
        square = torch.zeros((), device=self._device)
        for kind in sharding.by_mesh(p for p in trained if not self._counted_elsewhere(p)):
            norm = torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])
            square += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        if self._split.pp > 1:
            dist.all_reduce(square, group=self._mesh.get_group("pp"))
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, most, square.sqrt())

    def _counted_elsewhere(self, parameter: torch.Tensor) -> bool:
        """True for a tied embedding and output table on later stages: the first stage counts its gradient."""
        tied_weight = self._part.tied_weight
        return tied_weight is not None and tied_weight.weight is parameter and self._mesh["pp"].get_local_rank() > 0


class _Stage(PipelineStage):
    """PyTorch's stage of a chunk whose weights are sharded by brim's handle, which defers ZeRO's reductions."""

    def __init__(self, chunk: Chunk, module: torch.nn.Module, **settings: Any) -> None:
        super().__init__(module, chunk.index, chunk.of, **settings)
        self._handle = chunk.handle

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if full_backward:
            self._handle.set_last_backward(last=last_backward)
        else:
            self._handle.set_half_backward()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second half of a backward pass; gradients are reduced explicitly after the last one."""
        self._handle.set_half_backward()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if last_backward:
            self._handle.reduce()


class _Wrapped(torch.nn.Module):
    """Hides that a chunk is FSDP's from PyTorch's stage, which would override the handle's settings."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(*inputs, **named)
        return output


def _schedule(part: Part, split: Split, mesh: DeviceMesh, device: torch.device, sequence: int) -> Any:
    """1F1B, interleaved 1F1B where a rank has several chunks, or zero-bubble."""
    group = mesh.get_group("pp")
    tokens = split.between(sequence)
    hidden = torch.empty(split.micro_batch, tokens, part.hidden, dtype=part.dtype, device="meta")
    stages = [
        _Stage(chunk, _Wrapped(chunk.module), device=device, group=group, **_shapes(chunk, split, sequence, hidden))
        for chunk in part.chunks
    ]
    settings: dict[str, Any] = {"n_microbatches": split.micro_batches, "loss_fn": _weighed, "scale_grads": False}
    if split.zero_bubble:
        return ScheduleInterleavedZeroBubble(_as_base(stages), **settings)
    if split.interleave == 1:
        return Schedule1F1B(stages[0], **settings)
    return ScheduleInterleaved1F1B(_as_base(stages), **settings)


def _as_base(stages: Sequence[Any]) -> list[Any]:
    return list(stages)


def _shapes(chunk: Chunk, split: Split, sequence: int, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs and outputs of a stage, so that PyTorch need not run it to infer them."""
    tokens = torch.empty(split.micro_batch, sequence, dtype=torch.long, device="meta")
    inner = hidden.clone().requires_grad_()
    embeds, has_head = chunk.module.part.embeds, chunk.module.part.has_head
    return {
        "input_args": tokens if embeds else inner,
        "output_args": torch.empty((), device="meta", requires_grad=True) if has_head else inner,
    }


def _weighed(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return loss * weight[0]


def _local(loss: torch.Tensor) -> torch.Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
