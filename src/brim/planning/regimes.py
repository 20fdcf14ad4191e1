"""Compare the regimes of running a model larger than the GPU's memory, by the ratio of their sizes.

The regimes are streaming (a fixed set stays, the rest is loaded through a ring), paging by the driver, the processor
alone, and processor and GPU at once. Each is timed on a machine for models of 1 to 4 times the memory, to find where
they cross.

A paging driver loads pages when a kernel touches them, and evicts the least recently used ones. A model's layers are
used in a cycle, in which the least recently used layer is the next one: so as soon as a model is larger than the
memory, every byte is loaded in every step (Belady, 1966). The kernel waits meanwhile: nothing overlaps. Evictions are
assumed free, in favour of the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

from rich.table import Table

from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, UsageError
from brim.planning.inference.choose import GenerationCase, GenerationSearch
from brim.planning.inference.choosing import Cut, best_plan
from brim.planning.inference.pass_seconds import processor_of
from brim.planning.opening import open_subject
from brim.planning.request import Machine, Request
from brim.planning.solver import Job
from brim.planning.solver.passes import pass_s
from brim.planning.solver.streaming import CHOICES
from brim.planning.subject import Subject
from brim.report.line_plot import picture
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT
from brim.techniques.streaming.weight_streaming import NAME, RING_SLOTS
from brim.units import format_seconds

STREAMING, PAGING, PROCESSOR, BOTH = "streaming", "paging", "processor alone", "both at once"
RATIOS = (1.0, 1.5, 2.0, 4.0)
_STREAMED = (RESIDENT, FROM_RAM, FROM_DISK)
# Page faults of kernels reach this share of the link's rate: 8.2 GB/s (GTX 1080, driver 535,
# github.com/parallelArchitect/pascal-um-benchmark) where 16 lanes of PCIe 3 carry 15.75 GB/s at most.
_FAULTED_SHARE = 8.2 / 15.75
# The page cache reaches this share of the rate of direct reads: a 6.6 GB model in a mapped file took 5.2 s a pass in
# 3 GiB, 0.6 s of it compute, on a drive of 4.5 GB/s (bench/streaming.py, measurements/streaming_cpu.jsonl).
_MAPPED_SHARE = 6.6 / (5.2 - 0.6) / 4.5
_STEPS = 20  # points of a plot per whole ratio
_KIND, _EVEN = 1.5, 2.0  # the rule of thumb: faster up to the first ratio, even up to the second

Seconds = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The seconds of each regime at a ratio; None: it does not run there."""

    ratio: float
    token_s: Seconds
    prompt_s: Seconds


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The ``ratio`` from which on ``second`` is faster per token than ``first``."""

    first: str
    second: str
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Regimes:
    """``points`` at the given ratios, ``curve`` for a plot. ``needs_bytes`` are those of the whole model."""

    model: str
    hardware: str
    batch: int
    prompt_tokens: int
    needs_bytes: int
    points: Sequence[Point]
    curve: Sequence[Point]
    crossings: Sequence[Crossing]
    assumed: Sequence[str] = ()

    @property
    def ways(self) -> list[str]:
        return list(self.points[0].token_s)

    def to_json(self) -> dict[str, Any]:
        def plain(point: Point) -> dict[str, Any]:
            return {"ratio": point.ratio, "token_s": dict(point.token_s), "prompt_s": dict(point.prompt_s)}

        return {
            "model": self.model,
            "hardware": self.hardware,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "needs_bytes": self.needs_bytes,
            "points": [plain(point) for point in self.points],
            "curve": [plain(point) for point in self.curve],
            "crossings": [{"first": c.first, "second": c.second, "ratio": c.ratio} for c in self.crossings],
            "answer": self.answer(),
            "assumed": list(self.assumed),
        }

    def table(self) -> Table:
        """Return a table of seconds per token and per prompt, a row for each ratio."""
        title = f"{self.model} on {self.hardware}, batch {self.batch}, prompt of {self.prompt_tokens} tokens"
        table = Table(title=title, title_justify="left")
        table.add_column("needs", justify="right")
        for regime in self.ways:
            table.add_column(f"{regime},\nper token", justify="right")
            table.add_column("per\nprompt", justify="right")
        for point in self.points:
            cells = [f"{point.ratio:g} x"]
            for regime in self.ways:
                cells += [_shown(point.token_s[regime]), _shown(point.prompt_s[regime])]
            table.add_row(*cells)
        return table

    def svg(self) -> str:
        """Return a self-contained plot of seconds per token over the ratio."""
        title = f"{self.model} on {self.hardware}"
        lines = {regime: [(p.ratio, p.token_s[regime]) for p in self.curve] for regime in self.ways}
        return picture(title, lines, x_label=f"model / {self._memory}", y_label="seconds per token")

    def answer(self) -> str:
        """Judge the rule of thumb "faster than the processor up to 1.5 times the VRAM, slower beyond 2"."""
        if PROCESSOR not in self.ways:
            return self._without_gpu()
        parts = [self._against_processor(regime) for regime in (STREAMING, PAGING)]
        return " ".join([*parts, *self._together()])

    @property
    def _memory(self) -> str:
        return "VRAM" if PROCESSOR in self.ways else "RAM"

    def _against_processor(self, regime: str) -> str:
        end = self.curve[-1].ratio
        name = {STREAMING: "With streaming, the GPU", PAGING: "With the driver's paging, it"}[regime]
        lost = next((c.ratio for c in self.crossings if (c.first, c.second) == (regime, PROCESSOR)), None)
        won = next((c.ratio for c in self.crossings if (c.first, c.second) == (PROCESSOR, regime)), None)
        if lost is None and won is None:
            lead = _lead_s(self.curve[-1], regime, PROCESSOR)
            if lead is None:
                return f"{name} cannot be compared with the processor alone: one of them does not fit."
            rule = "is too careful" if lead > 0 else "does not hold at any size"
            word = "faster" if lead > 0 else "slower"
            return f"{name} is {word} than the processor alone up to {end:g} times: the rule of thumb {rule}."
        if lost is None:
            return f"{name} is faster than the processor alone from {won:.2f} times the VRAM on."
        verdict = (
            "is about right" if _KIND <= lost <= _EVEN * 1.1 else "is too kind" if lost < _KIND else "is too careful"
        )
        return (
            f"{name} is faster than the processor alone up to {lost:.2f} times the VRAM and slower beyond: "
            f"the rule of thumb ({_KIND:g}, even up to {_EVEN:g}) {verdict}."
        )

    def _together(self) -> list[str]:
        last = self.points[-1]
        both, alone = last.token_s[BOTH], [last.token_s[regime] for regime in (STREAMING, PROCESSOR)]
        finite = [seconds for seconds in alone if seconds is not None]
        if both is None or not finite:
            return []
        gain = min(finite) / both
        return [f"At {last.ratio:g} times, both at once are {gain:.2f} times as fast as the better of the two alone."]

    def _without_gpu(self) -> str:
        last = self.points[-1]
        streamed, paged = last.token_s[STREAMING], last.token_s[PAGING]
        if streamed is None or paged is None:
            return f"At {last.ratio:g} times the RAM this model does not run here."
        return (
            "This machine has no GPU: weights that do not fit RAM come from disk. "
            f"At {last.ratio:g} times the RAM, streaming is {paged / streamed:.2f} times as fast as the page cache."
        )


def regimes(request: Request, machine: Machine, *, ratios: Sequence[float] = RATIOS) -> Regimes:
    """Compare the regimes of a model that needs ``ratios`` times the VRAM (without a GPU: the RAM) of ``machine``.

    The model is fixed and the memory for its weights shrinks, which is equivalent except for the unit of time;
    memory beside weights (the program's own share, a step's activations and cache) is equal at every ratio. Seconds
    are those of simulated schedules, without proofs. Raises UsageError for a ratio below 1.
    """
    if not ratios or min(ratios) < 1:
        raise UsageError(f"Cannot compare regimes for {list(ratios)} times the memory.", "Each must be 1 or more.")
    study = _Study(open_subject(request, machine, request.precision))
    fine = [1 + step / _STEPS for step in range(round((max(ratios) - 1) * _STEPS) + 1)]
    curve = _never_slower([study.point(ratio, prompt=False) for ratio in fine])
    return Regimes(
        model=study.subject.name,
        hardware=machine.hardware.name,
        batch=request.batch,
        prompt_tokens=request.seq,
        needs_bytes=study.needs_bytes,
        points=_never_slower([study.point(ratio) for ratio in sorted(ratios)], curve),
        curve=curve,
        crossings=_crossings(curve),
        assumed=machine.assumed,
    )


@dataclass
class _Study:
    """A model on a machine, under any budget of its compute tier."""

    subject: Subject
    _jobs: dict[tuple[str, bool], list[tuple[Cut, Job]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compute = self.subject.machine.hardware.compute
        strategy = GenerationSearch(_endless(self.subject)).run()
        self.needs_bytes = strategy.plan.promise.peak_bytes[self.compute]

    def point(self, ratio: float, *, prompt: bool = True) -> Point:
        room_bytes = int((self.needs_bytes - self._beside_bytes) / ratio)
        budget = {**self.subject.machine.budget_bytes, self.compute: self._beside_bytes + room_bytes}
        seconds_of: dict[str, tuple[float | None, float | None]] = {
            STREAMING: self._planned(self.subject, budget, _STREAMED, prompt),
            PAGING: self._paged(ratio, prompt),
        }
        if self.compute == VRAM:
            seconds_of[PROCESSOR] = self._alone
            seconds_of[BOTH] = self._planned(self.subject, budget, CHOICES, prompt)
        return Point(
            ratio=ratio,
            token_s={regime: seconds[0] for regime, seconds in seconds_of.items()},
            prompt_s={regime: seconds[1] for regime, seconds in seconds_of.items()},
        )

    @cached_property
    def _beside_bytes(self) -> int:
        """Bytes of the compute tier beside weights."""
        _, job = self._of(self.subject, False)[0]
        return job.overhead_bytes(self.compute) + job.step_bytes

    @cached_property
    def _alone(self) -> tuple[float | None, float | None]:
        machine = self.subject.machine
        host = replace(
            machine, hardware=processor_of(machine.hardware), budget_bytes={RAM: machine.budget_bytes[RAM]}
        )
        return self._planned(self.subject.on(host), host.budget_bytes, CHOICES, True)

    def _of(self, subject: Subject, prompt: bool) -> list[tuple[Cut, Job]]:
        key = (subject.machine.hardware.name, prompt)
        if key not in self._jobs:
            search = GenerationSearch(_endless(subject))
            need = search.need(search.case.sizes(subject.inputs.batch, subject.inputs.prompt), 0, prompt=prompt)
            self._jobs[key] = [(cut, search.case.job(cut, need)) for cut in search.cuts(need)]
        return self._jobs[key]

    def _planned(
        self, subject: Subject, budget: Mapping[str, int], allowed: Collection[str], prompt: bool
    ) -> tuple[float | None, float | None]:
        """Return the best plan's seconds for a token and for a prompt."""
        hardware = subject.machine.hardware
        try:
            tokens = subject.inputs.batch
            cut, plan = best_plan(self._of(subject, False), hardware, budget, tokens=tokens, allowed=allowed)
        except BudgetError:
            return None, None
        if not prompt:
            return plan.promise.step_s, None
        job = next(job for other, job in self._of(subject, True) if other == cut)
        return plan.promise.step_s, pass_s(job, hardware, plan.choices(NAME), plan.settings[RING_SLOTS])[0]

    def _paged(self, ratio: float, prompt: bool) -> tuple[float | None, float | None]:
        token_s = self._paged_s(self._of(self.subject, False)[0][1], ratio)
        return token_s, self._paged_s(self._of(self.subject, True)[0][1], ratio) if prompt else None

    def _paged_s(self, job: Job, ratio: float) -> float | None:
        compute_s = job.fixed_compute_s + sum(block.compute_s for block in job.blocks)
        if ratio <= 1:
            return compute_s
        hardware = self.subject.machine.hardware
        moved = sum(block.moved_bytes for block in job.blocks)
        if self.compute == RAM:
            return compute_s + moved / (hardware.link(DISK, RAM).bytes_per_s * _MAPPED_SHARE)
        if sum(block.bytes for block in job.blocks) > self.subject.machine.budget_bytes[RAM]:
            return None  # a driver pages to RAM only
        return compute_s + moved / (hardware.link(RAM, VRAM).bytes_per_s * _FAULTED_SHARE)


