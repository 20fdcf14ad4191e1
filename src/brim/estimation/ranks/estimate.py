"""``brim estimate --gpus``: memory of every rank of a split training job, and seconds of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from brim import catalog
from brim.core import Category, Hardware, Phase, Storage, Trace
from brim.errors import UnsupportedError, UsageError
from brim.estimation.breakdown import NAMES, at_peak
from brim.estimation.estimate import PeakBytes
from brim.estimation.models import Source, check_not_quantized, find_model
from brim.estimation.ranks import torch_engine
from brim.estimation.ranks.job import DEFAULT_PRECISION, MegatronOptions, ParallelJob, StageFacts
from brim.estimation.ranks.megatron import stages as ranks_megatron
from brim.estimation.ranks.split import ENGINES, Split
from brim.estimation.ranks.time import (
    StageTime,
    StepTime,
    kernels_s,
    node_rate,
    stage_time,
    step_time,
    training_hardware,
)
from brim.estimation.simulation import Place, capability_of, place_of, simulate
from brim.estimation.workload import ASKED, Workload

_DEFAULT_TOKENS = 4096
KEPT = "page_locked_and_free"  # in a breakdown: freed by tensors, cached by the allocator
_LOCKED = (Category.PARAMETER, Category.GRADIENT)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank: its ``coordinates`` in the mesh, peaks as in ``PeakBytes``, and the breakdown of the peak.

    ``breakdown`` sums to ``peak_bytes.process`` without the allocator's slack: tensors by category, the CUDA context
    and NCCL's buffers. ``ram``: the RAM of its shards where they are offloaded.
    """

    rank: int
    coordinates: dict[str, int]
    peak_bytes: PeakBytes
    breakdown: dict[str, int]
    ram: RamPeak | None = None

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        ram = document.pop("ram")
        return document | ({} if ram is None else {"ram_bytes": ram})


@dataclass(frozen=True, kw_only=True)
class ParallelEstimate:
    """Memory and time of a split training step. ``time`` and ``fits`` are None without a GPU.

    ``worst_rank`` is the first of the ranks that allocate most; ``process_bytes`` is the maximum of all ranks'
    processes, possibly of another rank, because allocators fragment differently. ``precision_origin`` is the origin
    of the precision.
    """

    model: str
    engine: str
    workload: Workload
    split: Split
    gpu: str
    ranks: tuple[Rank, ...]
    worst_rank: int
    time: StepTime | None
    fits: bool | None
    flops: int
    notes: tuple[str, ...]
    not_modelled: tuple[str, ...] = ()
    precision_origin: str = ""

    @property
    def worst(self) -> Rank:
        return self.ranks[self.worst_rank]

    @property
    def process_bytes(self) -> int:
        return max(rank.peak_bytes.process for rank in self.ranks)

    @property
    def node_ram_bytes(self) -> int:
        """RAM of the shards on the node with the most; 0 if none are offloaded."""
        each, split = [rank.ram.reserved if rank.ram else 0 for rank in self.ranks], self.split
        return max(sum(each[at : at + split.gpus_per_node]) for at in range(0, split.gpus, split.gpus_per_node))

    @property
    def step_s(self) -> float | None:
        return None if self.time is None else self.time.step_s

    def to_json(self) -> dict[str, Any]:
        split = self.split
        return {
            "peak_bytes": asdict(self.worst.peak_bytes),
            "at_peak_bytes": dict(self.worst.breakdown),
            "worst_rank": self.worst_rank,
            "process_bytes": self.process_bytes,
            "mesh": {name: split.size(name) for name in ("pp", "dp", "cp", "tp", "ep")},
            "micro_batches": split.micro_batches,
            "engine": self.engine,
            "precision": self.workload.precision,
            "precision_origin": self.precision_origin,
            "step_s": self.step_s,
            "seconds": self.time.to_json() if self.time is not None else None,
            "flops": self.flops,
            "not_modelled": list(self.not_modelled),
            "fits": self.fits,
            "ranks": [rank.to_json() for rank in self.ranks],
        } | ({} if not split.offload_shards else {"node_ram_bytes": self.node_ram_bytes})


