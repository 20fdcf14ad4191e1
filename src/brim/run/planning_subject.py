"""The model that generation is planned for, without its weights, and what a step of it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Hardware
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import ModelError, UnsupportedError
from brim.estimation.models import find_model
from brim.estimation.quiet import quiet
from brim.estimation.steps import Job as Workshop
from brim.estimation.workload import Workload
from brim.measure.probe import probe
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.pool import PAGE_BYTES, round_up
from brim.planner import Job
from brim.run.block_calls import Calls, Example, calls_of
from brim.run.block_timing import BlockSeconds, block_seconds, traced_seconds, triggers
from brim.run.fitting import Need, make_job, partitions
from brim.run.inference import SLACK_BYTES, by_parameter, materialize, resident_bytes, spent, warm_up
from brim.run.models import open_model, open_tokenizer, prepare
from brim.run.planning_request import Machine, Request
from brim.run.step_memory import Inputs, watch_inference
from brim.techniques.blocks import Partition, tensor_bytes
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
_HOP_S = 40e-6  # two copies of a token's activations, each awaited: 20 us by CUDA's launch and event latencies


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in one precision. ``module`` has no values; ``spent_bytes`` is the program's own share per tier."""

    name: str
    module: nn.Module
    precision: str
    weights: Weights
    inputs: Inputs
    machine: Machine
    spent_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        return self.machine.hardware

    @cached_property
    def is_here(self) -> bool:
        """Whether the machine is this one, so that blocks can be timed on it."""
        here = probe()
        return (here.name, here.compute) == (self.hardware.name, self.hardware.compute)

    @cached_property
    def plain_need(self) -> Need:
        """What a step takes by the machine's rates alone; the weights that no file holds stay."""
        seen = watch_inference(self.module, self.inputs)
        names = [name for name, _ in self.module.named_parameters()]
        return Need(
            step_bytes=seen.step_bytes,
            observation=seen,
            tokens=self.inputs.batch,
            stay=frozenset(name for name in names if name not in self.weights.sources),
            spent_bytes=self.spent_bytes,
        )

    @cached_property
    def partitions(self) -> list[Partition]:
        return list(partitions(self.module, self.plain_need, self.weights))

    @cached_property
    def token_calls(self) -> Calls:
        """How parts of any partition are called for one token."""
        return self._calls(self.inputs)

    @cached_property
    def prompt_calls(self) -> Calls:
        return self._calls(self._prompt)

    @property
    def _prompt(self) -> dict[str, Any]:
        ids = torch.zeros(self.inputs.batch, self.inputs.prompt, dtype=torch.long)
        config: Any = self.module.config
        if config.is_encoder_decoder:
            return {"input_ids": ids, "decoder_input_ids": ids[:, :1]}
        return {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}

    def _calls(self, example: Example) -> Calls:
        paths = {trigger for partition in self.partitions for trigger in triggers(partition)}
        return calls_of(self.module, paths, example)

    def jobs(self, hardware: Hardware, *, prompt: bool = False) -> list[tuple[Partition, Job]]:
        """The step of a token (or of the prompt) as the planner sees it, for every partition."""
        need = self._need(hardware, prompt)
        return [(p, make_job(self.module, p, hardware, need, self.weights, "generate")) for p in self.partitions]

    def job(self, partition: Partition, hardware: Hardware, *, prompt: bool = False) -> Job:
        return make_job(self.module, partition, hardware, self._need(hardware, prompt), self.weights, "generate")

    def _need(self, hardware: Hardware, prompt: bool) -> Need:
        calls = self.prompt_calls if prompt else self.token_calls
        example: Example = self._prompt if prompt else self.inputs
        tokens = self.inputs.batch * (self.inputs.prompt if prompt else 1)

        def seconds(partition: Partition) -> Mapping[str, BlockSeconds]:
            if self.is_here and hardware.name == self.hardware.name:
                return block_seconds(self.module, partition, example, training=False, calls=calls)
            return traced_seconds(self.module, partition, calls, hardware, tokens=tokens)

        def cpu_seconds(partition: Partition) -> Mapping[str, BlockSeconds]:
            made = traced_seconds(self.module, partition, calls, processor_of(self.machine), tokens=tokens)
            hop_s = _HOP_S
            return {name: replace(found, forward_s=found.forward_s + hop_s) for name, found in made.items()}

        beside = hardware.compute == VRAM
        return replace(
            self.plain_need,
            tokens=tokens,
            seconds=seconds,
            cpu_seconds=cpu_seconds if beside else None,
            cpu_bytes=0 if not beside else self.cache_bytes // max(1, len(self.token_calls.made)),
        )

    @cached_property
    def cache_bytes(self) -> int:
        """The KV cache at its fullest, by the tensors that the last token's pass is given."""
        from brim.run.block_calls import held_tensors

        return sum(tensor_bytes(t) for t in held_tensors(self.token_calls.whole.kwargs.get("past_key_values")))


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
        _check_generates(opened.module, opened.name)
        materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened))
    subject = Subject(
        name=opened.name,
        module=opened.module,
        precision=precision_of(opened.module),
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
    warm_up(subject.module, subject.hardware, subject.inputs.prompt)
    watch_inference(subject.module, Inputs(prompt=1, total=1))
    found = spent(start_bytes)
    del tokenizer
    return found


def _made(request: Request, machine: Machine, inputs: Inputs, precision: str | None) -> Subject:
    kept = precision if precision in DTYPES else None
    workload = Workload(
        task="generate",
        batch=inputs.batch,
        seq=inputs.prompt,
        new_tokens=request.new_tokens,
        precision="bf16" if kept == "fp16" else kept,
    )
    source = find_model(str(request.model))
    workshop = Workshop(source, workload)
    with quiet(), torch.device("meta"):
        module = workshop.module().eval()
    _check_generates(module, source.name)
    if kept is not None:
        module = module.to(DTYPES[kept])
    module = module.requires_grad_(False)
    subject = Subject(
        name=source.name,
        module=module,
        precision=precision or precision_of(module),
        weights=Weights(sources=pretended_sources(module)),
        inputs=inputs,
        machine=machine,
        spent_bytes=_IMAGINED_SPENT,
    )
    return subject


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


def _check_generates(module: Any, name: str) -> None:
    if not (hasattr(module, "can_generate") and module.can_generate()):
        raise UnsupportedError(
            f"Generation with {name} was to be planned.",
            f"{type(module).__name__} does not generate.",
            "Give a model that does (a causal or an encoder-decoder one).",
        )


__all__ = ["DISK", "Subject", "open_subject", "precision_of", "pretended_sources", "processor_of"]