def _endless(subject: Subject) -> GenerationCase:
    """Return the subject's case with unlimited memory, to time it."""
    return replace(subject.case, budget_bytes=dict.fromkeys(subject.machine.budget_bytes, 1 << 60))


def _never_slower(points: Sequence[Point], others: Sequence[Point] = ()) -> list[Point]:
    """Improve ``points`` (sorted by ratio) by those of larger ratios: a plan for less memory fits more memory too."""

    def best_s(point: Point, regime: str) -> float | None:
        at_least_as_large = (other.token_s[regime] for other in (*points, *others) if other.ratio >= point.ratio)
        return min((seconds for seconds in at_least_as_large if seconds is not None), default=None)

    return [replace(point, token_s={regime: best_s(point, regime) for regime in point.token_s}) for point in points]


def _crossings(curve: Sequence[Point]) -> list[Crossing]:
    """Return the crossings of regimes, by linear interpolation between points of ``curve``."""
    crossings = []
    for regime, other in combinations(curve[0].token_s, 2):
        leads = [(point.ratio, _lead_s(point, regime, other)) for point in curve]
        clear_leads = [(ratio, lead) for ratio, lead in leads if lead]  # without ties
        for (ratio, lead), (next_ratio, next_lead) in pairwise(clear_leads):
            if lead * next_lead < 0:
                at = ratio + lead / (lead - next_lead) * (next_ratio - ratio)
                first, second = (regime, other) if lead > 0 else (other, regime)
                crossings.append(Crossing(first=first, second=second, ratio=at))
    return sorted(crossings, key=lambda crossing: crossing.ratio)


def _lead_s(point: Point, regime: str, other: str) -> float | None:
    """Return the seconds by which ``other`` takes longer than ``regime``."""
    mine, theirs = point.token_s[regime], point.token_s[other]
    return None if mine is None or theirs is None else theirs - mine


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
