"""Seconds of a split training step: kernels by roofline, collectives by their links, the pipeline's bubble."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from brim import catalog
from brim.core import Hardware, Op, Phase
from brim.estimation.parallel import Split
from brim.estimation.parallel_script import Sent
from brim.predict.cost import op_s


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """One pipeline rank's seconds per micro-batch (through all its chunks), and once per step.

    ``communicates_s`` of them it waits for others. ``once_s``: gradients' reduction, weights' gathering, the
    optimizer.
    """

    forward_s: float
    backward_s: float
    communicates_s: float
    once_s: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where a step's seconds go: they add up to ``step_s``."""

    compute_s: float
    communication_s: float
    bubble_s: float
    once_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.bubble_s + self.once_s

    def to_json(self) -> dict[str, float]:
        return {
            "compute_s": self.compute_s, "communication_s": self.communication_s, "bubble_s": self.bubble_s,
            "once_s": self.once_s,
        }  # fmt: skip


def training_hardware(gpu: catalog.Gpu) -> tuple[Hardware, str]:
    """The GPU at the rate that it holds over whole training steps where that is known, and what was taken."""
    hardware, known = gpu.hardware(), catalog.training_rate(gpu)
    if known is None:
        return hardware, f"products at the best rate that was measured on {gpu.name}"
    rate, source = known
    rates = {**hardware.flops_per_s, "bfloat16": rate, "float16": rate}
    return replace(hardware, flops_per_s=rates), source


def kernels_s(ops: Iterable[Op], hardware: Hardware) -> float:
    return sum(op_s(op, hardware) for op in ops)


def sent_s(sent: Sent, split: Split, network: catalog.Network) -> float:
    """Seconds of one collective as a ring, or of one message to the next pipeline rank."""
    ranks = split.size(sent.axis)
    if ranks == 1 or not sent.bytes:
        return 0.0
    per_node = split.per_node(sent.axis)
    rate = network.bytes_per_s(per_node, crosses=per_node < ranks)
    if sent.kind == "send":
        return network.latency_s + sent.bytes / rate
    turns = 2 if sent.kind == "all_reduce" else 1
    return network.latency_s + turns * sent.bytes * (ranks - 1) / ranks / rate


def all_sent_s(sent: Iterable[Sent], split: Split, network: catalog.Network) -> float:
    return sum(sent_s(each, split, network) for each in sent)


def stage_time(
    ops: Sequence[Op], sent: Sequence[Sent], once: Sequence[Sent], split: Split, gpu: catalog.Gpu, hardware: Hardware
) -> StageTime:
    """From the kernels and collectives of one micro-batch, the optimizer's kernels, and what is sent once a step.

    Within a micro-batch tensor-parallel collectives wait for what they need and are waited for. FSDP2 gathers the
    next block's weights, and reduces the last one's gradients, while a block computes: only what is longer than the
    kernels shows.
    """
    network = catalog.network(gpu)
    seconds, waits = {}, 0.0
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        own = [each for each in sent if each.phase is phase]
        works = kernels_s((op for op in ops if op.phase is phase), hardware)
        waited = all_sent_s((each for each in own if each.axis != "shard"), split, network)
        beside = all_sent_s((each for each in own if each.axis == "shard"), split, network)
        waited += max(beside - works - waited, 0.0)
        seconds[phase], waits = works + waited, waits + waited
    optimizer_s = kernels_s((op for op in ops if op.phase is Phase.OPTIMIZER), hardware)
    return StageTime(
        forward_s=seconds[Phase.FORWARD],
        backward_s=seconds[Phase.BACKWARD],
        communicates_s=waits,
        once_s=optimizer_s + all_sent_s(once, split, network),
    )


def step_time(stages: Sequence[StageTime], split: Split) -> StepTime:
    """A step of all pipeline ranks: the slowest works through all micro-batches, the others' first and last one are
    its bubble (1F1B, Narayanan et al., arXiv 2104.04473), shorter by the number of chunks where stages interleave."""
    slowest = max(stages, key=lambda stage: stage.forward_s + stage.backward_s)
    busy = slowest.forward_s + slowest.backward_s
    others = sum(stage.forward_s + stage.backward_s for stage in stages) - busy
    waits = slowest.communicates_s * split.micro_batches
    return StepTime(
        compute_s=busy * split.micro_batches - waits,
        communication_s=waits,
        bubble_s=others / split.interleave,
        once_s=max(stage.once_s for stage in stages),
    )
