"""Plan generation with a model from its configuration: search, time by schedules, and prove.

``brim generate`` uses the same code, so it makes the same promise. A proposed plan is applied to the model on fake
memory, whose pools hold the same bytes as a run's.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from brim.core import Decision, Plan
from brim.core.hardware import DISK, RAM, VRAM
from brim.core.options import words
from brim.errors import BudgetError, UnsupportedError
from brim.models.opening import DTYPES
from brim.planning.inference.choose import GenerationStrategy, older_tokens_s, search_generation
from brim.planning.inference.choosing import best_plan
from brim.planning.inference.pass_seconds import processor_of
from brim.planning.inference.predicted_timeline import foreseen
from brim.planning.nearest import in_the_least
from brim.planning.opening import Subjects, timed_weights
from brim.planning.proof import search
from brim.planning.request import LOSSY, PLAN_FILE, Machine, Proposal, Request
from brim.planning.solver import Job
from brim.planning.solver.passes import CPU, pass_s
from brim.planning.solver.placing import least_s
from brim.planning.solver.schedule import COMPUTE, Schedule, lane_of
from brim.planning.solver.streaming import CHOICES, plan_of
from brim.planning.strategy.effects import Effect
from brim.planning.subject import Subject
from brim.requests.generate import Request as GenerateRequest
from brim.techniques.decoding_graphs import GRAPH_BYTES
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import RING_SLOTS

_HALF = ("bf16", "fp16")
_SHOWN_PASSES = 8  # of a timeline: the prompt's and some tokens'
_PRECISION, HOST_COMPUTE = "precision", "host_compute"
_RIVALS = 2  # plans that are timed beside the fastest
# The baselines of an answer, by the placements that each allows.
BASELINES: Mapping[str, Collection[str]] = {
    "all resident": (RESIDENT,),
    "all streamed": (FROM_RAM, FROM_DISK),
    "streamed": (RESIDENT, FROM_RAM, FROM_DISK),
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A proved strategy for ``subject``; its plan includes the precision.

    ``is_rival``: another search would not choose it, so its command needs the plan's file.
    """

    subject: Subject
    strategy: GenerationStrategy
    is_rival: bool = False

    @property
    def plan(self) -> Plan:
        plan = self.strategy.plan
        precision = Decision(technique=_PRECISION, block="", choice=self.subject.precision)
        return replace(plan, decisions=(precision, *plan.decisions))

    @property
    def limited_by(self) -> str:
        """The busiest resource: ``link``, ``disk``, ``RAM`` or ``compute``."""
        strategy = self.strategy
        choices, slots = strategy.plan.choices(STREAMING), strategy.plan.settings[RING_SLOTS]
        _, schedule = pass_s(strategy.job, strategy.hardware, choices, slots)
        return limit(schedule, strategy.job, self.subject.machine)


def plan_generation(request: Request, machine: Machine, *, subjects: Subjects | None = None) -> list[Proposal]:
    """Return proved proposals, the fastest first; none is slower than the baselines that fit.

    Without a precision in ``request`` the model keeps its own. ``prefer="memory"`` adds all other precisions, each
    also in the smallest sufficient memory; ``"quality"`` adds those of two bytes. Where the model does not fit in its
    own, the first that fits is proposed, in the order of their loss; ``lossless`` leaves out quantized ones.
    ``subjects`` caches opened models. Raises BudgetError, with the smallest budget, when nothing fits.
    """
    subjects = subjects or Subjects()
    candidates: list[Candidate] = []

    def variants() -> Iterator[Subject]:
        for precision, needed in _precisions(request):
            if needed and candidates:
                return
            try:
                subject = subjects.open(request, machine, precision)
            except UnsupportedError:
                if precision is None or precision == request.precision:
                    raise
                continue  # the user did not set this precision
            yield subject
            yield from _processor_alone(subject)
            if request.prefer == "memory":
                least = in_the_least(machine, lambda tight, subject=subject: propose(subject.on(tight)))  # type: ignore[misc]
                candidates.extend([] if least is None else [least])

    search(variants(), propose, results=candidates)
    if timed_weights(request, machine) is not None:
        candidates += _rivals(candidates[0])
    candidates.sort(key=lambda each: (each.plan.promise.step_s, sum(each.plan.promise.peak_bytes.values())))
    return [_proposal(request, machine, candidate) for candidate in candidates]


