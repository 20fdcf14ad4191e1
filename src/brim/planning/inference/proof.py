"""Prove a plan: applied to fake tensors, it takes no more than it promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from brim.core import Hardware, Plan
from brim.core.hardware import RAM
from brim.errors import BudgetError, UsageError
from brim.memory.pool import round_up
from brim.planning.inference.choosing import Cut
from brim.planning.inference.machine import predict
from brim.planning.solver import Job
from brim.techniques.streaming.placement import COMPUTE_RAM
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import Weights
from brim.units import format_bytes

_PROOFS = 8  # plans that are tried, each under a tighter budget than the one before
_ENDLESS_BYTES = 1 << 60


def proved(
    name: str,
    budget_bytes: Mapping[str, int],
    attempt: Callable[[Mapping[str, int]], tuple[Cut, Plan]],
    takes: Callable[[Cut, Plan], Mapping[str, int]],
    *,
    grain_bytes: int = 1,
) -> tuple[Cut, Plan]:
    """Return the first plan that ``takes`` no more than ``budget_bytes``, with a promise of no less than it takes.

    ``attempt`` plans within a budget and raises BudgetError where nothing fits. While its plan exceeds
    ``budget_bytes``, its budget is reduced by the excess, in multiples of ``grain_bytes``. Raises BudgetError after
    too many attempts.
    """
    tight = dict(budget_bytes)
    for _ in range(_PROOFS):
        cut, plan = attempt(tight)
        taken_bytes = takes(cut, plan)
        over = {tier: count - budget_bytes[tier] for tier, count in taken_bytes.items() if count > budget_bytes[tier]}
        if not over:
            peak = {**plan.promise.peak_bytes}
            peak |= {tier: max(count, peak.get(tier, 0)) for tier, count in taken_bytes.items()}
            promise = replace(plan.promise, peak_bytes=peak)
            return cut, replace(plan, promise=promise, budget_bytes=dict(budget_bytes))
        tight |= {tier: tight[tier] - round_up(count, grain_bytes) for tier, count in over.items()}
    raise BudgetError(
        f"Cannot run {name} in {in_words(budget_bytes)}.",
        f"{_PROOFS} plans were tried; the last takes {in_words(taken_bytes)}.",
        f"Give {in_words(taken_bytes)} or more.",
        smallest_bytes={tier: taken_bytes[tier] for tier in over},
    )


def check_promise(plan: Plan, takes: Mapping[str, int], spent_bytes: Mapping[str, int]) -> None:
    """Raise UsageError for a given plan that promises less of a tier than its own decisions take.

    ``spent_bytes`` of ``takes`` are the program's own and do not count: the planning program may have had fewer.
    """
    least = {tier: count - spent_bytes.get(tier, 0) for tier, count in takes.items()}
    promised = plan.promise.peak_bytes
    broken = {tier: count for tier, count in least.items() if count > promised.get(tier, 0)}
    if broken:
        raise UsageError(
            f"Cannot use the plan for {plan.model}.",
            f"It promises {in_words({tier: promised.get(tier, 0) for tier in broken})}; "
            f"its decisions take {in_words(broken)} or more.",
            "Make a new one: brim plan MODEL ... --output FILE.",
        )


def in_words(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(count)} of {tier.upper()}" for tier, count in amounts.items())


def taken(module: nn.Module, cut: Cut, plan: Plan, job: Job, hardware: Hardware, weights: Weights) -> dict[str, int]:
    """Return a run's bytes per tier, by applying the plan to the model on fake memory."""
    endless = replace(plan, budget_bytes=dict.fromkeys(plan.budget_bytes, _ENDLESS_BYTES))
    handle = predict(module, cut.partition, endless, hardware, weights)
    try:
        pools = [handle.memory.compute, *([handle.memory.host] if handle.memory.host else [])]
        pool_bytes = {pool.tier: pool.peak_bytes for pool in pools}
    finally:
        handle.remove()
    beside = {hardware.compute: job.step_bytes}
    choices = plan.choices(STREAMING)
    if COMPUTE_RAM in choices.values():
        beside[RAM] = job.cpu_step_bytes + sum(
            block.cpu_bytes for block in job.blocks if choices[block.name] == COMPUTE_RAM
        )
    return {tier: n + beside.get(tier, 0) + job.overhead_bytes(tier) for tier, n in pool_bytes.items()}


__all__ = ["in_words", "proved", "taken"]
