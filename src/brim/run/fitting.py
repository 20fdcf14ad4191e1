"""From a module and a budget to a plan in force: machine, budgets, jobs, pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from brim.core import Hardware, Link, Plan, Tier, Timeline
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, UsageError
from brim.measure.capacity import free_bytes
from brim.measure.probe import probe
from brim.memory.checkpoint_files import TensorSource
from brim.memory.direct_io import bounce_bytes
from brim.memory.layout import BlockLayout, file_layout, packed_layout
from brim.memory.tiers import Memory, cpu_memory, cuda_memory, emulated_memory, fake_memory
from brim.planner import BlockCost, Job, plan_streaming
from brim.run.expert_plans import ExpertWay, expert_ways
from brim.run.step_memory import Observation, watch_example
from brim.techniques.blocks import Block, Partition, find_blocks, tensor_bytes
from brim.techniques.router_statistics import RouterStatistics
from brim.techniques.weight_streaming import Weights, WeightStreaming, apply
from brim.units import format_bytes, parse_bytes

Device = Literal["auto", "cuda", "cpu", "emulated"]
_HOOKS_S = 60e-6  # two hooks, a slot's hand-over and a request; an estimate, not a measurement
_FREE_SHARE = 0.9  # one block too many turns a run into swapping; a tenth stays free


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a step takes beside the blocks, and how much it computes.

    Blocks are cut as finely as modules were seen to call their parts; without an observation, only at containers.
    Parameters in ``stay`` are not streamed. ``cache_experts``: for inference, whether the experts of a mixture may
    come one by one; ``routers``: what their routers were seen to do.
    """

    step_bytes: int
    observation: Observation | None = None
    tokens: int = 1
    stay: frozenset[str] = frozenset()
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    cache_experts: bool = True
    routers: Mapping[str, RouterStatistics] = field(default_factory=dict)


def forward_need(
    model: nn.Module,
    budget: Mapping[str, int],
    hardware: Hardware,
    example: Mapping[str, Any] | Sequence[Any] | None,
    activations: str | int | None,
) -> Need:
    """What a forward pass on ``example`` takes; else ``activations``, or an eighth of the budget."""
    seen = None if example is None else watch_example(model, example)
    if activations is not None:
        step_bytes = parse_bytes(activations)
    else:
        step_bytes = budget[hardware.compute] // 8 if seen is None else seen.step_bytes
    return Need(step_bytes=step_bytes, observation=seen, tokens=1 if example is None else _tokens(example))


def machine(device: Device) -> Hardware:
    """What ``device`` names, measured or remembered."""
    if device != "emulated":
        return probe(device=device)
    return emulated_hardware(probe(device="cpu"))


def emulated_hardware(measured: Hardware) -> Hardware:
    """This machine with a part of its RAM as VRAM."""
    ram = measured.tier(RAM)
    copy = measured.link(RAM, RAM)
    return replace(
        measured,
        name=f"{measured.name}, VRAM emulated",
        compute=VRAM,
        tiers=(Tier(name=VRAM, capacity_bytes=ram.capacity_bytes, bytes_per_s=ram.bytes_per_s), *measured.tiers),
        links=(
            *measured.links,
            Link(source=RAM, target=VRAM, bytes_per_s=copy.bytes_per_s),
            Link(source=VRAM, target=RAM, bytes_per_s=copy.bytes_per_s),
        ),
    )


def budgets(
    hardware: Hardware, vram: str | int | None, ram: str | int | None, device: str = "auto"
) -> dict[str, int]:
    """The budget of every tier that compute or weights use: as given, else what is free less a tenth.

    Where RAM is the compute tier, ``vram`` is its budget too: the smaller of the two holds.
    """
    given = {RAM: ram, VRAM: vram}
    if hardware.compute == RAM:
        amounts = [parse_bytes(value) for value in (vram, ram) if value is not None]
        budget = {RAM: min(amounts) if amounts else int(free_bytes(RAM) * _FREE_SHARE)}
    else:
        on = VRAM if device != "emulated" else RAM
        free = {RAM: free_bytes(RAM), VRAM: free_bytes(on)}
        budget = {
            tier: int(free[tier] * _FREE_SHARE) if value is None else parse_bytes(value)
            for tier, value in given.items()
        }
    for tier, amount in budget.items():
        if amount > hardware.tier(tier).capacity_bytes:
            raise UsageError(
                f"A budget of {format_bytes(amount)} of {tier.upper()} was given.",
                f"This machine has {format_bytes(hardware.tier(tier).capacity_bytes)}.",
                "Give what it has or less.",
            )
    return budget