def estimate_ranks(
    model: str | Path | Callable[[], Any],
    split: Split,
    *,
    engine: str = "torch",
    task: str = "train",
    seq: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    checkpointing: str | None = None,
    gpu: str | catalog.Gpu | None = None,
    vram: str | int | None = None,
    alloc_conf: str = "",
    megatron: MegatronOptions | None = None,
    compiled: bool = False,
    ram_gb_per_s: float | None = None,
) -> ParallelEstimate:
    """Estimate every rank of a training step of ``model`` under ``split``.

    ``engine``: ``torch`` is PyTorch's own (FSDP2, DTensor, pipelining), traced as it will run; ``megatron`` is
    Megatron-LM with Transformer Engine, modelled by its code (bf16 weights, AdamW), with ``megatron`` as the
    options of its own command line. ``compiled``: each block by torch.compile, in ``torch`` only. ``ram_gb_per_s``:
    of a node's RAM, else that of the machine that the GPU is sold in. Ranks that are alike are computed once. Raises
    UsageError for sizes that do not divide, naming the nearest that do, and UnsupportedError for settings that the
    engine lacks.
    """
    if engine not in ENGINES:
        raise UsageError(f"Unknown --engine {engine}.", f"Known: {', '.join(ENGINES)}.")
    if task != "train":
        raise UnsupportedError(
            f"Cannot split the task {task} over several GPUs.",
            "Only training can be split so far.",
            "Use --task train.",
        )
    name, origin = (precision, ASKED) if precision else DEFAULT_PRECISION[engine]
    workload = Workload(
        task=task, batch=split.micro_batch, seq=seq, precision=name, optimizer=optimizer, checkpointing=checkpointing,
    )  # fmt: skip
    place, source = place_of(gpu, vram), find_model(model)
    if precision is None:
        check_not_quantized(source)
    job = _job(source, workload, split, place, megatron=megatron, compiled=compiled)
    stages, notes = (ranks_megatron if engine == "megatron" else torch_engine).stages(job)
    return replace(_assembled(job, engine, stages, place, alloc_conf, notes, ram_gb_per_s), precision_origin=origin)


def _job(
    source: Source,
    workload: Workload,
    split: Split,
    place: Place,
    *,
    megatron: MegatronOptions | None = None,
    compiled: bool = False,
) -> ParallelJob:
    return ParallelJob(
        source=source,
        workload=workload,
        split=split,
        sequence=workload.seq or _tokens(source),
        capability=capability_of(place),
        megatron=megatron or MegatronOptions(),
        compiled=compiled,
    )


def stage_fits(
    model: str | Path | Callable[[], Any], split: Split, stage: int, *, seq: int, gpu: catalog.Gpu, checkpointing: str
) -> bool:  # fmt: skip
    """Return whether the ranks of one pipeline stage fit on ``gpu`` under Megatron-LM: a quick check before all
    ranks. Raises as ``estimate_ranks``."""
    place = place_of(gpu)
    workload = Workload(task="train", batch=split.micro_batch, seq=seq, checkpointing=checkpointing)
    (facts,), _ = ranks_megatron.stages(_job(find_model(model), workload, split, place), only=stage)
    return _memory(facts.trace, place, "", nccl_bytes(split))[0].process <= gpu.capacity_bytes


def _assembled(
    job: ParallelJob, engine: str, stages: Sequence[StageFacts], place: Place, alloc_conf: str,
    notes: tuple[str, ...], ram_gb_per_s: float | None,
) -> ParallelEstimate:  # fmt: skip
    split = job.split
    nccl = nccl_bytes(split)
    of_stage: dict[int, tuple[PeakBytes, dict[str, int], RamPeak | None]] = {}
    for facts in stages:
        if id(facts) not in of_stage:
            ram = ram_peak(facts.ram) if split.offload_shards else None
            of_stage[id(facts)] = (*_memory(facts.trace, place, alloc_conf, nccl), ram)
    ranks = []
    for number in range(split.gpus):
        coordinates = split.coordinates(number)
        peak, breakdown, ram = of_stage[id(stages[coordinates["pp"]])]
        ranks.append(Rank(rank=number, coordinates=coordinates, peak_bytes=peak, breakdown=breakdown, ram=ram))
    worst = max(ranks, key=lambda rank: (rank.peak_bytes.allocated, -rank.rank))
    most = max(rank.peak_bytes.process for rank in ranks)
    time, told = _time(stages, split, place, None if ram_gb_per_s is None else ram_gb_per_s * 1e9)
    flops = sum(op.flops for facts in stages for op in facts.ops if op.flops)
    context = f"CUDA context of {place.context.bytes:,} B: {place.context.source}"
    if nccl:
        context += f"; NCCL's buffers of {nccl:,} B: {catalog.nccl_source()}"
    return ParallelEstimate(
        model=job.source.name,
        engine=engine,
        workload=job.workload,
        split=split,
        gpu=place.name,
        ranks=tuple(ranks),
        worst_rank=worst.rank,
        time=time,
        fits=None if place.total_bytes is None else most <= place.total_bytes,
        flops=flops * split.micro_batches * split.tp * split.cp * split.dp,
        notes=(*notes, *place.notes, context, *told),
        not_modelled=tuple(sorted({name for facts in stages for name in facts.not_modelled})),
    )


def nccl_bytes(split: Split) -> int:
    return sum(catalog.nccl_bytes(split.size(axis)) for axis in ("tp", "shard", "pp", "cp"))


