"""Find the fastest plan that fits over all cuts of a model into blocks, and build the solver's jobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import nn

from brim.allocator.config import SMALL_SEGMENT_BYTES
from brim.core import Hardware, Plan
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError
from brim.estimation.step_memory import Observation
from brim.memory.checkpoint_files import TensorSource
from brim.memory.direct_io import bounce_bytes
from brim.memory.layout import BlockLayout, file_layout, packed_layout, staged_layout
from brim.planning.inference.expert_plans import ExpertPlan, expert_plans
from brim.planning.inference.machine import predict
from brim.planning.proof import (
    ENDLESS_BYTES,
    Bytes,
    in_words,
    over_bytes,
    plan_or_smallest_budget,
    prove_within,
    raise_promise,
    refusal,
    search,
)  # fmt: skip
from brim.planning.seconds.block_seconds import OUTSIDE, BlockSeconds
from brim.planning.seconds.expert_reading import reading
from brim.planning.solver import BlockCost, Job
from brim.planning.solver.streaming import CHOICES, Contender, contender
from brim.predict.cost import flops_per_s
from brim.techniques.blocks import Block, Partition, find_blocks, tensor_bytes
from brim.techniques.streaming.placement import COMPUTE_RAM, computable
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import RESIDENT, Weights

_IN_MODULE = Weights()
P = TypeVar("P", bound="Placed")
_TOO_FINE = 1.05  # times the seconds of the best cut: hooks cost more from there on than smaller slots bring
_HOOKS_S = 60e-6  # two hooks, a slot's hand-over and a request; an estimate, not a measurement


@dataclass(frozen=True, kw_only=True)
class Need:
    """A step's bytes beside the blocks, and its computation.

    With an ``observation`` blocks are cut down to the modules that were called; without it, only at containers.
    Parameters in ``stay`` are not streamed. ``seconds`` gives a partition's measured seconds (``block_timing``) in
    place of those by rates; ``cpu_seconds`` those of a processor beside the GPU that may compute blocks in RAM, with
    ``cpu_bytes`` for each block and ``cpu_step_bytes`` during its computation. ``cache_experts``: in inference, a
    mixture's experts may be loaded one by one. ``shares``: the share
    of steps that call a child of the model, by its name; 1 for all others.
    """

    step_bytes: int
    observation: Observation | None = None
    tokens: int = 1
    stay: frozenset[str] = frozenset()
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Callable[[Partition], Mapping[str, BlockSeconds]] | None = None
    cpu_seconds: Callable[[Partition], Mapping[str, BlockSeconds]] | None = None
    cpu_bytes: int = 0
    cpu_step_bytes: int = 0
    cache_experts: bool = True
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model cut into blocks. ``experts`` is the plan of their cache; None: they are moved with their layer."""

    partition: Partition
    experts: ExpertPlan | None = None

    @property
    def kind(self) -> tuple[int, bool]:
        """The number of blocks, and True where experts are cached."""
        return len(self.partition.blocks), self.experts is not None


def cuts(model: nn.Module, hardware: Hardware, need: Need, weights: Weights, task: str) -> Iterator[Cut]:
    """Yield cuts from the module tree's blocks down to the smallest modules that can be moved alone."""
    parameters = dict(model.named_parameters())
    partitions_of: dict[frozenset[str], list[Partition]] = {}

    def plans() -> Iterator[ExpertPlan | None]:
        yield None
        if need.cache_experts and task != "train":
            yield from expert_plans(model, hardware, lambda name: source_of(name, parameters[name], weights))

    for experts in plans():
        names = frozenset() if experts is None else experts.names
        candidates: Iterable[Partition] = partitions_of.get(names) or partitions(
            model, replace(need, stay=need.stay | names), weights
        )
        kept = partitions_of[names] = []  # most expert plans differ in slots only
        for partition in candidates:  # generated on demand
            kept.append(partition)
            yield Cut(partition=partition if experts is None else experts.partition(partition), experts=experts)


class KnownCuts:
    """A model's cuts into blocks, coarse ones first, generated on demand and cached."""

    def __init__(self, cuts: Iterator[Cut]) -> None:
        self._rest, self._known = cuts, list[Cut]()

    def __iter__(self) -> Iterator[Cut]:
        for index in itertools.count():
            self._known += itertools.islice(self._rest, int(index == len(self._known)))
            if index == len(self._known):
                return
            yield self._known[index]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A proved placement of a model's blocks."""

    cut: Cut
    plan: Plan

    @property
    def partition(self) -> Partition:
        return self.cut.partition


