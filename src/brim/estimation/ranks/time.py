"""Seconds of a split training step: kernels by roofline, collectives by their links, the pipeline's bubble."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from brim import catalog
from brim.core import Hardware, Op, Phase
from brim.errors import UsageError
from brim.estimation.ranks.job import StageFacts
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.split import Split
from brim.predict.cost import op_s

_CROSSINGS = ("to_device", "to_ram")

# A product of a group, and its least time: a group of 160 takes 1.38 to 1.46 ms where each has 154 tokens (B200;
# SimuMax, configs/system/b200_bf16_ceperm.json, group_matmul, N 5120 and K 1536: 261 to 282 TFLOP/s, Apache-2.0).
EXPERT_PRODUCT = "aten._grouped_mm.default"
_EXPERT_PRODUCT_S = 9e-6


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """A pipeline rank's seconds per micro-batch (through all its chunks), and once per step.

    ``communicates_s``: of these, seconds of waiting. ``once_s``: gradients' reduction, weights' gathering, the
    optimizer.
    """

    forward_s: float
    backward_s: float
    communicates_s: float
    once_s: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a step's seconds; they add up to ``step_s``."""

    compute_s: float
    communication_s: float
    bubble_s: float
    once_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.bubble_s + self.once_s

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def training_hardware(gpu: catalog.Gpu) -> tuple[Hardware, str]:
    """The GPU at its rate over whole training steps, where that is known, and a note of which rate it is."""
    hardware, rate_and_source = replace(gpu.hardware(), shares={}), catalog.training_rate(gpu)
    if rate_and_source is None:
        return hardware, f"products at the best rate that was measured on {gpu.name}"
    rate, source = rate_and_source
    rates = {**hardware.flops_per_s, "bfloat16": rate, "float16": rate}
    return replace(hardware, flops_per_s=rates), source


def kernels_s(ops: Iterable[Op], hardware: Hardware) -> float:
    return sum(max(op_s(op, hardware), _EXPERT_PRODUCT_S if op.name == EXPERT_PRODUCT else 0.0) for op in ops)


def sent_s(sent: Sent, split: Split, network: catalog.Network) -> float:
    """Seconds of one collective as a ring, of one message to the next pipeline rank, or of an all-to-all: each rank
    sends the others their parts, those in other nodes through its own share of the network."""
    ranks = split.size(sent.axis)
    if ranks == 1 or not sent.bytes:
        return 0.0
    per_node = split.per_node(sent.axis)
    if sent.kind == "all_to_all":
        inside_s = (per_node - 1) / ranks / (network.node_bytes_per_s * network.all_to_all_share)
        outside_s = (ranks - per_node) / ranks / network.network_bytes_per_s
        return network.latency_s + sent.bytes * max(inside_s, outside_s)
    rate = network.bytes_per_s(per_node, crosses=per_node < ranks)
    if sent.kind == "send":
        return network.latency_s + sent.bytes / rate
    turns = 2 if sent.kind == "all_reduce" else 1
    return network.latency_s + turns * sent.bytes * (ranks - 1) / ranks / rate


def crossed_s(sent: Sent, gpu: catalog.Gpu) -> float:
    """Seconds of a shard's copy between page-locked RAM and the GPU. Raises UsageError where no rate is known."""
    link_bytes_per_s = catalog.host_of(gpu).link_bytes_per_s
    if not link_bytes_per_s:
        raise UsageError(
            f"Cannot predict shards in RAM with {gpu.name}.", "The rate of its link to the host is not known.",
            "Name another GPU.",
        )  # fmt: skip
    return sent.bytes / link_bytes_per_s


def node_rate(split: Split, gpu: catalog.Gpu, ram_bytes_per_s: float | None) -> float:
    """A node's bytes per second of RAM: those given, else those of the machine that the GPU is sold in."""
    if ram_bytes_per_s is not None:
        return ram_bytes_per_s
    return catalog.host_of(gpu).rate_of(min(split.gpus, split.gpus_per_node))


def host_s(ops: Iterable[Op], split: Split, ram_bytes_per_s: float) -> float:
    """Seconds of the CPU's work on shards in RAM: their bytes at its rate, which a node's ranks share."""
    rate = ram_bytes_per_s / min(split.gpus, split.gpus_per_node)
    return sum(op.read_bytes + op.written_bytes for op in ops) / rate


def all_sent_s(sent: Iterable[Sent], split: Split, gpu: catalog.Gpu) -> float:
    network = catalog.network(gpu)
    return sum(
        crossed_s(each, gpu) if each.kind in _CROSSINGS else sent_s(each, split, network) for each in sent
    )  # fmt: skip


def stage_time(
    facts: StageFacts, split: Split, gpu: catalog.Gpu, hardware: Hardware, *, ram_bytes_per_s: float | None = None
) -> StageTime:
    """Time a pipeline rank from the kernels and collectives of one micro-batch, the optimizer's kernels, and the
    communication once a step.

    Within a micro-batch tensor-parallel collectives and kernels wait for each other. FSDP2 gathers the next block's
    weights, and reduces the last one's gradients, while a block computes: only the excess over the kernels counts.
    Shards in RAM are copied in the same turn, on the same streams; the CPU adds gradients of several micro-batches,
    for which FSDP2 waits, and takes the optimizer's step, at ``ram_bytes_per_s``. Kernels that end before the host
    has launched the next take as long as the launches.
    """
    ops, in_ram, rate = facts.ops, facts.in_ram, node_rate(split, gpu, ram_bytes_per_s)
    seconds, waits = {}, 0.0
    for phase, launches_s in zip((Phase.FORWARD, Phase.BACKWARD), facts.launches_s, strict=True):
        own = [each for each in facts.sent if each.phase is phase]
        works = max(kernels_s((op for op in ops if op.phase is phase), hardware), launches_s)
        adds = host_s((op for op in in_ram if op.phase is phase), split, rate)
        hidden = [each.axis == "shard" and not (adds and each.kind == "to_ram") for each in own]
        waited = adds + all_sent_s((each for each, hides in zip(own, hidden, strict=True) if not hides), split, gpu)
        beside = all_sent_s((each for each, hides in zip(own, hidden, strict=True) if hides), split, gpu)
        waited += max(beside - works - waited, 0.0)
        seconds[phase], waits = works + waited, waits + waited
    optimizer_s = kernels_s((op for op in ops if op.phase is Phase.OPTIMIZER), hardware)
    optimizer_s += host_s((op for op in in_ram if op.phase is Phase.OPTIMIZER), split, rate)
    return StageTime(
        forward_s=seconds[Phase.FORWARD],
        backward_s=seconds[Phase.BACKWARD],
        communicates_s=waits,
        once_s=optimizer_s + all_sent_s(facts.once, split, gpu),
    )


def step_time(stages: Sequence[StageTime], split: Split) -> StepTime:
    """A step of all pipeline ranks: the slowest works through all micro-batches, the others' first and last one are
    its bubble (1F1B, Narayanan et al., arXiv 2104.04473), divided by the chunks where stages interleave."""
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
