"""Meshes under PyTorch's own engine, which ``brim train`` runs: ZeRO's stages, zero-bubble pipelines, and the rest.

Seconds by the same pieces as ``meshes``: PyTorch's kernels are fused less, so that hardly any way takes less than
these say. Bytes are estimates from what FSDP2 holds of a parameter. Every way that may be the fastest is then traced
rank by rank (``meshes_offload.best``), and tells how far estimates of its like are off.
"""

from __future__ import annotations

from dataclasses import replace

from brim import catalog
from brim.core import Phase
from brim.errors import UsageError
from brim.estimation.parallel import Split, in_flight
from brim.estimation.parallel_script import Sent
from brim.estimation.parallel_shape import Shape
from brim.estimation.parallel_time import StepTime, sent_s
from brim.planner.meshes import SEQUENCES_PER_GPU, Costs, Ends, Mesh, Pieces, nccl_bytes
from brim.planner.meshes_splits import run_splits

DOUBT = 0.05  # of seconds that are expected of a way whose like was proved
_WIDTH = 2  # bytes of a weight that computes
_RESTS = 12  # of a parameter in float32: the weight and two moments, which ZeRO splits
_GRADIENT = 4
# Bytes of a parameter that PyTorch's AdamW goes through, one operation after the other (torch/optim/adam.py,
# _multi_tensor_adam): lerp takes 12, addcmul and addcdiv 16 each; decay, scale, root, division and addition 8 each.
_STEPPED = 84
_LOGIT = 12  # of a logit: in bfloat16, in float32, and both gradients of that


def run_meshes(
    shape: Shape, *, gpus: int, gpus_per_node: int, gpu: catalog.Gpu, sequence: int, global_batch: int = 0
) -> list[Mesh]:
    """The meshes that divide and that ``brim train`` takes, the fastest first, with an estimate of their bytes.

    Raises UsageError where nothing divides.
    """
    batch = global_batch or SEQUENCES_PER_GPU * gpus
    pieces = _Traced(shape, gpu, sequence)
    found = [
        mesh for split in run_splits(shape, gpus, gpus_per_node, sequence, batch) for mesh in pieces.meshes(split)
        if not (split.zero_bubble and mesh.checkpointing != "none")
    ]  # fmt: skip
    if not found:
        raise UsageError(
            f"{shape.name} was to be split over {gpus} GPUs with {batch} sequences a step.",
            "No mesh divides its layers, its heads and the batch.",
            f"Try --global-batch {SEQUENCES_PER_GPU * gpus}.",
        )
    return sorted(found, key=lambda mesh: mesh.step_s)


class _Traced(Pieces):
    """As FSDP2 holds them: what rests is in float32, what computes in bfloat16, gradients are reduced in float32."""

    def named(self, split: Split, layers: tuple[int, ...]) -> Split:
        """PyTorch's engine would deal out layers by itself where it is not told."""
        return replace(split, stage_layers=layers) if split.pp > 1 and split.interleave == 1 else split

    def stage_bytes(self, split: Split, stage: int, ends: Ends, layers: int) -> int:
        whole = split.pp == 1
        beside = ends.beside_parameters[1 if whole else 2, 0 if whole or stage < split.pp - 1 else 1]
        beside *= stage in (0, split.pp - 1)
        count = layers * split.interleave * ends.layer_parameters + beside
        experts = layers * split.interleave * ends.layer_experts
        if split.ep == 1:
            count, experts = count + experts, 0
        held = (_RESTS + _GRADIENT) * (count // split.shards + experts)
        if split.zero < 3:
            held += _WIDTH * count + (_GRADIENT * count if split.zero == 1 and split.micro_batches > 1 else 0)
        else:
            each = ends.layer_parameters + (ends.layer_experts if split.ep == 1 else 0)
            held += 2 * _WIDTH * each + (2 * _WIDTH + _GRADIENT) * beside
        has_head = stage == split.pp - 1
        logits = _LOGIT * split.micro_batch * self.sequence * self.shape.vocabulary // (split.tp * split.cp)
        kept = in_flight(split, stage) * layers * ends.layer_bytes
        return held + kept + has_head * logits + nccl_bytes(split) + self.gpu.context().bytes

    def step(self, split: Split, recompute: str, ends: Ends, layers: tuple[int, ...]) -> StepTime:
        """With the gathering and reducing of every micro-batch, of which what is longer than kernels shows."""
        time = super().step(split, recompute, ends, layers)
        if split.shards == 1 or _puts_off(split):
            return time
        layer = self.costs(split, recompute)[0]
        count = ends.layer_parameters + (ends.layer_experts if split.ep == 1 else 0)
        whole = Sent(kind="all_gather", axis="shard", bytes=_WIDTH * count, phase=Phase.FORWARD)
        summed = Sent(kind="reduce_scatter", axis="shard", bytes=_GRADIENT * count, phase=Phase.BACKWARD)
        once_a_step = split.zero < 3 and split.micro_batches > 1
        gathers = 0.0 if once_a_step else sent_s(whole, split, self.network)
        reduces = sent_s(summed, split, self.network)
        waits = self._longer(gathers, gathers + reduces, layer) * max(layers) * split.interleave
        return replace(time, communication_s=time.communication_s + waits * split.micro_batches)

    def once_s(self, split: Split, count: int, experts: int) -> float:
        """The optimizer's step on this rank's shards, and what is put off to a step's last micro-batch."""
        own = count // split.shards + experts // (split.shards // split.ep)
        stepped = _STEPPED * own / self.hardware.tier(self.hardware.compute).bytes_per_s
        if not _puts_off(split):
            return stepped
        whole = count + (experts if split.ep == 1 else 0)
        sent = (
            Sent(kind="reduce_scatter", axis="shard", bytes=_GRADIENT * whole, phase=Phase.OPTIMIZER),
            Sent(kind="all_gather", axis="shard", bytes=_WIDTH * whole, phase=Phase.OPTIMIZER),
        )
        return stepped + sum(sent_s(each, split, self.network) for each in sent)

    @staticmethod
    def _longer(forward_s: float, backward_s: float, layer: Costs) -> float:
        return max(forward_s - layer.forward_s, 0.0) + max(backward_s - layer.backward_s, 0.0)


def _puts_off(split: Split) -> bool:
    """Whether gradients are reduced behind the last of several micro-batches only."""
    return split.zero == 1 and split.micro_batches > 1