def _precisions(request: Request) -> Iterator[tuple[str | None, bool]]:
    """Yield precisions by increasing loss (None: the model's own), with True for those to try if none before fits."""
    if request.precision is not None:
        yield request.precision, False
        return
    yield None, False
    for precision in (*_HALF, *(() if request.lossless else LOSSY)):
        lossy = precision in LOSSY
        yield precision, request.prefer != "memory" and (lossy or request.prefer != "quality")


def _rivals(best: Candidate) -> list[Candidate]:
    """Return the fastest plans of other cuts, to be timed beside ``best``; none where all weights are resident."""
    subject, strategy = best.subject, best.strategy
    if set(strategy.plan.choices(STREAMING).values()) == {RESIDENT}:
        return []
    rivals: list[Candidate] = []

    def used_kinds() -> Iterator[frozenset[tuple[int, bool]]]:
        kinds = {strategy.cut.kind}
        while len(rivals) < _RIVALS and any(cut.kind not in kinds for cut in strategy.cuts):
            yield frozenset(kinds)
            new = {rival.strategy.cut.kind for rival in rivals}
            if new <= kinds:
                return
            kinds |= new

    def attempt(kinds: frozenset[tuple[int, bool]]) -> Candidate:
        strategy = search_generation(replace(subject.case, without=kinds))
        return Candidate(subject=subject, strategy=strategy, is_rival=True)

    with suppress(BudgetError):
        search(used_kinds(), attempt, results=rivals)
    return rivals


def _processor_alone(subject: Subject) -> Iterator[Subject]:
    machine = subject.machine
    if machine.hardware.compute == VRAM:
        budget = {tier: count for tier, count in machine.budget_bytes.items() if tier != VRAM}
        yield subject.on(replace(machine, hardware=processor_of(machine.hardware), budget_bytes=budget))


def propose(subject: Subject) -> Candidate:
    """Return the fastest proved plan on the subject's machine. Raises BudgetError where nothing fits."""
    return Candidate(subject=subject, strategy=search_generation(subject.case))


def gap(candidate: Candidate) -> float:
    """Return the share of a step's simulated seconds above the lower bound of all placements.

    The bound is the least over all partitions' linear programs.
    """
    strategy, case = candidate.strategy, candidate.subject.case
    hardware, budget, plan = case.hardware, _without_graphs(candidate), strategy.plan
    choices, slots = plan.choices(STREAMING), plan.settings[RING_SLOTS]
    reached_s = plan_of(strategy.job, hardware, budget, choices, slots).promise.step_s
    alike = [cut for cut in strategy.cuts if cut.experts is strategy.cut.experts]
    bounds_s = [least_s(case.job(cut, strategy.need), hardware, budget, CHOICES) for cut in alike]
    return max(0.0, 1 - min(bounds_s, default=reached_s) / reached_s) if reached_s else 0.0


def baselines(candidate: Candidate) -> dict[str, float]:
    """Return the seconds of the baselines that fit, by name."""
    strategy, case = candidate.strategy, candidate.subject.case
    tokens = strategy.need.tokens
    jobs = [(cut, case.job(cut, strategy.need)) for cut in strategy.cuts]
    seconds = {}
    for name, allowed in BASELINES.items():
        with suppress(BudgetError):
            _, plan = best_plan(jobs, case.hardware, _without_graphs(candidate), tokens=tokens, allowed=allowed)
            seconds[name] = plan.promise.step_s
    return seconds


def _without_graphs(candidate: Candidate) -> Mapping[str, int]:
    """Return the budget that CUDA graphs leave to blocks with the seconds of graphs."""
    budget, graphs_bytes = candidate.subject.case.budget_bytes, candidate.plan.settings.get(GRAPH_BYTES, 0)
    return {tier: count - graphs_bytes * (tier == VRAM) for tier, count in budget.items()}


def limit(schedule: Schedule, job: Job, machine: Machine) -> str:
    """Return the busiest resource: ``link``, ``disk``, ``compute``, or ``RAM`` where the processor waits for it."""
    hardware, busy = machine.hardware, schedule.busy_s()
    chain = {lane: busy.pop(lane, 0.0) for lane in (COMPUTE, CPU)}
    lane = max(busy, key=lambda name: busy[name], default="")
    if lane and busy[lane] > sum(chain.values()):
        return "disk" if lane == lane_of(DISK, RAM) else "link"
    on_processor = hardware.compute == RAM or chain[CPU] > chain[COMPUTE]
    read_s = sum(b.bytes * b.likely for b in job.blocks if b.uses) / (hardware.tier(RAM).bytes_per_s or float("inf"))
    if on_processor and (hardware.compute != RAM or 2 * read_s > sum(b.compute_s for b in job.blocks)):
        return "RAM"
    return "compute"