@dataclass(frozen=True, kw_only=True)
class InferenceCase:
    """A model that is run forward, its machine and its budgets."""

    task: ClassVar[str] = "forward"
    name: str
    module: nn.Module
    weights: Weights
    hardware: Hardware
    budget_bytes: Mapping[str, int]

    def cuts(self, need: Need) -> KnownCuts:
        return KnownCuts(cuts(self.module, self.hardware, need, self.weights, self.task))

    def job(self, cut: Cut, need: Need) -> Job:
        return job_of(self.module, cut, self.hardware, need, self.weights, self.task)

    def place(self, need: Need, cuts: KnownCuts) -> Placed:
        """Return the fastest placement that is proved to fit. Raises BudgetError when none is."""

        def attempt(budget: Bytes) -> tuple[Cut, Plan]:
            jobs = ((cut, self.job(cut, need)) for cut in cuts)
            return best_plan(jobs, self.hardware, budget, tokens=need.tokens)

        def takes(planned: tuple[Cut, Plan]) -> Bytes:
            return self.pool_bytes(*planned, self.job(planned[0], need))

        budget = self.budget_bytes
        (cut, plan), taken = prove_within(budget, attempt, takes, refusal(self.name, budget))
        return Placed(cut=cut, plan=raise_promise(plan, taken, budget))

    def pool_bytes(self, cut: Cut, plan: Plan, job: Job) -> dict[str, int]:
        """Return a run's bytes per tier, by applying the plan to the model on fake memory.

        The model is not copied, as not every model can be, and is left as it was.
        """
        endless = replace(plan, budget_bytes=dict.fromkeys(plan.budget_bytes, ENDLESS_BYTES))
        handle = predict(self.module, cut.partition, endless, self.hardware, self.weights)
        try:
            pools = [handle.memory.compute, *([handle.memory.host] if handle.memory.host else [])]
            pool_bytes = {pool.tier: pool.peak_bytes for pool in pools}
        finally:
            handle.remove()
        beside = {self.hardware.compute: job.step_bytes}
        choices = plan.choices(STREAMING)
        if COMPUTE_RAM in choices.values():
            beside[RAM] = job.cpu_step_bytes + sum(
                block.cpu_bytes for block in job.blocks if choices[block.name] == COMPUTE_RAM
            )
        return {tier: n + beside.get(tier, 0) + job.overhead_bytes(tier) for tier, n in pool_bytes.items()}


def within_reserved(
    case: InferenceCase, attempt: Callable[[Bytes], P], reserved: Callable[[P, int], int], *, exact: bool = False
) -> P:
    """Return a plan under which all bytes of VRAM that PyTorch's allocator reserves stay within the budget.

    ``attempt`` plans within a budget, which is lowered until the bytes that ``reserved`` predicts for a plan and a
    limit of VRAM fit. ``exact``: they are the promise, also where the plan's own estimate is larger. Raises
    BudgetError with the smallest budget.
    """

    def planned(budget: Bytes) -> P:
        def takes(placed: P) -> Bytes:
            return {VRAM: reserved(placed, budget[VRAM])}

        refuse = refusal(case.name, budget)
        placed, taken = prove_within(budget, attempt, takes, refuse, grain_bytes=SMALL_SEGMENT_BYTES)
        plan = raise_promise(placed.plan, taken, budget)
        if exact:
            plan = replace(plan, promise=replace(plan.promise, peak_bytes={**plan.promise.peak_bytes, **taken}))
        return replace(placed, plan=plan)

    def refuse(smallest: Bytes) -> BudgetError:
        return BudgetError(
            f"Cannot run {case.name} in {in_words(case.budget_bytes)}.",
            f"The smallest plan takes {in_words(smallest)}, including the bytes that PyTorch and cuBLAS hold.",
            f"Give {in_words(smallest)} or more, or a shorter input.",
            smallest_bytes=dict(smallest),
        )

    placed = plan_or_smallest_budget(planned, lambda p: p.plan.promise.peak_bytes, case.budget_bytes, refuse)
    return replace(placed, plan=replace(placed.plan, budget_bytes=dict(case.budget_bytes)))


def make_plan(
    model: nn.Module,
    hardware: Hardware,
    budget: Mapping[str, int],
    need: Need,
    weights: Weights,
    *,
    task: str,
    allowed: Collection[str] = CHOICES,
) -> tuple[Partition, Plan]:
    """Return the fastest plan over partitions from coarse to fine, and its partition.

    Finer blocks need smaller slots, so more of the model stays resident, but each costs hooks. A mixture's experts
    are moved with their layer, or cached one by one. Only placements in ``allowed`` are used. Raises BudgetError when
    nothing fits.
    """
    candidates = cuts(model, hardware, need, weights, task)
    jobs = ((cut, job_of(model, cut, hardware, need, weights, task)) for cut in candidates)
    cut, plan = best_plan(jobs, hardware, budget, tokens=need.tokens, allowed=allowed)
    return cut.partition, plan


