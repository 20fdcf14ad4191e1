"""Decision for a model of a program, recorded for reports and to compute the rest of the budget."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:  # a program with an ample budget does without
    from brim.core import Plan, Timeline
    from brim.memory.pool import Pool

UNTOUCHED, FITTED = "untouched", "fitted"


@dataclass(kw_only=True, eq=False)
class Outcome:
    """Decision for a model. ``untouched_bytes``: bytes without a plan, as far as they are known.

    ``timeline`` and ``pools`` are set if it was fitted; the model itself is not kept alive.
    """

    name: str
    task: str
    choice: str
    parameter_bytes: int
    budget_bytes: Mapping[str, int]
    untouched_bytes: Mapping[str, int]
    why: str = ""
    plan: Plan | None = None
    timeline: Timeline | None = None
    pools: tuple[Pool, ...] = ()
    model: weakref.ref[nn.Module] | None = None
    has_optimizer: bool = False
    example: Any = None  # inputs of the call, as tensors without values

    @property
    def promised_bytes(self) -> Mapping[str, int]:
        return self.untouched_bytes if self.plan is None else self.plan.promise.peak_bytes