def make_plan(
    model: nn.Module, hardware: Hardware, budget: Mapping[str, int], need: Need, weights: Weights, *, task: str
) -> tuple[Partition, Plan]:
    """The fastest plan over partitions from coarse to fine, and the partition it speaks of.

    Finer blocks need smaller slots, so more of the model stays; each has its cost in hooks, which is counted.
    Experts of a mixture are moved with their layer, or cached one by one. Raises BudgetError when nothing fits.
    """
    best: tuple[Partition, Plan] | None = None
    refusal: BudgetError | None = None
    for way in _expert_ways(model, hardware, need, weights, task):
        for found in _partitions(model, need, way):
            partition = _without_unreadable_lookups(found, weights)
            try:
                job = make_job(model, partition, hardware, need, weights, task)
                plan = _plan(job, hardware, budget, way, need.tokens, _rate(model, hardware))
            except BudgetError as error:
                refusal = error if refusal is None or _need(error) < _need(refusal) else refusal
                continue
            if best is None or plan.promise.step_s < best[1].promise.step_s:
                best = partition, plan
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _expert_ways(
    model: nn.Module, hardware: Hardware, need: Need, weights: Weights, task: str
) -> Iterator[ExpertWay | None]:
    """None: experts are moved with their layer."""
    yield None
    if need.cache_experts and task != "train":
        parameters = dict(model.named_parameters())
        yield from expert_ways(model, hardware, lambda name: _source(name, parameters[name], weights), need.routers)


def _plan(
    job: Job, hardware: Hardware, budget: Mapping[str, int], way: ExpertWay | None, tokens: int, rate: float
) -> Plan:
    if way is None:
        return plan_streaming(job, hardware, budget)
    rest = plan_streaming(way.job(job, hardware, tokens, rate), hardware, budget)
    return way.plan(rest, hardware, tokens)


def _need(error: BudgetError) -> int:
    return sum(error.smallest_bytes.values())


def _partitions(model: nn.Module, need: Need, way: ExpertWay | None) -> Iterator[Partition]:
    """From the blocks that the module tree suggests down to single modules, as far as they can be moved alone."""
    if way is not None:
        need = replace(need, stay=need.stay | way.names)
    partition: Partition | None = find_blocks(model, stay=need.stay)
    while partition is not None:
        yield partition if way is None else way.partition(partition)
        partition = _finer(model, partition, need)


def _without_unreadable_lookups(partition: Partition, weights: Weights) -> Partition:
    """Rows can be picked from a file only where the file seen as memory is the table; else the block is loaded."""

    def checked(block: Block) -> Block:
        stored = [weights.sources[name] for name in block.tensors if name in weights.sources]
        return block if all(source.is_mappable for source in stored) else replace(block, lookups=())

    return replace(partition, blocks=tuple(checked(block) for block in partition.blocks))


def _finer(model: nn.Module, partition: Partition, need: Need) -> Partition | None:
    """The next finer partition: the largest blocks that can be cut at all, cut."""
    for size in sorted({block.bytes for block in partition.blocks}, reverse=True):
        cut_parts = need.observation is not None
        finer = find_blocks(model, largest_bytes=size - 1, cut_parts=cut_parts, stay=need.stay)
        if len(finer.blocks) > len(partition.blocks):
            return finer if need.observation is None or need.observation.allows(finer) else None
    return None