def best_plan(
    jobs: Iterable[tuple[Cut, Job]],
    hardware: Hardware,
    budget: Mapping[str, int],
    *,
    tokens: int,
    allowed: Collection[str] = CHOICES,
) -> tuple[Cut, Plan]:
    """Return the fastest plan; of equal ones, that of the fewest moved bytes. Raises BudgetError when none fits."""
    contenders: list[tuple[Cut, Contender]] = []

    def seconds(cut: Cut) -> list[float]:
        return [p.plan.promise.step_s for c, p in contenders if c.experts is cut.experts]

    def candidates() -> Iterator[tuple[Cut, Job]]:
        for candidate in jobs:
            known_s = seconds(candidate[0])
            if known_s and known_s[-1] > _TOO_FINE * min(known_s):
                continue  # to the next plan of experts
            yield candidate
            if contenders:
                cut, planned = contenders[-1]
                if cut.experts is None and set(planned.plan.choices(STREAMING).values()) <= {RESIDENT}:
                    return  # finer blocks and cached experts only cost more

    def attempt(candidate: tuple[Cut, Job]) -> tuple[Cut, Contender]:
        cut, job = candidate
        known_s = min([] if cut.experts else seconds(cut), default=float("inf"))
        planned = contender(job, hardware, budget, allowed=allowed, known_s=known_s)
        if cut.experts is None:
            return cut, planned
        plan = cut.experts.plan(planned.plan, hardware, tokens)
        peaks = plan.promise.peak_bytes
        over = {tier: peaks[tier] for tier in over_bytes(peaks, budget)}
        if over:  # the solver does not know the slots of experts
            raise _over(plan, over)
        moved_bytes = planned.moved_bytes + cut.experts.moved_bytes(hardware, tokens)
        return cut, replace(planned, plan=plan, moved_bytes=moved_bytes)

    search(candidates(), attempt, results=contenders)
    cut, best = min(contenders, key=lambda pair: pair[1].order())
    return cut, best.plan


def _over(plan: Plan, over: Mapping[str, int]) -> BudgetError:
    return BudgetError(
        f"Cannot run {plan.model} with its experts cached.",
        f"It takes {in_words(over)}.",
        "Give that much or more.",
        smallest_bytes=dict(over),
    )


def partitions(model: nn.Module, need: Need, weights: Weights = _IN_MODULE) -> Iterator[Partition]:
    """Yield partitions from the module tree's blocks down to the smallest modules that can be moved alone.

    Each opens the largest blocks that were not opened yet, and those up to a fifth smaller.
    """
    partition, count, size = find_blocks(model, stay=need.stay), -1, math.inf
    while True:
        if len(partition.blocks) > count:  # parts may be too small to be blocks
            if count >= 0 and need.observation is not None and not need.observation.allows(partition):
                return
            yield _without_unreadable_lookups(partition, weights)
            count = len(partition.blocks)
        smaller = [block.bytes for block in partition.blocks if block.bytes < size]
        if not smaller:
            return
        size = min(size for size in smaller if size >= 0.8 * max(smaller))
        partition = find_blocks(model, largest_bytes=size - 1, cut_parts=need.observation is not None, stay=need.stay)


def _without_unreadable_lookups(partition: Partition, weights: Weights) -> Partition:
    """Clear look-ups of blocks whose mapped file is not the table: such blocks are loaded."""

    def checked(block: Block) -> Block:
        stored = [weights.sources[name] for name in block.tensors if name in weights.sources]
        return block if all(source.is_mappable for source in stored) else replace(block, lookups=())

    return replace(partition, blocks=tuple(checked(block) for block in partition.blocks))


def job_of(model: nn.Module, cut: Cut, hardware: Hardware, need: Need, weights: Weights, task: str) -> Job:
    """Return the job of a cut; cached experts count as fixed bytes."""
    job = make_job(model, cut.partition, hardware, need, weights, task)
    if cut.experts is None:
        return job
    with_slots = cut.experts.job(job, hardware, need.tokens, rate_of(model, hardware))
    # Measured seconds are those of whole layers, their experts included.
    return with_slots if need.seconds is None else replace(with_slots, fixed_compute_s=job.fixed_compute_s)


