"""A training by a plan that was made before: what it settles, and the blocks that it speaks of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from torch import nn

from brim.core import Plan
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import FormatError, UsageError
from brim.run.fit.machine import Need, partitions
from brim.run.plan.file import PlanFile
from brim.run.plan.training import precision_of
from brim.run.train.request import Request
from brim.run.train.strategy.choice import Choice
from brim.techniques.blocks import Partition

_SETTLED = ("method", "batch", "seq", "optimizer", "precision")
_ORDERS = ("micro_batch", "checkpointing", "offload_activations", "offload_optimizer", "stream_weights")


def with_plan(request: Request, file: PlanFile) -> Request:
    """``request`` with what the plan settles: the batch and its length, the method, optimizer and precision, and the
    budget where none is given.

    Raises UsageError for an option that says something else than the plan, or orders what it decided.
    """
    if file.plan.task != "train":
        raise UsageError(f"{request.plan} was given to a training.", f"It is a plan to {file.plan.task}.")
    asked = file.request
    asked.check()
    try:
        choice = Choice.of(file.plan)
    except (KeyError, AssertionError) as error:
        raise FormatError(f"{request.plan} was given as a plan.", f"It is damaged: {error!r}.") from error
    planned: dict[str, Any] = {name: getattr(asked, name) for name in _SETTLED}
    planned["precision"] = precision_of(asked, file.hardware.compute)
    if choice.precision != planned["precision"]:
        told = f"Its precision is {choice.precision}, and what it was asked has {planned['precision']}."
        raise FormatError(f"{request.plan} was given as a plan.", told)
    defaults = {one.name: one.default for one in fields(Request)}
    for name in (*_SETTLED, *_ORDERS):
        given = getattr(request, name)
        if given != defaults[name] and given != planned.get(name):
            told = f"The plan says {planned[name]}." if name in planned else "The plan has decided that."
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} {given} was given beside --plan {request.plan}.",
                told,
                f"Leave --{option} out, or make another plan.",
            )
    budget = file.plan.budget_bytes
    for tier in (VRAM, RAM, DISK):
        if getattr(request, tier) is None and tier in budget:
            planned[tier] = budget[tier]
    return replace(request, **planned)


def partition_of(model: nn.Module, plan: Plan, stay: Collection[str]) -> Partition:
    """The blocks that ``plan`` speaks of. Raises UsageError where the model has no such blocks."""
    wanted = Choice.of(plan).streaming.keys()
    for found in partitions(model, Need(step_bytes=0, stay=frozenset(stay))):
        if wanted <= {block.name for block in found.blocks}:
            return found
    raise UsageError(
        f"A plan for {plan.model} was to be used.",
        f"The model has no blocks such as {next(iter(wanted))}.",
        "Make a plan for this model.",
    )