# -- reports


def _proposal(request: Request, machine: Machine, candidate: Candidate) -> Proposal:
    plan, subject = candidate.plan, candidate.subject
    return Proposal(
        plan=plan,
        step_s=plan.promise.step_s,
        limited_by=candidate.limited_by,
        techniques=list(effects(candidate)),
        command=_command(request, machine, candidate),
        gap=gap(candidate),
        precision=None if subject.precision == subject.own_precision else subject.precision,
        hardware=None if subject.machine.hardware == machine.hardware else subject.machine.hardware,
        timeline=foreseen(candidate.strategy, _SHOWN_PASSES),
    )


def effects(candidate: Candidate) -> Iterator[Effect]:
    """Yield the savings and costs of each technique, against the model all in the compute tier."""
    compute, choices = candidate.subject.machine.hardware.compute, candidate.plan.choices(STREAMING)
    resident_s = candidate.strategy.job.fixed_compute_s + sum(b.compute_s for b in candidate.strategy.job.blocks)
    more_s = max(0.0, candidate.plan.promise.step_s - resident_s)
    used = [b for b in candidate.strategy.job.blocks if b.uses]
    away = [b for b in used if choices[b.name] != RESIDENT]
    for choice, technique, what in (
        (FROM_RAM, STREAMING, "from RAM"),
        (FROM_DISK, STREAMING, "from disk"),
        (COMPUTE_RAM, HOST_COMPUTE, "computed by the processor, from RAM"),
    ):
        chosen = [b for b in away if choices[b.name] == choice]
        if chosen:
            count = sum(b.bytes for b in chosen)
            saves = {compute: count} | ({RAM: -count} if choice in (FROM_RAM, COMPUTE_RAM) and compute != RAM else {})
            share = count / sum(b.bytes for b in away)
            yield Effect(
                technique=technique,
                what=f"{len(chosen)} of {len(used)} blocks {what}",
                saves_bytes=saves,
                costs_s=more_s * share,
            )
    yield from _cache_effects(candidate)
    yield from _precision_effects(candidate)


def _precision_effects(candidate: Candidate) -> Iterator[Effect]:
    subject = candidate.subject
    if subject.precision == subject.own_precision:
        return
    parameters = list(subject.module.parameters())
    now_bytes = sum(p.numel() * p.element_size() for p in parameters)
    own = sum(p.numel() for p in parameters) * DTYPES[subject.own_precision].itemsize
    yield Effect(
        technique=_PRECISION,
        what=f"weights in {subject.precision} instead of {subject.own_precision}",
        saves_bytes={subject.machine.hardware.compute: own - now_bytes},
    )


def _cache_effects(candidate: Candidate) -> Iterator[Effect]:
    placed, hardware = candidate.strategy.placement, candidate.strategy.hardware
    if placed is None or not placed.resting:
        return
    compute = hardware.compute
    whole, takes = replace(placed, resting=0).held_bytes(compute), placed.held_bytes(compute)
    yield Effect(
        technique=kv_cache.NAME,
        what=f"{placed.resting} of {placed.tokens} tokens in RAM",
        saves_bytes={compute: whole[compute] - takes[compute], RAM: -takes[RAM]},
        costs_s=older_tokens_s(placed, hardware),
    )


def _command(request: Request, machine: Machine, candidate: Candidate) -> str:
    subject = candidate.subject
    hardware, budget = subject.machine.hardware, subject.machine.budget_bytes
    on_gpu = hardware.compute == VRAM
    run = GenerateRequest(
        model=request.model,
        prompt="..." if request.batch == 1 else None,
        device="auto" if hardware.compute == machine.hardware.compute else "cpu",
        max_new_tokens=request.new_tokens,
    )
    if candidate.is_rival:
        run = replace(run, plan=PLAN_FILE)
    else:
        run = replace(
            run,
            batch="auto" if request.batch == 1 else request.batch,
            vram=budget[VRAM] if on_gpu else None,
            ram=budget[RAM],
            precision=None if subject.precision == subject.own_precision else subject.precision,
            host_compute=request.host_compute or not on_gpu,
        )
    model, *options = words(run, always=("max_new_tokens",))
    prompts = [] if request.batch == 1 else ["--prompts", "FILE"]
    return shlex.join(["brim", "generate", model, *prompts, *options])
