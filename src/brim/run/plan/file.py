"""A plan as a file: what was asked, of which model, for which machine, and what was decided.

``brim plan --output`` writes one, ``brim generate --plan`` and ``brim train --plan`` run exactly that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Hardware, Plan, codec
from brim.core.hardware import DISK
from brim.core.replacing import write_text
from brim.errors import FormatError, UnsupportedError, UsageError
from brim.estimation.models import Source, class_of, find_model, transformers_config
from brim.run.model.factory import made_by
from brim.run.model.opening import prepare
from brim.run.plan.request import PRECISIONS_OF, Answer, Request
from brim.run.train.strategy.choice import (
    ACTIVATIONS,
    CHECKPOINTING,
    GRADIENTS,
    OFFLOADED,
    PRECISION,
    STATES,
)
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.experts import technique as experts
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.optimizer_offload import places as optimizer_places
from brim.techniques.quantization.technique import SCHEMES, quantize_meta
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.weight_streaming import (
    COMPUTE_RAM,
    FROM_DISK,
    FROM_RAM,
    RESIDENT,
    RING_SLOTS,
)
from brim.units import format_bytes
from brim.version import __version__

VERSION = 1
_MOST, _MOST_SLOTS = 1 << 50, 1 << 10  # of a setting, and of a ring's slots
_SHOWN = 3  # differences between two models that are told
_ADAPTER = "base_model.model."  # peft puts it before every name
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
        STATES: optimizer_places.CHOICES,
        GRADIENTS: optimizer_places.CHOICES,
    },
}
_OF_THE_MODEL = {PRECISION, kv_cache.NAME, STATES, GRADIENTS}  # decided for all of it, not by block


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """One plan with all that it depends on. ``brim`` is the version that made it.

    ``parameters`` is the model's fingerprint, as ``fingerprint`` makes it: how many it has of each name (numbers of
    layers left out), dtype and shape.
    """

    brim: str
    request: Request
    hardware: Hardware
    plan: Plan
    parameters: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return codec.to_json(self, VERSION)


def write(path: str | Path, answer: Answer, index: int = 0) -> None:
    """Write the proposal ``index`` of ``answer``. Raises UsageError where that is impossible."""
    count = len(answer.proposals)
    if not 0 <= index < count:
        raise UsageError(f"Plan {index + 1} was to be written to {path}.", f"The answer has {count}.")
    chosen = answer.proposals[index]
    precision = chosen.precision or answer.request.precision
    request = replace(answer.request, model=str(answer.request.model), precision=precision)
    model = described(request.model)
    if request.task == "generate" and precision in SCHEMES:
        quantize_meta(model, precision)
    made = PlanFile(
        brim=__version__,
        request=request,
        hardware=chosen.hardware or answer.machine.hardware,
        plan=chosen.plan,
        parameters=fingerprint(model, request),
    )
    try:
        write_text(path, json.dumps(made.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"A plan was to be written to {path}.", f"{error}.", "Name another file.") from error


def read(path: str | Path) -> PlanFile:
    """The plan in the file that ``write`` made. Raises FormatError for anything else."""
    try:
        file = codec.read(PlanFile, path, VERSION)
        _check_decisions(file)
        return file
    except FormatError as error:
        todo = "Make it again: brim plan MODEL ... --output FILE."
        raise FormatError(f"{path} was given as a plan.", f"{error.asked} {error.found}", todo) from error


def _check_decisions(file: PlanFile) -> None:
    """Raise FormatError for a plan that ``write`` never writes: it would be followed in part."""
    plan, asked = file.plan, "Its plan was to be read."
    if file.hardware.compute not in plan.budget_bytes:
        raise FormatError(asked, f"It has no budget of {file.hardware.compute.upper()}, where it computes.")
    _check_choices(file, asked)
    decided = [(one.technique, one.block) for one in plan.decisions]
    if len(set(decided)) < len(decided):
        raise FormatError(asked, f"It decides twice about {next(d for d in decided if decided.count(d) > 1)}.")
    moved = set(plan.choices(weight_streaming.NAME).values()) - {RESIDENT}
    wrong = {name: count for name, count in plan.settings.items() if not 0 <= count < _MOST}
    if wrong or (moved - {COMPUTE_RAM} and not 1 <= plan.settings.get(RING_SLOTS, 0) <= _MOST_SLOTS):
        raise FormatError(asked, f"Its settings cannot be: {wrong or dict(plan.settings)}.")
    if plan.settings.get(RING_SLOTS, 0) > _MOST_SLOTS:
        raise FormatError(asked, f"It has {plan.settings[RING_SLOTS]} slots; at most {_MOST_SLOTS} are of use.")


def _check_choices(file: PlanFile, asked: str) -> None:
    """Raise FormatError for a technique that this task has not, a choice that it has not, or a block of none."""
    known = _CHOICES.get(file.plan.task)
    if known is None:
        raise FormatError(asked, f"Its task is {file.plan.task!r}; known are {', '.join(_CHOICES)}.")
    for one in file.plan.decisions:
        if one.technique not in known:
            told = f"It decides about {one.technique!r}; known for the task {file.plan.task} are {', '.join(known)}."
            raise FormatError(asked, told)
        if one.choice not in known[one.technique]:
            choices = ", ".join(sorted(known[one.technique]))
            raise FormatError(asked, f"Its choice of {one.technique} is {one.choice!r}; known are {choices}.")
        if one.technique in _OF_THE_MODEL and one.block:
            told = f"It decides about {one.technique} of {one.block!r}, which is decided for the whole model."
            raise FormatError(asked, told)
        if one.technique == PRECISION and one.choice != (file.request.precision or one.choice):
            told = f"Its precision is {one.choice}, and {file.request.precision} was asked for."
            raise FormatError(asked, told)


def check(file: PlanFile, *, model: nn.Module, hardware: Hardware, task: str) -> None:
    """Raise UsageError, naming all that differs, where ``file`` was not made for this.

    ``model`` is the module as it was opened, before anything is applied to it (adapters do not matter). A machine
    must be of the same name and compute tier, and have what the plan may take.
    """
    found = [*_version(file), *_task(file, task), *_machine(file, hardware)]
    if not found:  # the models of two tasks may well be equal, and those of two machines are
        found += _model(file, model)
    if found:
        command = f"brim plan {file.request.model} --task {task} --output FILE"
        raise UsageError(
            f"The plan for {file.plan.model} (task {file.plan.task}, {file.plan.hardware}) was to be used.",
            "\n".join(found),
            f"Make one for this: {command}",
        )


def _version(file: PlanFile) -> Iterator[str]:
    """What another version did with the same decisions may take other bytes: its promise is not ours."""
    if file.brim != __version__:
        yield f"It was made by brim {file.brim}, and this is {__version__}."


def _task(file: PlanFile, task: str) -> Iterator[str]:
    if file.plan.task != task:
        yield f"It was made for the task {file.plan.task}, and this is {task}."


def _machine(file: PlanFile, hardware: Hardware) -> Iterator[str]:
    planned = file.hardware
    if planned.name != hardware.name:
        yield f"It was made for {planned.name}, and this machine is {hardware.name}."
        return  # which explains the rest
    if planned.compute != hardware.compute:
        yield f"It computes in {planned.compute.upper()}, and this machine in {hardware.compute.upper()}."
        return
    have = {tier.name: tier.capacity_bytes for tier in hardware.tiers}
    # What is scratched on disk is known; memory may be filled to its budget.
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
    """Name -> ``3 x float32[64, 64]``."""
    found: dict[str, list[str]] = {}
    for key, count in parameters.items():
        name, _, kind = key.partition(" ")
        found.setdefault(name, []).append(f"{count} x {kind}")
    return {name: " and ".join(sorted(kinds)) for name, kinds in found.items()}


def fingerprint(model: nn.Module, request: Request) -> dict[str, int]:
    """Names, dtypes and shapes of ``model``'s parameters, equal layers counted: what a plan is made of.

    The dtype is left out where the run decides it: full training holds its own copy, and ``--precision`` is an order.
    """
    converted = request.precision is not None or (request.task == "train" and request.method == "full")
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        plain = name.removeprefix(_ADAPTER).replace(".base_layer.", ".")
        dtype = "" if converted else str(parameter.dtype).removeprefix("torch.")
        key = f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', plain)} {dtype}{list(parameter.shape)}"
        found[key] = found.get(key, 0) + 1
    return found


def described(model: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The module that MODEL's configuration describes, on meta; no weights are read.

    It is in ``dtype``, by default in that which the configuration names; what a function builds is as it is.

    Raises what ``find_model`` does, UnsupportedError for what is no model of transformers.
    """
    source = described_source(model)
    if source.library == "python":
        return made_by(source)[0]
    if source.library != "transformers":
        raise UnsupportedError(
            f"A plan for {source.name} was asked for.",
            f"It is a model of {source.library}.",
            "Plans are made for models of transformers (a name, a folder, a .gguf file) and for file.py:build.",
        )
    from transformers.initialization import no_init_weights

    config = transformers_config(source)
    kind = class_of(config, [source.architecture], ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"))
    if kind is None:
        raise UnsupportedError(
            f"A plan for {source.name} was asked for.", f"transformers has no class {source.architecture}."
        )
    with torch.device("meta"), no_init_weights():
        made: Any = kind._from_config(config, dtype=dtype or getattr(config, "dtype", None) or torch.float32)
    made.tie_weights()  # left out where weights are not initialised
    module: nn.Module = made
    return module


def described_source(model: str | Path) -> Source:
    """As ``find_model``, which also takes a .gguf file."""
    path = Path(model).expanduser()
    return find_model(prepare(model) if path.suffix.lower() == ".gguf" and path.is_file() else model)
