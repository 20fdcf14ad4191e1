"""The answer for another engine: its settings, the bytes of each device, and what it cannot express."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from brim import catalog
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, UsageError
from brim.estimation.hub import is_hub_id, split_revision
from brim.planning import ranks
from brim.planning.request import Machine, ram_option
from brim.requests.plan import MeshRequest
from brim.units import MIB, format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """A plan for another engine; the CUDA context is beside the budget of VRAM.

    ``bytes`` are those of each tier by their use; of VRAM, of each of ``gpus`` GPUs. ``command`` runs the model and
    reads the file of ``file_name`` with the content ``file``, if there is one. ``cannot`` says what the engine cannot
    express, with its cost, and ``assumed`` the figures that were not computed, a sentence each.
    """

    engine: str
    model: str
    machine: Machine
    bytes: Mapping[str, Mapping[str, int]]
    command: str
    settings: Mapping[Any, Any] = field(default_factory=dict)
    file: str = ""
    file_name: str = ""
    gpus: int = 1
    cannot: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> dict[str, int]:
        return {tier: sum(parts.values()) for tier, parts in self.bytes.items()}

    def excess_bytes(self) -> int:
        """Return the bytes above the budgets, of all tiers together."""
        budget = self.machine.budget_bytes
        return sum(max(0, count - budget.get(tier, count)) for tier, count in self.peak_bytes.items())

    def to_json(self) -> dict[str, Any]:
        machine = {"hardware": self.machine.hardware.name, "budget_bytes": dict(self.machine.budget_bytes)}
        return vars(self) | {"machine": machine, "peak_bytes": self.peak_bytes}


def first_that_fits(plans: Iterable[EnginePlan]) -> EnginePlan:
    """Return the first plan within its budgets. Raises BudgetError, with the least bytes above them, without one."""
    tried: list[EnginePlan] = []
    for plan in plans:  # a plan to train takes a trace
        tried.append(plan)
        if not plan.excess_bytes():
            return plan
    nearest = min(tried, key=EnginePlan.excess_bytes)
    budget, machine = nearest.machine.budget_bytes, nearest.machine
    needs = {tier: count for tier, count in nearest.peak_bytes.items() if count > budget.get(tier, count)}
    options = {tier: ram_option(machine, count) if tier == RAM else count for tier, count in needs.items()}
    is_larger = machine.assumed and needs.get(VRAM, 0) > machine.hardware.tier(VRAM).capacity_bytes
    given = ", ".join(f"--{tier} {-(-count // MIB)}MiB" for tier, count in options.items())
    raise BudgetError(
        f"{nearest.model} does not fit with {nearest.engine} into "
        + " and ".join(f"{format_bytes(budget[tier])} of {tier.upper()}" for tier in needs) + ".",
        "It takes " + " and ".join(f"{count:,} B of {tier.upper()}" for tier, count in needs.items()) + " at least.",
        f"Give {'a larger --gpu' if is_larger else given}, or a smaller --batch or --seq.",
        smallest_bytes=needs,
    )  # fmt: skip


def published(model: str | Path) -> str:
    """Return the name by which engines load MODEL: of the catalog's names, the hub id."""
    name, path = str(model), Path(model).expanduser()
    if path.exists() or is_hub_id(name):
        return str(path) if path.exists() else name
    return next(iter(catalog.model(name).hub_ids), name)


def copied(machine: Machine, source: str, target: str, count: int) -> str:
    """Return bytes in words, with the seconds of their copy."""
    link = machine.hardware.link(source, target)
    return f"{format_bytes(count)} from {source.upper()} ({format_seconds(link.seconds(count))})"


def check(
    request: MeshRequest, machine: Machine, engine: str, task: str, *, several: bool, cpu: bool = False
) -> Machine:
    """Return the machine with the RAM beside all of its GPUs.

    Raises UsageError for another task, a revision, more GPUs than a node or the engine has, and a machine without a
    GPU where the engine needs one.
    """
    asked = f"Cannot plan to {request.task} with {engine}."
    if request.task != task:
        raise UsageError(asked, f"brim writes its settings to {task} only.", f"Add --task {task}.")
    if not several and request.gpus is not None:
        raise UsageError(asked, "--gpus was given, and brim writes its settings for one GPU.", "Leave out --gpus.")
    if (request.gpus or 1) > (request.gpus_per_node or 8):
        raise UsageError(
            asked, "brim writes its settings for a single node.", "Give --gpus-per-node, or fewer --gpus."
        )
    if is_hub_id(str(request.model)) and split_revision(str(request.model))[1] is not None:
        raise UsageError(asked, f"{request.model} has a revision.", "Leave it out, and add it to the command.")
    if not cpu and machine.hardware.compute != VRAM:
        raise UsageError(asked, f"{machine.hardware.name} has no GPU that PyTorch sees.", "Give --gpu or --vram.")
    if request.gpu is None or request.gpus is None:
        return machine
    own = [text for text in machine.assumed if "of RAM" not in text and "RAM rate" not in text]
    budget = {**machine.budget_bytes, RAM: ranks.node_ram(request)}
    return replace(machine, budget_bytes=budget, assumed=(*ranks.assumed(request), *own))