def make_job(
    model: nn.Module, partition: Partition, hardware: Hardware, need: Need, weights: Weights, task: str
) -> Job:
    in_ram = hardware.compute == RAM
    parameters = dict(model.named_parameters())
    rate = _rate(model, hardware)
    blocks, bounce = [], 0
    for block in partition.blocks:
        sources = [_source(name, parameters[name], weights) for name in block.tensors]
        layout = (file_layout if in_ram and weights.sources else packed_layout)(sources)
        bounce = max(bounce, bounce_bytes(layout.runs))
        uses = len([trigger for trigger in block.triggers if trigger not in block.lookups])
        compute_s = max(
            2 * need.tokens * sum(p.numel() for p in (parameters[n] for n in block.tensors)) / rate,
            block.bytes / hardware.tier(hardware.compute).bytes_per_s,
        )
        blocks.append(
            BlockCost(
                name=block.name,
                bytes=layout.bytes,
                uses=uses,
                compute_s=compute_s * bool(uses),
                overhead_s=_HOOKS_S * uses,
            )
        )
    fixed = _fixed_layouts([_source(name, parameters[name], weights) for name in partition.loose], in_ram)
    buffers = sum(tensor_bytes(buffer) for buffer in model.buffers())
    passes = weights.sources and not in_ram  # residents go through RAM, one at a time
    return Job(
        model=type(model).__name__,
        task=task,
        blocks=blocks,
        fixed_bytes=sum(layout.bytes for layout in fixed) + buffers,
        step_bytes=need.step_bytes,
        spent_bytes=need.spent_bytes,
        bounce_bytes=max([bounce, *(bounce_bytes(layout.runs) for layout in fixed)]),
        passage_bytes=max([b.bytes for b in blocks] + [f.bytes for f in fixed]) if passes else 0,
    )


def _rate(model: nn.Module, hardware: Hardware) -> float:
    """Flops per second in the dtype of the model."""
    name = str(_dtype(model)).removeprefix("torch.")
    return hardware.flops_per_s.get(name, 0.0) or min(hardware.flops_per_s.values())


def _fixed_layouts(loose: Sequence[TensorSource], in_ram: bool) -> list[BlockLayout]:
    """The form that loose parameters take in the compute tier: those in files, and those in the module already."""
    stored = [source for source in loose if source.extents]
    present = [source for source in loose if not source.extents]
    layouts = [(file_layout if in_ram else packed_layout)(stored)] if stored else []
    return layouts + ([packed_layout(present)] if present else [])


def put_in_force(
    model: nn.Module,
    partition: Partition,
    plan: Plan,
    hardware: Hardware,
    weights: Weights,
    device: str,
    *,
    training: bool = False,
) -> WeightStreaming:
    """Apply ``plan`` with real memory."""
    timeline = Timeline(f"{plan.model} {plan.task}", measured=True)
    memory = make_memory(plan, hardware, device, timeline)
    return apply(model, partition, plan, memory, weights, training=training)


def make_memory(plan: Plan, hardware: Hardware, device: str, timeline: Timeline) -> Memory:
    """The pools that ``plan`` was made for, empty."""
    budget = plan.budget_bytes
    if hardware.compute == RAM:
        return cpu_memory(timeline, ram_bytes=budget[RAM])
    if device == "emulated":
        return emulated_memory(timeline, vram_bytes=budget[VRAM], ram_bytes=budget[RAM])
    current = torch.device("cuda", torch.cuda.current_device())
    return cuda_memory(timeline, vram_bytes=budget[VRAM], ram_bytes=budget[RAM], device=current)


def predict(
    model: nn.Module,
    partition: Partition,
    plan: Plan,
    hardware: Hardware,
    weights: Weights,
    *,
    training: bool = False,
) -> WeightStreaming:
    """The same ``apply`` on fake memory: the handle's timeline is what a run will do. Call the model to go on."""
    timeline = Timeline(f"{plan.model} {plan.task}", measured=False)
    memory = fake_memory(
        timeline,
        compute_tier=hardware.compute,
        compute_bytes=plan.budget_bytes[hardware.compute],
        ram_bytes=plan.budget_bytes[RAM],
    )
    return apply(model, partition, plan, memory, weights, training=training)


def _source(name: str, parameter: nn.Parameter, weights: Weights) -> TensorSource:
    if name in weights.sources:
        return weights.sources[name]
    return TensorSource(name=name, dtype=parameter.dtype, shape=tuple(parameter.shape), extents=())


def _dtype(model: nn.Module) -> torch.dtype:
    # What is stored in a byte or less is made wide to be multiplied.
    wide = [p for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    largest = max(wide, key=lambda p: p.numel(), default=None)
    return torch.float32 if largest is None else largest.dtype


def _tokens(example: Mapping[str, Any] | Sequence[Any]) -> int:
    """How many rows a step multiplies weights by: positions of the largest integer input, else its batch."""
    values = example.values() if isinstance(example, Mapping) else example
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    integers = [t.numel() for t in tensors if not t.is_floating_point()]
    return max(integers or [t.shape[0] for t in tensors if t.dim()] or [1])
