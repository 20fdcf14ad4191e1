"""What is to be trained, as the search for ways to do it is told, and what it chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from brim.planning.solver.schedule import Contention, Schedule
from brim.planning.solver.step_profile import Limits, Way
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.ladder import Orders
from brim.planning.strategy.prediction import Prediction, Rehearsal
from brim.techniques.blocks import Partition

# Measured seconds of blocks over so many rows: forward, backward, forward where nothing is saved.
Clock = Callable[[int], Mapping[str, tuple[float, float, float]]]


@dataclass(frozen=True, kw_only=True)
class TrainingStrategy:
    """What was chosen, and proved: the step was traced with it in force.

    ``prediction`` is the promise; of its bytes, ``spent_bytes`` per tier are the program's own. ``partition`` has the
    blocks that ``choice`` speaks of. ``rung`` is the fallback level that it is, or (``planned``) in whose place it
    stands; -1: in no one's. ``way`` is the choice as the search knows it, ``schedule`` what the machine does in it:
    None where its blocks are others than those that were profiled. ``heap_s`` of its seconds go into memory that is
    given back and asked for anew.
    """

    choice: Choice
    partition: Partition
    prediction: Prediction
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    rung: int = -1
    planned: bool = False
    way: Way | None = None
    schedule: Schedule | None = None
    heap_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def limited_by(self) -> str:
        """The lane that the step waits for: the one that is busy longest."""
        return self.prediction.limited_by


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, for the search. ``tokens`` make a row; ``clock`` is None where seconds are computed.

    ``state_bytes`` says what the optimizer keeps for all of some parameters (None: a trace does). ``orders`` is what
    the user fixed, and ``limits`` what may be done within that. Parameters in ``stay`` are not streamed.
    ``in_place``: whether some activations can write over their inputs, asked where there is need.
    ``aside`` are bytes of the compute tier that a step is given where nobody knows what it does; ``finer``: where
    nothing else fits, blocks may be cut finer than ``rehearsal`` has them. ``brief``: gradients of one step are gone
    before those of the next come.
    ``beside``: what lanes of the machine were measured to leave each other. ``fresh_s_per_byte``: what memory costs
    that a run gives back and asks for anew, as its budget leaves no room to keep it. ``exact``: every layer is
    rehearsed for every proof; ``proves_all``: of what is chosen at least.
    """

    rehearsal: Rehearsal
    precision: str
    limits: Limits
    tokens: int
    state_bytes: Callable[[Sequence[nn.Parameter]], int] | None = None
    orders: Orders = field(default_factory=Orders)
    stay: frozenset[str] = frozenset()
    in_place: Callable[[], bool] = lambda: False
    aside: Callable[[Choice], int] = lambda choice: 0
    finer: bool = False
    brief: bool = True
    clock: Clock | None = None
    beside: Contention | None = None
    fresh_s_per_byte: float = 0.0
    exact: bool = False
    proves_all: bool = False


__all__ = ["Case", "Clock", "TrainingStrategy"]
