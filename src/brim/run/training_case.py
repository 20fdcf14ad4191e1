"""What is to be trained, as the search for ways to do it is told, and a way that it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from brim.planner.schedule import Contention, Schedule
from brim.planner.step_profile import Limits, Way
from brim.run.training_choice import Choice
from brim.run.training_prediction import Prediction, Rehearsal

# Measured seconds of blocks over so many rows: forward, backward, forward where nothing is saved.
Clock = Callable[[int], Mapping[str, tuple[float, float, float]]]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A way that was proved: its choice as the runtime takes it, what it takes, and its schedule.

    ``step_s`` is what the schedule says, and ``heap_s`` of memory that has to be asked for anew.
    """

    way: Way
    choice: Choice
    prediction: Prediction
    step_s: float
    schedule: Schedule
    heap_s: float = 0.0

    @property
    def limited_by(self) -> str:
        """The lane that the step waits for: the one that is busy longest."""
        return self.schedule.limited_by()


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, for the search. ``tokens`` make a row; ``clock`` is None where seconds are computed.

    ``beside``: what lanes of the machine were measured to leave each other. ``fresh_s_per_byte``: what memory costs
    that a run gives back and asks for anew, as its budget leaves no room to keep it.
    """

    rehearsal: Rehearsal
    optimizer: str
    precision: str
    limits: Limits
    tokens: int
    clock: Clock | None = None
    beside: Contention | None = None
    fresh_s_per_byte: float = 0.0
    exact: bool = False  # every layer is rehearsed for every proof


__all__ = ["Case", "Clock", "Found"]
