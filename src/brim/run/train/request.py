"""The result of a training, and the choices that its request takes from the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from brim.core import Plan, Timeline
from brim.core.options import build
from brim.planning.strategy.ladder import Orders
from brim.requests.train import Request as Request
from brim.run.train.report import EvaluationReport

ORDERS = tuple(each.name for each in fields(Orders) if each.name != "precision")  # which the setup settles


def orders_of(request: Request) -> Orders:
    """The choices that the request takes from the planner."""
    return build(Orders, vars(request) | {"precision": None})


@dataclass(frozen=True, kw_only=True)
class Training:
    """The result of a training. ``losses`` has a value per step of this run, ``measured_bytes`` the run's peaks:

    for RAM the growth of the resident set's peak since before the model was opened, for VRAM PyTorch's reserved
    bytes, for disk the length of the scratch file. ``step_s`` is the median. ``truncated`` counts examples cut to the
    length of a sequence. ``precision_origin`` says how the plan's precision was chosen.
    """

    losses: list[float]
    plan: Plan
    promised_bytes: Mapping[str, int]
    measured_bytes: Mapping[str, int]
    step_s: float
    output: Path
    notes: list[str]
    precision_origin: str = ""
    truncated: int = 0
    evaluations: Sequence[EvaluationReport] = ()
    timeline: Timeline = field(compare=False)
    predicted: Timeline | None = field(default=None, compare=False)  # the plan's predicted step, if requested

    def to_json(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "promised_bytes": dict(self.promised_bytes),
            "measured_bytes": dict(self.measured_bytes),
            "step_s": self.step_s,
            "plan": self.plan.to_json(),
            "output": str(self.output),
            "precision_origin": self.precision_origin,
            "notes": self.notes,
            "truncated": self.truncated,
        } | {
            name: values
            for name, values in (
                ("evaluations", [evaluation.to_json() for evaluation in self.evaluations]),
                ("exceeded", self.plan.exceeded(self.measured_bytes)),
            )
            if values
        }
