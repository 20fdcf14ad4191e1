"""A plan in the least of a machine's compute tier: the budget grows to what a refusal names until one is proved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from brim.errors import BudgetError
from brim.run.plan.request import Machine

_TIGHTENINGS = 4  # until a budget that was called the smallest is one under which a plan is proved
_LEAST_BYTES = 1  # a budget that nothing fits

T = TypeVar("T")


def in_the_least(machine: Machine, attempt: Callable[[Machine], T]) -> T | None:
    """What ``attempt`` gives in the smallest budget of the compute tier that is known to do.

    ``attempt`` plans for a machine and raises BudgetError, with the smallest bytes, where nothing fits. None: it does
    not say how much less than all would do.
    """
    compute, budget = machine.hardware.compute, _LEAST_BYTES
    for _ in range(_TIGHTENINGS):
        tight = replace(machine, budget_bytes={**machine.budget_bytes, compute: budget})
        try:
            return attempt(tight)
        except BudgetError as error:
            least = error.smallest_bytes.get(compute, 0)
            if least <= budget or least >= machine.budget_bytes[compute]:
                return None
            budget = least
    return None
