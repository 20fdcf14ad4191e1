"""``brim plan``: the fastest ways that fit a machine, which may be another one, and what would do when none fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError
from brim.planner.passes import CPU
from brim.planner.schedule import way
from brim.run.planning_generation import plan_generation
from brim.run.planning_nearest import nearest
from brim.run.planning_request import LOSSY, Answer, Machine, Proposal, Request, machine_of
from brim.run.planning_training import plan_training

_NEAREST_S = 20.0
_TIGHTENINGS = 4  # until a budget that was called the smallest is one under which a plan is proved
_LEAST_BYTES = 1  # a budget that nothing fits
# What people say for a lane that sets the pace. Beside a GPU, the processor updates weights as fast as RAM is read.
_LIMITS = {
    way(RAM, VRAM): "link",
    way(VRAM, RAM): "link",
    way(DISK, RAM): "disk",
    way(RAM, DISK): "disk",
    CPU: "RAM",
}


def plan(request: Request) -> Answer:
    """The answer to ``request``: proved proposals, or what would have to change.

    Raises UsageError and ModelError for what was asked, UnsupportedError for a model that brim cannot run.
    """
    request.check()
    begin_s = time.perf_counter()
    machine = machine_of(request)
    planner = plan_training if request.task == "train" else plan_generation
    try:
        found = planner(request, machine)
    except BudgetError as error:
        needs, changes = nearest(request, machine, error, planner, limit_s=_NEAREST_S)
        answer = Answer(
            request=request,
            machine=machine,
            proposals=(),
            needs_bytes=needs,
            nearest=changes,
            refusal=" ".join(part for part in (error.asked, error.found) if part),
        )
    else:
        if request.prefer == "memory":
            found = [*found, *_smallest(request, machine, planner)]
        answer = Answer(request=request, machine=machine, proposals=ranked(request, machine, found))
    return replace(answer, took_s=time.perf_counter() - begin_s)


def ranked(request: Request, machine: Machine, found: Sequence[Proposal]) -> list[Proposal]:
    """The best ``top`` of ``found`` by what is preferred; each once, and only what was proved."""
    keys: dict[str, Callable[[Proposal], tuple[float, ...]]] = {
        "speed": lambda one: (one.step_s, _held(one, machine)),
        "memory": lambda one: (_held(one, machine), one.step_s),
        "quality": lambda one: (is_lossy(one), one.step_s),
    }
    kept: list[Proposal] = []
    for one in sorted((one for one in found if one.proved), key=keys[request.prefer]):
        same = (one.plan.decisions, one.plan.settings)
        if all(same != (other.plan.decisions, other.plan.settings) for other in kept):
            kept.append(replace(one, limited_by=_LIMITS.get(one.limited_by, one.limited_by)))
    return kept[: request.top]


def is_lossy(proposal: Proposal) -> bool:
    """Whether weights are rounded further than they were trained."""
    return any(decision.choice in LOSSY for decision in proposal.plan.decisions)


def _held(proposal: Proposal, machine: Machine) -> int:
    return proposal.plan.promise.peak_bytes.get(machine.hardware.compute, 0)


def _smallest(
    request: Request, machine: Machine, planner: Callable[[Request, Machine], list[Proposal]]
) -> list[Proposal]:
    """Plans in the least of the compute tier that a plan is known for; none where the planner cannot tell it."""
    compute, budget = machine.hardware.compute, _LEAST_BYTES
    for _ in range(_TIGHTENINGS):
        tight = replace(machine, budget_bytes={**machine.budget_bytes, compute: budget})
        try:
            return planner(request, tight)
        except BudgetError as error:
            least = error.smallest_bytes.get(compute, 0)
            if least <= budget or least >= machine.budget_bytes[compute]:
                return []
            budget = least
    return []
