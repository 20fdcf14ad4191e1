"""The model that generation is planned for, without its weights, and what a step of it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Hardware
from brim.core.hardware import RAM, VRAM
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.quiet import quiet
from brim.estimation.steps import Job as Workshop
from brim.estimation.workload import Workload
from brim.measure.probe import probe
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.pool import PAGE_BYTES, round_up
from brim.planner import Job
from brim.run import generation_plan
from brim.run.block_calls import Calls, Example, calls_of
from brim.run.block_timing import BlockSeconds, block_seconds, traced_seconds, triggers
from brim.run.choosing import Cut, Need, cuts, job_of
from brim.run.generation_memory import Sizes, cache_shape
from brim.run.generation_plan import Wanted
from brim.run.inference import SLACK_BYTES, by_parameter, materialize, resident_bytes, spent, warm_up
from brim.run.models import open_model, open_tokenizer, prepare
from brim.run.plan_file import described_source
from brim.run.planning_request import Machine, Request
from brim.run.router_file import Routers, check_routers
from brim.run.step_memory import Inputs, Observation
from brim.techniques import kv_cache
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.experts import EXPERT_SLOTS, find_experts
from brim.techniques.experts import NAME as EXPERTS
from brim.techniques.quantization import quantize_meta
from brim.techniques.weight_streaming import Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a process grows by beside weights and activations on a machine that nobody is at: the module itself, tokenizer
# and libraries' scratch memory take 90 to 150 MB for models of 0.1 to 8 B on a processor; with a GPU its driver keeps
# as much again in host memory.
_IMAGINED_SPENT = {RAM: 256 << 20, VRAM: SLACK_BYTES[VRAM]}
_PRETENDED = "model.safetensors"
# A processor that nobody measured: 8 cores that do two products of 8 floats a cycle at 3.5 GHz reach 0.9 Tflop/s, and
# large products come to about two thirds of that. Only prompts and batches depend on it.
_HOST_FLOPS_PER_S = 0.6e12
_HOP_S = 40e-6  # a token's activations to the host and back: two copies that are waited for


class _Chooser(generation_plan._Chooser):
    """Chooses what ``brim generate`` would choose, by seconds that were measured or traced."""

    subject: Subject

    def _need(self, sizes: Sizes, held_bytes: Mapping[str, int]) -> Need:
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

    ``routers``: what those of a mixture of experts were seen to do, where somebody looked.
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
            self.seen.shape.append(cache_shape(self.module))
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
            opened, self.weights, self.machine.hardware, budget_bytes, wanted, self.shape, self.spent_bytes
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
                return block_seconds(self.module, partition, example, training=False, calls=calls)
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
        )

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
            self.seen.calls[prompt] = calls_of(self.module, paths, self._example(prompt))
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


class Subjects:
    """What was opened for one question and its nearest ones: each model in each precision once.

    ``routers`` are those of ``model``.
    """

    def __init__(self, model: str | Path, routers: Routers | None = None) -> None:
        self._model, self._routers = str(model), dict(routers or {})
        self._known: dict[tuple[object, ...], Subject] = {}

    def open(self, request: Request, machine: Machine, precision: str | None = None) -> Subject:
        """As ``open_subject``."""
        key = (*_asked(request), precision)
        if key not in self._known:
            found = open_subject(request, machine, precision)
            if self._routers and str(request.model) == self._model:
                layers = {layer.path: layer.count for layer in find_experts(found.module) if not layer.modules}
                check_routers(self._routers, layers, found.name)
                found = replace(found, routers=self._routers)
            self._known[key] = found
        found = self._known[key]
        return found if found.machine == machine else found.on(machine)

    def of(self, request: Request) -> list[Subject]:
        """Those that were opened for ``request``."""
        return [found for key, found in self._known.items() if key[:-1] == _asked(request)]


def _asked(request: Request) -> tuple[object, ...]:
    """All that a subject depends on but its precision."""
    return (str(request.model), request.batch, request.seq, request.new_tokens)


def open_subject(request: Request, machine: Machine, precision: str | None = None) -> Subject:
    """The model of ``request`` in ``precision`` (None: its own).

    A folder or .gguf file in its own precision is opened as ``brim generate`` does it. Anything else is made from its
    configuration, its weights taken to lie in one file. Raises UnsupportedError for what does not generate.
    """
    inputs = Inputs(batch=request.batch, prompt=request.seq, total=request.seq + request.new_tokens)
    path = Path(request.model)
    stored = path.suffix.lower() == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors")))
    if stored and precision is None:
        return _opened(request, machine, inputs)
    return _made(request, machine, inputs, precision)


def _opened(request: Request, machine: Machine, inputs: Inputs) -> Subject:
    directory = prepare(request.model)
    start_bytes = resident_bytes()
    with torch.inference_mode(False):
        opened = open_model(directory)
        _check_generates(opened.module, opened.name, inputs)
        materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened))
    subject = Subject(
        name=opened.name,
        module=opened.module,
        precision=precision_of(opened.module),
        own_precision=precision_of(opened.module),
        weights=weights,
        inputs=inputs,
        machine=machine,
    )
    return replace(subject, spent_bytes=_spent(subject, opened, start_bytes))


def _spent(subject: Subject, opened: Any, start_bytes: int) -> Mapping[str, int]:
    """What a run on this machine will have grown by before its first step: the same things are done here."""
    if not subject.is_here:
        return _IMAGINED_SPENT
    try:
        tokenizer = open_tokenizer(opened)
    except ModelError:  # ``brim generate`` will say so; ``brim.load`` needs none
        tokenizer = None
    warm_up(subject.module, subject.machine.hardware, subject.inputs.prompt * subject.inputs.batch)
    subject.seen.shape.append(cache_shape(subject.module))
    found = spent(start_bytes)
    del tokenizer
    return found


def _made(request: Request, machine: Machine, inputs: Inputs, precision: str | None) -> Subject:
    source = described_source(request.model)
    named = str(source.config.get("dtype") or source.config.get("torch_dtype") or "float32").removeprefix("torch.")
    own = next((name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{named}"), "fp32")
    meant = precision or own
    kept = meant if meant in DTYPES else own
    workload = Workload(
        task="generate",
        batch=inputs.batch,
        seq=inputs.prompt,
        new_tokens=inputs.total - inputs.prompt,
        precision="bf16" if kept == "fp16" else kept,
    )
    with quiet(), torch.device("meta"):
        module = Workshop(source, workload).module().to(DTYPES[kept]).eval().requires_grad_(False)
    _check_generates(module, source.name, inputs)
    if meant not in DTYPES:
        quantize_meta(module, meant)
        module.requires_grad_(False)
    _give_shapes(module)
    return Subject(
        name=source.name,
        module=module,
        precision=meant,
        own_precision=own,
        weights=Weights(sources=pretended_sources(module)),
        inputs=inputs,
        machine=machine,
        spent_bytes=_IMAGINED_SPENT,
    )


def _give_shapes(module: nn.Module) -> None:
    """Parameters on meta become parameters on the CPU that hold nothing, as in a model that is about to be loaded."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                known = made.setdefault(id(parameter), nn.Parameter(empty, requires_grad=False))
                owner._parameters[name] = known
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.zeros_like(buffer, device="cpu")


