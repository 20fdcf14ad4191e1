"""Train by a plan file: the options that it settles, and the blocks that its decisions are for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from torch import nn

from brim.core import Plan
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import FormatError, UsageError
from brim.planning.file import PlanFile
from brim.planning.inference.choosing import Need, partitions
from brim.planning.strategy.choice import Choice
from brim.planning.training import precision_of
from brim.run.train.request import ORDERS, Request
from brim.techniques.blocks import Partition

_SETTLED = ("method", "batch", "seq", "optimizer", "precision")


def with_plan(request: Request, file: PlanFile) -> Request:
    """``request`` with the values of the plan: batch, sequence length, method, optimizer and precision, and the
    budget where none is given.

    Raises UsageError for an option that differs from the plan, or sets what the plan decides.
    """
    if file.plan.task != "train":
        raise UsageError(f"Cannot train with the plan {request.plan}.", f"It is for the task {file.plan.task}.")
    planned_request = file.request
    planned_request.check()
    try:
        choice = Choice.of(file.plan)
    except (KeyError, AssertionError) as error:
        raise FormatError(f"{request.plan} is not a valid plan.", f"It is damaged: {error!r}.") from error
    planned: dict[str, Any] = {name: getattr(planned_request, name) for name in _SETTLED}
    planned["precision"] = precision_of(planned_request, file.hardware.compute)[0]
    if choice.precision != planned["precision"]:
        problem = f"Its precision is {choice.precision}, but its request has {planned['precision']}."
        raise FormatError(f"{request.plan} is not a valid plan.", problem)
    defaults = {field.name: field.default for field in fields(Request)}
    for name in (*_SETTLED, *ORDERS):
        value = getattr(request, name)
        if value != defaults[name] and value != planned.get(name):
            problem = f"The plan has {planned[name]}." if name in planned else "The plan decides that."
            option = name.replace("_", "-")
            raise UsageError(
                f"Cannot use --{option} {value} with --plan {request.plan}.",
                problem,
                f"Leave --{option} out, or make another plan.",
            )
    budget = file.plan.budget_bytes
    for tier in (VRAM, RAM, DISK):
        if getattr(request, tier) is None and tier in budget:
            planned[tier] = budget[tier]
    return replace(request, **planned)


def partition_of(model: nn.Module, plan: Plan, stay: Collection[str]) -> Partition:
    """The blocks that ``plan`` has decisions for. Raises UsageError if the model has no such blocks."""
    names = Choice.of(plan).streaming.keys()
    for partition in partitions(model, Need(step_bytes=0, stay=frozenset(stay))):
        if names <= {block.name for block in partition.blocks}:
            return partition
    raise UsageError(
        f"Cannot use the plan for {plan.model}.",
        f"The model has no block {next(iter(names))}.",
        "Make a plan for this model.",
    )
