"""Read and write plan files: the request, the model's fingerprint, the machine and the decisions.

``brim plan --output`` writes one; ``brim generate --plan`` and ``brim train --plan`` run exactly its plan.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim import catalog
from brim.core import Hardware, Plan, codec
from brim.core.files import write_text
from brim.core.hardware import DISK
from brim.errors import FormatError, UnsupportedError, UsageError
from brim.estimation.models import (
    Source,
    check_not_quantized,
    class_of,
    find_model,
    keep_apart,
    quantized_by,
    transformers_config,
    weight_type,
)
from brim.estimation.quantization import quantize
from brim.models.opening import open_model, prepare
from brim.models.training_model import open_training_model
from brim.planning.factory import is_factory, made_by
from brim.planning.request import LOSSY, PRECISIONS_OF, Answer, Request
from brim.planning.strategy.choice import ACTIVATIONS, CHECKPOINTING, GRADIENTS, OFFLOADED, PRECISION, STATES
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.experts import technique as experts
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.optimizer_offload import technique as optimizer_offload
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.weight_streaming import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT, RING_SLOTS
from brim.units import format_bytes
from brim.version import __version__

VERSION = 1
_MOST, _MOST_SLOTS = 1 << 50, 1 << 10  # of a setting, and of a ring's slots
_SHOWN = 3  # differences between two models in a message
_ADAPTER = "base_model.model."  # peft's prefix of every name
_STREAMING = {RESIDENT, FROM_RAM, FROM_DISK, COMPUTE_RAM}
# Choices by technique that a plan for each task may have.
_CHOICES: dict[str, dict[str, Collection[str]]] = {
    "generate": {
        PRECISION: PRECISIONS_OF["generate"],
        weight_streaming.NAME: _STREAMING,
        experts.NAME: {experts.CACHE_RAM, experts.CACHE_DISK},
        kv_cache.NAME: {kv_cache.RESIDENT, kv_cache.OLDER_IN_RAM},
    },
    "train": {
        PRECISION: PRECISIONS_OF["train"],
        weight_streaming.NAME: _STREAMING,
        CHECKPOINTING: checkpointing.CHOICES,
        ACTIVATIONS: {OFFLOADED},
        STATES: optimizer_offload.CHOICES,
        GRADIENTS: optimizer_offload.CHOICES,
    },
}
_OF_THE_MODEL = {PRECISION, kv_cache.NAME, STATES, GRADIENTS}  # decided for the model, not by block


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan with everything that it depends on. ``brim`` is the version that wrote it.

    ``parameters`` is the model's ``fingerprint``: the number of parameters of each name (without layer numbers),
    dtype and shape.
    """

    brim: str
    request: Request
    hardware: Hardware
    plan: Plan
    parameters: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return codec.to_json(self, VERSION)

    def check(self, *, model: nn.Module, hardware: Hardware, task: str) -> None:
        """Raise UsageError, naming all differences, where the plan was made for another case.

        ``model`` is the module as it was opened, before any technique is applied (adapters do not matter). The
        machine must have the same name and compute tier, and the plan's memory.
        """
        differences = [*_version(self), *_task(self, task), *_machine(self, hardware)]
        if not differences:  # models are compared last, as differences in task or machine say more
            differences += _model(self, model)
        if differences:
            command = f"brim plan {self.request.model} --task {task} --output FILE"
            raise UsageError(
                f"Cannot use the plan for {self.plan.model} (task {self.plan.task}, {self.plan.hardware}).",
                "\n".join(differences),
                f"Make a plan for this case: {command}",
            )


