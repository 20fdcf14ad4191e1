"""Models whose experts are cached one by one, by a plan with so many slots a layer."""

from __future__ import annotations

from torch import nn

from brim.core import Plan
from brim.core.hardware import RAM
from brim.memory.checkpoint_files import TensorSource
from brim.planning.inference.choosing import Need, make_job
from brim.planning.inference.expert_plans import expert_plans
from brim.planning.inference.machine import machine, put_in_force
from brim.techniques.blocks import Partition, find_blocks
from brim.techniques.experts.technique import NAME
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from support.families import size_of
from support.planned import plan_streaming


def planned(model: nn.Module, device: str, choice: str, slots: int, weights: Weights) -> tuple[Partition, Plan]:
    """A plan with so many slots per layer, in a budget that the rest of the model must stream in."""
    hardware, parameters = machine(device), dict(model.named_parameters())  # type: ignore[arg-type]

    def source(name: str) -> TensorSource:
        p = parameters[name]
        return weights.sources.get(name) or TensorSource(name=name, dtype=p.dtype, shape=tuple(p.shape), extents=())

    way = next(w for w in expert_plans(model, hardware, source) if (w.slots, w.choice) == (slots, choice))
    need = Need(step_bytes=0)
    partition = way.partition(find_blocks(model, stay=way.names))
    job = way.job(make_job(model, partition, hardware, need, weights, "generate"), hardware, 1, 1e9)
    rest = sum(block.bytes for block in partition.blocks)
    budget = {hardware.compute: job.fixed_bytes + job.bounce_bytes + int(0.7 * rest) + (64 << 10)}
    budget |= {} if device == "cpu" else {RAM: size_of(model) * 2 + (4 << 20)}
    return partition, way.plan(plan_streaming(job, hardware, budget), hardware, 1)


def fit(model: nn.Module, device: str, choice: str, slots: int, weights: Weights | None = None) -> WeightStreaming:
    weights = weights or Weights()
    partition, plan = planned(model, device, choice, slots, weights)
    assert set(plan.choices(NAME).values()) == {choice}
    return put_in_force(model, partition, plan, machine(device), weights, device)  # type: ignore[arg-type]
