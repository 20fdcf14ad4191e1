"""The input and the result of the search for a training strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from brim.planning.solver.schedule import Schedule
from brim.planning.solver.step_profile import Assignment, Limits
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.ladder import Orders
from brim.planning.strategy.prediction import Prediction, TrainingStep
from brim.techniques.blocks import Partition

# Rows -> measured seconds of each block: forward, backward, forward without saving.
Clock = Callable[[int], Mapping[str, tuple[float, float, float]]]


@dataclass(frozen=True, kw_only=True)
class TrainingStrategy:
    """A proved strategy: the step was traced with ``choice`` in force.

    ``prediction`` is the promise; ``spent_bytes`` per tier of it are the program's own. ``partition`` has the blocks
    of ``choice``. ``rung`` is its fallback level, or (``planned``) the level that it replaces; -1: none.
    ``assignment`` is the solver's form of the choice and ``schedule`` its simulation: None where its blocks are not
    the profiled ones.
    """

    choice: Choice
    partition: Partition
    prediction: Prediction
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    rung: int = -1
    planned: bool = False
    assignment: Assignment | None = None
    schedule: Schedule | None = None

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def limited_by(self) -> str:
        """The busiest lane."""
        return self.prediction.limited_by


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """A training for the search. A row has ``tokens`` tokens; ``clock`` is None where seconds are computed.

    ``state_bytes`` gives the optimizer's bytes for some parameters (None: a trace does). ``orders`` are the user's
    settings, ``limits`` the choices that they leave. Parameters in ``stay`` are not streamed. ``in_place()`` is True
    where some activations can write over their inputs. ``aside`` are bytes of the compute tier reserved for a step
    that cannot be traced; ``finer``: blocks may be cut finer than in ``step`` where nothing else fits.
    ``brief``: a step's gradients are freed before those of the next exist. ``exact``: every proof traces every layer;
    ``proves_all``: that of the chosen strategy does.
    """

    step: TrainingStep
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
    exact: bool = False
    proves_all: bool = False