def pretended_sources(module: nn.Module) -> dict[str, TensorSource]:
    """Where weights would lie in one safetensors file, so that moving them is planned as it will be done."""
    found, offset = {}, PAGE_BYTES
    for name, parameter in module.named_parameters():
        extent = Extent(path=_PRETENDED, offset=offset, bytes=tensor_bytes(parameter))
        shape = tuple(parameter.shape)
        found[name] = TensorSource(name=name, dtype=parameter.dtype, shape=shape, extents=(extent,))
        offset = round_up(offset + extent.bytes, 64)
    return found


def precision_of(module: nn.Module) -> str:
    """``fp32``, ``bf16`` or ``fp16``: that of most weights."""
    counts: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(max(counts, key=lambda dtype: counts[dtype]), "fp32") if counts else "fp32"


def _check_generates(module: Any, name: str, inputs: Inputs) -> None:
    if not (hasattr(module, "can_generate") and module.can_generate()):
        raise UnsupportedError(
            f"Generation with {name} was to be planned.",
            f"{type(module).__name__} does not generate.",
            "Give a model that does (a causal or an encoder-decoder one).",
        )
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and inputs.total > limit:
        raise UsageError(
            f"{inputs.prompt} prompt tokens and {inputs.total - inputs.prompt} new ones were planned for {name}.",
            f"It was made for {limit} in all.",
            "Give a smaller --seq or --new-tokens.",
        )


__all__ = ["Subject", "Subjects", "open_subject", "precision_of", "pretended_sources", "processor_of"]