def write(path: str | Path, answer: Answer, index: int = 0) -> None:
    """Write the proposal ``index`` of ``answer`` to ``path``. Raises UsageError where that is impossible."""
    count = len(answer.proposals)
    if not 0 <= index < count:
        raise UsageError(f"Cannot write plan {index + 1} to {path}.", f"The answer has {count} plans.")
    chosen = answer.proposals[index]
    precision = chosen.precision or answer.request.precision
    request = replace(answer.request, model=str(answer.request.model), precision=precision)
    model = quantized_module(request) or described(request.model)
    if request.task == "generate" and precision in LOSSY:
        with torch.device("meta"):
            quantize(model, precision, training=False)
    file = PlanFile(
        brim=__version__,
        request=request,
        hardware=chosen.hardware or answer.machine.hardware,
        plan=chosen.plan,
        parameters=fingerprint(model, request),
    )
    try:
        write_text(path, json.dumps(file.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"Cannot write a plan to {path}.", f"{error}.", "Name another file.") from error


def read(path: str | Path) -> PlanFile:
    """Read a plan that ``write`` wrote. Raises FormatError for any other file."""
    try:
        file = codec.read(PlanFile, path, VERSION)
        _check_decisions(file)
        return file
    except FormatError as error:
        todo = "Make a new one: brim plan MODEL ... --output FILE."
        raise FormatError(f"{path} is not a valid plan.", f"{error.request} {error.reason}", todo) from error


def _check_decisions(file: PlanFile) -> None:
    """Raise FormatError for decisions that ``write`` never writes, as they would be followed only in part."""
    plan, summary = file.plan, "Its plan cannot be followed."
    if file.hardware.compute not in plan.budget_bytes:
        raise FormatError(summary, f"It has no budget for {file.hardware.compute.upper()}, in which it computes.")
    _check_choices(file, summary)
    decided = Counter((decision.technique, decision.block) for decision in plan.decisions)
    if twice := next((what for what, count in decided.items() if count > 1), None):
        raise FormatError(summary, f"It has two decisions on {twice}.")
    wrong = {name: count for name, count in plan.settings.items() if not 0 <= count < _MOST}
    if wrong:
        raise FormatError(summary, f"Its settings are out of range: {wrong}.")
    if plan.settings.get(RING_SLOTS, 0) > _MOST_SLOTS:
        raise FormatError(
            summary, f"It has {plan.settings[RING_SLOTS]} ring slots; at most {_MOST_SLOTS} are allowed."
        )


def _check_choices(file: PlanFile, summary: str) -> None:
    """Raise FormatError for a technique that the task lacks, an unknown choice, or a block where none is allowed."""
    allowed = _CHOICES.get(file.plan.task)
    if allowed is None:
        raise FormatError(summary, f"Its task is {file.plan.task!r}; known are {', '.join(_CHOICES)}.")
    for decision in file.plan.decisions:
        if decision.technique not in allowed:
            known = f"known for the task {file.plan.task} are {', '.join(allowed)}"
            raise FormatError(summary, f"It has a decision on {decision.technique!r}; {known}.")
        if decision.choice not in allowed[decision.technique]:
            choices = ", ".join(sorted(allowed[decision.technique]))
            problem = f"Its choice of {decision.technique} is {decision.choice!r}; known are {choices}."
            raise FormatError(summary, problem)
        if decision.technique in _OF_THE_MODEL and decision.block:
            problem = f"It decides on {decision.technique} for {decision.block!r}; that has one choice for the model."
            raise FormatError(summary, problem)
        if decision.technique == PRECISION and decision.choice != (file.request.precision or decision.choice):
            problem = f"Its precision is {decision.choice}, but it was made for {file.request.precision}."
            raise FormatError(summary, problem)


def _version(file: PlanFile) -> Iterator[str]:
    """Yield a difference of versions: another one may need other bytes for the same decisions."""
    if file.brim != __version__:
        yield f"It was made by brim {file.brim}, and this is {__version__}."


def _task(file: PlanFile, task: str) -> Iterator[str]:
    if file.plan.task != task:
        yield f"It was made for the task {file.plan.task}, and this is {task}."


def _machine(file: PlanFile, hardware: Hardware) -> Iterator[str]:
    planned = file.hardware
    if planned.name != hardware.name:
        yield f"It was made for {planned.name}, and this machine is {hardware.name}."
        return  # explains all further differences
    if planned.compute != hardware.compute:
        yield f"It computes in {planned.compute.upper()}, and this machine in {hardware.compute.upper()}."
        return
    have = {tier.name: tier.capacity_bytes for tier in hardware.tiers}
    # The scratch file's size is known; memory may be filled to its budget.
    limits = {**file.plan.budget_bytes, DISK: file.plan.promise.peak_bytes.get(DISK, 0)}
    for tier, count in limits.items():
        if count > have.get(tier, 0):
            yield (
                f"It may take {format_bytes(count)} of {tier.upper()}, "
                f"and this machine has {format_bytes(have.get(tier, 0))}."
            )


def _model(file: PlanFile, model: nn.Module) -> Iterator[str]:
    planned, here = _by_name(file.parameters), _by_name(fingerprint(model, file.request))
    names = [name for name in {**planned, **here} if planned.get(name) != here.get(name)]
    for name in names[:_SHOWN]:
        yield f"{name}: it was made for {planned.get(name, 'none')}, and this model has {here.get(name, 'none')}."
    if len(names) > _SHOWN:
        yield f"{len(names) - _SHOWN} more parameters differ."


def _by_name(parameters: Mapping[str, int]) -> dict[str, str]:
    """Convert a fingerprint to name -> ``3 x float32[64, 64]``."""
    kinds_of: dict[str, list[str]] = {}
    for key, count in parameters.items():
        name, _, kind = key.partition(" ")
        kinds_of.setdefault(name, []).append(f"{count} x {kind}")
    return {name: " and ".join(sorted(kinds)) for name, kinds in kinds_of.items()}


def fingerprint(model: nn.Module, request: Request) -> dict[str, int]:
    """Count ``model``'s parameters by name (without layer numbers), dtype and shape.

    The dtype is left out where the run decides it: in training, and with ``--precision``.
    """
    converted = request.precision is not None or request.task == "train"
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        plain = name.removeprefix(_ADAPTER).replace(".base_layer.", ".")
        dtype = "" if converted else str(parameter.dtype).removeprefix("torch.")
        key = f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', plain)} {dtype}{list(parameter.shape)}"
        counts[key] = counts.get(key, 0) + 1
    return counts


def quantized_module(request: Request) -> nn.Module | None:
    """The module of a quantized checkpoint in a folder, opened as in a run; None for any other model."""
    folder = Path(request.model).expanduser()
    if (
        is_factory(request.model)
        or not any(folder.glob("*.safetensors"))
        or not quantized_by(described_source(folder))
    ):
        return None
    if request.task == "generate":
        return open_model(folder).module
    return open_training_model(folder, method=request.method, precision=request.precision or "fp32", seed=0).module


def described(model: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Build MODEL from its configuration on meta, without reading weights.

    It is in ``dtype``, by default the configuration's; the model of a function keeps its own.

    Raises the errors of ``find_model``, and UnsupportedError for models of other libraries than transformers.
    """
    source = described_source(model)
    check_not_quantized(source)
    if source.library == "python":
        return made_by(source)[0]
    if source.library != "transformers":
        raise UnsupportedError(
            f"Cannot make a plan for {source.name}.",
            f"It is a model of {source.library}.",
            "Plans are made for models of transformers (a name, a folder, a .gguf file) and for file.py:build.",
        )
    from transformers.initialization import no_init_weights

    config = transformers_config(source)
    kind = class_of(config, [source.architecture], ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"))
    if kind is None:
        raise UnsupportedError(
            f"Cannot make a plan for {source.name}.", f"transformers has no class {source.architecture}."
        )
    keep_apart(config, kind, source)
    with torch.device("meta"), no_init_weights():
        built: Any = kind._from_config(config, dtype=dtype or getattr(torch, weight_type(source).dtype))
    built.tie_weights()  # skipped by transformers without initialisation
    module: nn.Module = built
    return module


def parameter_count(model: str | Path) -> int:
    """Return the number of parameters of MODEL, tied ones once."""
    if not Path(model).exists():
        with suppress(UsageError):  # a model of the hub may not be in the catalog
            if count := catalog.model(str(model)).parameters:
                return count
    return sum(parameter.numel() for parameter in described(model).parameters())


def described_source(model: str | Path) -> Source:
    """Find MODEL as ``find_model`` does, or in a .gguf file."""
    path = Path(model).expanduser()
    return find_model(prepare(model) if path.suffix.lower() == ".gguf" and path.is_file() else model)