def make_job(
    model: nn.Module, partition: Partition, hardware: Hardware, need: Need, weights: Weights, task: str
) -> Job:
    """Return the job of placing the blocks of ``partition``, with their seconds and the bytes beside them."""
    in_ram = hardware.compute == RAM
    parameters = dict(model.named_parameters())
    measured = {} if need.seconds is None else need.seconds(partition)
    lay_out = file_layout if in_ram and weights.sources else packed_layout
    layouts = [lay_out([source_of(n, parameters[n], weights) for n in block.tensors]) for block in partition.blocks]
    fixed = _fixed_layouts([source_of(name, parameters[name], weights) for name in partition.loose], in_ram)
    buffers = sum(tensor_bytes(buffer) for buffer in model.buffers())
    passes = weights.sources and not in_ram  # residents go through RAM, one at a time
    return Job(
        model=type(model).__name__,
        task=task,
        blocks=_block_costs(_Work(model, hardware, need), partition, need, layouts, measured, staged=not in_ram),
        fixed_bytes=sum(layout.bytes for layout in fixed) + buffers,
        step_bytes=need.step_bytes,
        fixed_compute_s=measured[OUTSIDE].forward_s if measured else 0.0,
        spent_bytes=need.spent_bytes,
        bounce_bytes=max((bounce_bytes(layout.runs) for layout in (*layouts, *fixed)), default=0),
        passage_bytes=max(staged_layout(layout).bytes for layout in (*layouts, *fixed)) if passes else 0,
        cpu_step_bytes=need.cpu_step_bytes,
    )


def _block_costs(
    works: _Work,
    partition: Partition,
    need: Need,
    layouts: Sequence[BlockLayout],
    measured: Mapping[str, BlockSeconds],
    *,
    staged: bool,
) -> list[BlockCost]:
    """Return the costs of blocks. ``measured``: seconds by block name; empty: the machine's rates are used.
    ``staged``: blocks on disk pass through RAM."""
    on_cpu = {} if need.cpu_seconds is None else need.cpu_seconds(partition)
    able, costs = computable(partition), []
    for block, layout in zip(partition.blocks, layouts, strict=True):
        uses = len([trigger for trigger in block.triggers if trigger not in block.lookups])
        costs.append(
            BlockCost(
                name=block.name,
                bytes=layout.bytes,
                uses=uses,
                compute_s=measured[block.name].forward_s if measured else works.seconds(block) * bool(uses),
                overhead_s=_HOOKS_S * uses,
                cpu_s=on_cpu[block.name].forward_s if on_cpu and block.name in able else 0.0,
                cpu_bytes=need.cpu_bytes,
                likely=works.likely(block),
                staged_bytes=staged_layout(layout).bytes if staged else 0,
            )
        )
    return costs


class _Work:
    """Blocks' seconds by the machine's rates: the longer of arithmetic and reading weights."""

    def __init__(self, model: nn.Module, hardware: Hardware, need: Need) -> None:
        self._parameters, self._tokens = dict(model.named_parameters()), need.tokens
        self._read, self._shares, self._observation = reading(model, need.tokens), need.shares, need.observation
        self._bytes_per_s = hardware.tier(hardware.compute).bytes_per_s
        self._flops_per_s = rate_of(model, hardware)

    def seconds(self, block: Block) -> float:
        flops = read_bytes = 0.0
        for name in block.tensors:
            parameter, reading = self._parameters[name], self._read.get(name)
            flops += 2 * self._tokens * parameter.numel() * (reading.per_token if reading else 1.0)
            read_bytes += tensor_bytes(parameter) * (reading.share if reading else 1.0)
        return max(flops / self._flops_per_s, read_bytes / self._bytes_per_s)

    def likely(self, block: Block) -> float:
        """Return the probability that a step calls a block; below 1 for an expert that is a module of its own, and
        for a model that is called in few steps."""
        share = max(self._shares.get(trigger.partition(".")[0], 1.0) for trigger in block.triggers)
        readings = [self._read.get(name) for name in block.tensors]
        alone = {reading.expert for reading in readings if reading is not None}
        if len(alone) != 1 or None in readings or None in alone:
            called = self._observation is None or not self._observation.uses.keys().isdisjoint(block.tensors)
            return share if called else 0.0
        return share * max(reading.share for reading in readings if reading is not None)


def rate_of(model: nn.Module, hardware: Hardware) -> float:
    """Return the FLOPs per second in the model's dtype."""
    return flops_per_s(hardware, str(_dtype(model)).removeprefix("torch."))


def _fixed_layouts(loose: Sequence[TensorSource], in_ram: bool) -> list[BlockLayout]:
    """Return the layouts of loose parameters in the compute tier: of those in files, and of those in the module."""
    stored = [source for source in loose if source.extents]
    present = [source for source in loose if not source.extents]
    layouts = [(file_layout if in_ram else packed_layout)(stored)] if stored else []
    return layouts + ([packed_layout(present)] if present else [])


def source_of(name: str, parameter: nn.Parameter, weights: Weights) -> TensorSource:
    """Return the source of a parameter's values: its files, or none where they are in the module."""
    if name in weights.sources:
        return weights.sources[name]
    return TensorSource(name=name, dtype=parameter.dtype, shape=tuple(parameter.shape), extents=())


def _dtype(model: nn.Module) -> torch.dtype:
    # Quantized values (a byte or less) are multiplied in a wider dtype.
    wide = [p for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    largest = max(wide, key=lambda p: p.numel(), default=None)
    return torch.float32 if largest is None else largest.dtype