def _memory(trace: Trace, place: Place, alloc_conf: str, nccl: int) -> tuple[PeakBytes, dict[str, int]]:
    """Peaks in unlimited memory, and their breakdown."""
    endless = Place(
        name=place.name, total_bytes=None, context=place.context, cublas_workspace_bytes=place.cublas_workspace_bytes
    )
    timeline = simulate(trace, endless, alloc_conf)
    breakdown, peaks = at_peak(trace, timeline), timeline.peak_bytes
    peak = PeakBytes(allocated=peaks.allocated, reserved=peaks.reserved, process=peaks.process + nccl)
    beside = {"rounding": breakdown.rounding_bytes, "context": place.context.bytes, "nccl": nccl}
    return peak, breakdown.by_category | beside


def _time(
    stages: Sequence[StageFacts], split: Split, place: Place, ram_bytes_per_s: float | None
) -> tuple[StepTime | None, tuple[str, ...]]:
    if place.name not in catalog.gpu_names():
        return None, ()
    gpu = catalog.gpu(place.name)
    if not (gpu.flops_per_s and gpu.bytes_per_s):
        return None, ()
    hardware, source = training_hardware(gpu)
    times: dict[int, StageTime] = {}
    for facts in stages:
        if id(facts) not in times:
            times[id(facts)] = stage_time(facts, split, gpu, hardware, ram_bytes_per_s=ram_bytes_per_s)
    told = [f"step seconds: {source}"]
    if any(_launches_last(facts, hardware) for facts in stages):
        told.append(
            "bound by launches: kernels end before the host has launched the next ones; larger micro-batches or CUDA "
            "graphs make the step faster"
        )
    if split.offload_shards:
        rate = node_rate(split, gpu, ram_bytes_per_s)
        told.append(f"the RAM of a node moves {rate / 1e9:.0f} GB/s, shared by its ranks")
    return step_time([times[id(facts)] for facts in stages], split), tuple(told)


def _launches_last(facts: StageFacts, hardware: Hardware) -> bool:
    works = (op for op in facts.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD))
    return sum(facts.launches_s) > kernels_s(works, hardware)


def _tokens(source: Source) -> int:
    limit = next(
        (source.config[name] for name in ("max_position_embeddings", "n_positions") if source.config.get(name)),
        _DEFAULT_TOKENS,
    )
    return min(_DEFAULT_TOKENS, int(limit))


@dataclass(frozen=True, kw_only=True)
class RamPeak:
    """``allocated``: bytes of tensors at their peak; ``reserved``: of the memory for them. ``breakdown`` sums to
    ``reserved``."""

    allocated: int
    reserved: int
    breakdown: dict[str, int]


@dataclass(kw_only=True)
class _Ram:
    """Bytes in RAM at a moment, by name; ``free``: cached blocks of page-locked memory, by size."""

    bytes_by_name: dict[str, int] = field(default_factory=dict)
    free: dict[int, int] = field(default_factory=dict)

    def take(self, storage: Storage) -> None:
        size = self._size(storage)
        self._add(NAMES[storage.category], size)
        if storage.category in _LOCKED and self.free.get(size):
            self.free[size] -= 1
            self._add(KEPT, -size)

    def give(self, storage: Storage) -> None:
        size = self._size(storage)
        self._add(NAMES[storage.category], -size)
        if storage.category in _LOCKED:
            self.free[size] = self.free.get(size, 0) + 1
            self._add(KEPT, size)

    def _size(self, storage: Storage) -> int:
        return locked_bytes(storage.bytes) if storage.category in _LOCKED else storage.bytes

    def _add(self, name: str, bytes: int) -> None:
        self.bytes_by_name[name] = self.bytes_by_name.get(name, 0) + bytes


def ram_peak(storages: Iterable[Storage]) -> RamPeak:
    """The peak of storages in the RAM of ranks with GPUs.

    FSDP2 keeps shards and their gradients page-locked there, each in an allocation of its own. PyTorch's allocator of
    page-locked memory rounds to powers of two, and caches freed blocks for the next request of the same rounded size
    (aten/src/ATen/core/CachingHostAllocator.h, ``allocate`` and ``maybe_cache_block``).
    """
    changes: list[tuple[int, bool, Storage]] = []
    for storage in storages:
        changes.append((storage.born, True, storage))
        if storage.died is not None:
            changes.append((storage.died, False, storage))
    changes.sort(key=lambda change: change[:2])
    ram, breakdown = _Ram(), dict[str, int]()
    tensors = allocated = reserved = 0
    for _, born, storage in changes:
        (ram.take if born else ram.give)(storage)
        tensors += storage.bytes if born else -storage.bytes
        allocated, now = max(allocated, tensors), sum(ram.bytes_by_name.values())
        if now > reserved:
            reserved, breakdown = now, {name: count for name, count in ram.bytes_by_name.items() if count}
    return RamPeak(allocated=allocated, reserved=reserved, breakdown=breakdown)


def locked_bytes(bytes: int) -> int:
    """Bytes of page-locked memory that a request of ``bytes`` takes."""
    return 1 << (bytes - 1).bit_length() if bytes else 0
