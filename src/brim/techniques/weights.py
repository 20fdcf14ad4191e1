"""A plan's decisions on weights: weight streaming with the techniques that serve some of its blocks."""

from __future__ import annotations

from functools import partial

from torch import nn

from brim.core import Plan
from brim.memory.tiers import Memory
from brim.techniques.blocks import Partition
from brim.techniques.cpu_compute.technique import HostCompute
from brim.techniques.experts.technique import CachedExperts, expert_layers
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.placement import COMPUTE_RAM, NAME, MakeCompanion, Weights
from brim.techniques.streaming.weight_streaming import WeightStreaming


def place_weights(
    model: nn.Module, partition: Partition, plan: Plan, memory: Memory, weights: Weights, *, training: bool = False
) -> WeightStreaming:
    """Stream the blocks of ``plan``, compute some on the CPU and cache experts. See ``weight_streaming.apply``."""
    companions: list[MakeCompanion] = []
    if COMPUTE_RAM in plan.choices(NAME).values():
        companions.append(partial(HostCompute, partition=partition))
    layers = expert_layers(model, plan)
    if layers:
        companions.append(partial(CachedExperts, layers=layers))
    return weight_streaming.apply(model, partition, plan, memory, weights, companions, training=training)
