"""The model that generation is planned for, without its weights, and what a step of it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from brim.core import Hardware
from brim.core.hardware import RAM, VRAM
from brim.measure.probe import probe
from brim.planner import Job
from brim.run.fit.step_memory import Inputs, Observation
from brim.run.generate import plan as generation_plan
from brim.run.generate.depth import Shallow
from brim.run.generate.memory import Sizes, cache_shape, watch_generation
from brim.run.generate.plan import Wanted
from brim.run.plan.choosing import Cut, Need, cuts, job_of
from brim.run.plan.request import Machine
from brim.run.plan.router_file import Routers
from brim.run.timing.block_calls import Calls, Example, calls_of
from brim.run.timing.block_seconds import OUTSIDE, BlockSeconds
from brim.run.timing.block_timing import block_seconds, traced_seconds, triggers
from brim.run.timing.drive_contention import beside_drive
from brim.run.timing.loop_seconds import loop_seconds
from brim.techniques.blocks import Partition
from brim.techniques.experts.technique import EXPERT_SLOTS
from brim.techniques.experts.technique import NAME as EXPERTS
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.weight_streaming import Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A processor that nobody measured: 8 cores that do two products of 8 floats a cycle at 3.5 GHz reach 0.9 Tflop/s, and
# large products come to about two thirds of that. Only prompts and batches depend on it.
_HOST_FLOPS_PER_S = 0.6e12
_HOP_S = 40e-6  # a token's activations to the host and back: two copies that are waited for


class _Chooser(generation_plan._Chooser):
    """Chooses what ``brim generate`` would choose, by seconds that were measured or traced."""

    subject: Subject

    def _need(self, sizes: Sizes, held_bytes: Mapping[str, int]) -> Need:
        if sizes not in self._seen and self.subject.shallow is not None:
            seen = self.subject.shallow.watch(sizes, self._shape)
            if seen is not None:
                self._seen[sizes] = seen
        plain = replace(super()._need(sizes, held_bytes), routers=self.subject.routers)
        if not self.subject.cuts:
            hardware = self.subject.machine.hardware
            self.subject.cuts.extend(cuts(self._module, hardware, plain, self._weights, "generate"))
        return self.subject.paced(plain)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was found out about a model, whatever machine it is planned for."""

    calls: dict[bool, Calls] = field(default_factory=dict)  # by whether it is the prompt's pass
    observations: dict[Sizes, Observation] = field(default_factory=dict)
    shape: list[kv_cache.CacheShape | None] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in one precision. ``module`` has no values; ``spent_bytes`` is the program's own share per tier.

    ``routers``: what those of a mixture of experts were seen to do, where somebody looked. ``shallow``: the model
    with a few of its layers, where they say all.
    """

    name: str
    module: nn.Module
    precision: str
    weights: Weights
    inputs: Inputs
    machine: Machine
    own_precision: str = "fp32"  # that of the configuration
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    routers: Routers = field(default_factory=dict)
    shallow: Shallow | None = field(default=None, compare=False)
    cuts: list[Cut] = field(default_factory=list, compare=False)
    seen: Seen = field(default_factory=Seen, compare=False)

    def on(self, machine: Machine) -> Subject:
        """The same model on another machine."""
        return replace(self, machine=machine, cuts=[])  # how experts are cached depends on it

    @cached_property
    def is_here(self) -> bool:
        """Whether the machine is this one, so that blocks can be timed on it."""
        here, meant = probe(), self.machine.hardware
        return (here.name, here.compute) == (meant.name, meant.compute)

    @property
    def shape(self) -> kv_cache.CacheShape | None:
        """The KV cache that is planned; None: the model keeps its own."""
        if not self.seen.shape:
            self.seen.shape.append(cache_shape(self.module) if self.shallow is None else self.shallow.shape())
        return self.seen.shape[0]

    def choose(self, budget_bytes: Mapping[str, int]) -> tuple[generation_plan.Choice, Need]:
        """As ``brim generate`` under ``budget_bytes``, and the step that it makes. Raises BudgetError."""
        chooser = self._chooser(budget_bytes)
        choice = chooser.choose()
        placement = chooser._placement(choice.sizes, choice.resting)
        held_bytes = placement.held_bytes(self.machine.hardware.compute) if placement else {}
        return choice, chooser._need(choice.sizes, held_bytes)

    def _chooser(self, budget_bytes: Mapping[str, int]) -> _Chooser:
        inputs = self.inputs
        wanted = Wanted(
            lengths=(inputs.prompt,) * inputs.batch, new_tokens=inputs.total - inputs.prompt, batch=inputs.batch
        )
        opened: Any = self  # only its name and its module are looked at
        made = _Chooser(
            opened,
            self.weights,
            self.machine.hardware,
            budget_bytes,
            wanted,
            self.shape,
            lambda: self.spent_bytes,
            lambda sizes: watch_generation(self.module, sizes, self.shape),
        )
        made.subject, made._seen = self, self.seen.observations
        return made

    def job(self, cut: Cut, need: Need) -> Job:
        return job_of(self.module, cut, self.machine.hardware, need, self.weights, "generate")

    def cut(self, choice: generation_plan.Choice) -> Cut:
        """The one that a choice speaks of."""
        settings, experts = choice.plan.settings, choice.plan.choices(EXPERTS)
        fitting = [cut for cut in self.cuts if _same(cut.partition, choice.partition)]
        return next(
            cut
            for cut in fitting
            if not experts
            or (
                cut.way is not None and cut.way.slots == settings[EXPERT_SLOTS] and cut.way.choice in experts.values()
            )
        )

    def paced(self, plain: Need, *, prompt: bool = False) -> Need:
        """``plain`` with seconds of the token's pass, or of the prompt's."""
        hardware = self.machine.hardware
        tokens = self.inputs.batch * (self.inputs.prompt if prompt else 1)
        calls, example = self._calls(prompt), self._example(prompt)

        def seconds(partition: Partition) -> Mapping[str, BlockSeconds]:
            if self.is_here:
                return self._measured(partition, example, calls)
            return traced_seconds(self.module, partition, calls, hardware, tokens=tokens)

        def cpu_seconds(partition: Partition) -> Mapping[str, BlockSeconds]:
            made = traced_seconds(self.module, partition, calls, processor_of(self.machine), tokens=tokens)
            return {name: replace(found, forward_s=found.forward_s + _HOP_S) for name, found in made.items()}

        beside = hardware.compute == VRAM
        return replace(
            plain,
            tokens=tokens,
            seconds=seconds,
            cpu_seconds=cpu_seconds if beside else None,
            cpu_bytes=self._layer_cache_bytes if beside else 0,
            # Temporaries are as large there as in the compute tier, and so at most is what hops over.
            cpu_step_bytes=2 * max(seen.step_bytes for seen in self.seen.observations.values()) if beside else 0,
            beside=beside_drive(hardware, tokens, writes=False) if self.is_here else None,
        )

    def _measured(self, partition: Partition, example: Example, calls: Calls) -> Mapping[str, BlockSeconds]:
        """Of blocks on this machine, and beside them what the loop around the passes takes.

        A pass takes as long however it is cut. What is seen of small parts by themselves (their threads are awake,
        their code is in the cache) is brought to what the large ones take together.
        """

        def timed(one: Partition) -> Mapping[str, BlockSeconds]:
            return block_seconds(self.module, one, example, training=False, calls=calls)

        found = timed(partition)
        whole_s, sum_s = (
            sum(block.forward_s for block in part.values()) for part in (timed(self.cuts[0].partition), found)
        )
        pace = whole_s / sum_s if sum_s else 1.0
        made = {name: replace(block, forward_s=pace * block.forward_s) for name, block in found.items()}
        config: Any = self.module.config
        words = int(getattr(config.get_text_config(decoder=True), "vocab_size", 0) or 0)
        loop_s = loop_seconds(words, self.inputs.batch) if words else 0.0
        return made | {OUTSIDE: replace(made[OUTSIDE], forward_s=made[OUTSIDE].forward_s + loop_s)}

    @property
    def _layer_cache_bytes(self) -> int:
        """The largest part of the KV cache that a block computed by the processor may bring to RAM."""
        if self.shape is None or not self.shape.planned:
            return 0
        return max(layer.token_bytes for _, layer in self.shape.planned) * self.inputs.batch * self.inputs.total

    def _calls(self, prompt: bool) -> Calls:
        """How parts of any partition are called in a pass."""
        if prompt not in self.seen.calls:
            paths = {trigger for cut in self.cuts for trigger in triggers(cut.partition)}
            example = self._example(prompt)
            few = None if self.is_here else self.shallow  # what is timed for real gets the cache of all layers
            made = calls_of(self.module, paths, example) if few is None else few.calls(paths, example)
            self.seen.calls[prompt] = made
        return self.seen.calls[prompt]

    def _example(self, prompt: bool) -> Example:
        if not prompt:
            return self.inputs
        ids = torch.zeros(self.inputs.batch, self.inputs.prompt, dtype=torch.long)
        config: Any = self.module.config
        if config.is_encoder_decoder:
            return {"input_ids": ids, "decoder_input_ids": ids[:, :1]}
        takes = inspect.signature(self.module.forward).parameters
        return {"input_ids": ids, "use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in takes else {})


def _same(one: Partition, other: Partition) -> bool:
    names = [[block.name for block in partition.blocks] for partition in (one, other)]
    return names[0] == names[1] and one.mixed == other.mixed


def processor_of(machine: Machine) -> Hardware:
    """The processor beside the GPU of ``machine``, as a machine of its own."""
    hardware = machine.hardware
    if hardware.compute == RAM:
        return hardware
    here = probe()
    if (here.name, here.compute) == (hardware.name, hardware.compute):
        return probe(device="cpu")
    tiers = tuple(tier for tier in hardware.tiers if tier.name != VRAM)
    links = tuple(link for link in hardware.links if VRAM not in (link.source, link.target))
    rates = {"float32": _HOST_FLOPS_PER_S, "bfloat16": _HOST_FLOPS_PER_S}
    return replace(hardware, compute=RAM, tiers=tiers, links=links, flops_per_s=rates, name=f"{hardware.name}'s host")


__all__ = ["DTYPES", "Seen", "Subject", "processor_of"]
