"""``brim plan``: the fastest plans for a machine, which may be another one, and the changes needed when none fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, UsageError
from brim.estimation.models import weight_type
from brim.estimation.step_memory import Inputs
from brim.estimation.workload import ASKED
from brim.measure.user_cache import cache_folder, fingerprint
from brim.models.opening import prepare, read_tokenizer
from brim.planning.factory import is_factory, resolved
from brim.planning.file import described_source
from brim.planning.generation import plan_generation
from brim.planning.inference.machine import refuse_batch
from brim.planning.inference.memory import Sizes, scores_bytes
from brim.planning.nearest import Planner, in_the_least, nearest
from brim.planning.opening import Subjects, timed_weights
from brim.planning.precision_table import rows_of
from brim.planning.request import LOSSY, Answer, Machine, Proposal, Request, Row, machine_of
from brim.planning.router_file import (
    VERSION,
    RouterFile,
    Routers,
    Visits,
    named_visit,
    read_routers,
    statistics_of,
    write_routers,
)
from brim.planning.solver.passes import CPU
from brim.planning.solver.schedule import UPDATE, lane_of
from brim.planning.training import plan_training, precision_of
from brim.run.generate.load import load
from brim.run.plan.trials import MOST_PLANS, with_trials
from brim.techniques.experts.router_statistics import router_statistics
from brim.units import format_bytes

_FEWER_BITS = "int8"  # the default to compare 16 bits with
# What people say for a lane that sets the pace. Beside a GPU, the processor updates weights as fast as RAM is read.
_LIMITS = {
    lane_of(RAM, VRAM): "link",
    lane_of(VRAM, RAM): "link",
    lane_of(DISK, RAM): "disk",
    lane_of(RAM, DISK): "disk",
    CPU: "RAM",
    UPDATE: "RAM",
}
AUTO = "auto"


def plan(request: Request, *, precisions: bool = False, router_statistics: str | None = None) -> Answer:
    """Answer ``request``: proved proposals, or the changes that would be needed.

    ``precisions``: add a table of blocks' bytes and seconds in 8 bits and in 16, which is there in any case where
    fewer bits were considered. ``router_statistics``: a file, or "auto", as in ``router_file``. Raises UsageError and
    ModelError for wrong requests, UnsupportedError for a model that brim cannot run.
    """
    request.check()
    _check_generates(request, precisions, router_statistics)
    if is_factory(request.model):
        request = resolved(request)
    begin_s = time.perf_counter()
    machine = machine_of(request)
    if not is_factory(request.model):
        refuse_batch(request.batch, request.seq, machine.budget_bytes[RAM], labels=request.task == "train")
    routers = {} if router_statistics is None else routers_of(request, router_statistics)
    subjects = Subjects(request.model, routers)
    planner = plan_training if request.task == "train" else partial(plan_generation, subjects=subjects)
    if request.task == "generate" and not is_factory(request.model):
        _refuse_scores(request, machine, subjects)
    timed_from = timed_weights(request, machine)
    several = request if timed_from is None else replace(request, top=max(request.top, MOST_PLANS))
    try:
        proposals = planner(several, machine)
    except BudgetError as error:
        answer = _infeasible(request, machine, error, planner)
    else:
        if request.prefer == "memory" and request.task == "train":
            proposals = [*proposals, *(in_the_least(machine, lambda tight: planner(request, tight)) or [])]
        proposals = ranked(several, machine, proposals)
        answer = Answer(request=request, machine=machine, proposals=proposals)
        if timed_from is not None:
            answer = with_trials(answer, timed_from)
        answer = replace(answer, proposals=answer.proposals[: request.top])
    rows = _precision_rows(request, machine, subjects, compared=precisions)
    precision = _precision(request, machine, subjects)
    return replace(answer, precisions=rows, precision=precision, took_s=time.perf_counter() - begin_s)


def _precision(request: Request, machine: Machine, subjects: Subjects) -> tuple[str, str]:
    """The precision of plans that name no other, and its origin."""
    if request.task == "train":
        return precision_of(request, machine.hardware.compute)
    if request.precision is not None:
        return request.precision, ASKED
    return subjects.open(request, machine).precision, weight_type(described_source(request.model)).origin_and_type


def _refuse_scores(request: Request, machine: Machine, subjects: Subjects) -> None:
    """Raise BudgetError where the scores of last tokens alone, which no plan moves, exceed all memory.

    No request near it fits, and a search for one would take minutes.
    """
    subject = subjects.open(request, machine, request.precision)
    total = request.seq + request.new_tokens
    sizes = Sizes(batch=request.batch, prompt=request.seq, total=total, chunk=request.seq)
    bytes = scores_bytes(subject.module, sizes)
    most = sum(tier.capacity_bytes for tier in machine.hardware.tiers if tier.name in (VRAM, RAM))
    if bytes > most:
        raise BudgetError(
            f"--batch {request.batch} was given for {subject.name}, with {format_bytes(most)} of memory.",
            f"The logits of each sequence's last token alone take {format_bytes(bytes)}.",
            "Give a smaller --batch.",
            smallest_bytes={subject.machine.hardware.compute: bytes},
        )


def _check_generates(request: Request, precisions: bool, router_statistics: str | None) -> None:
    options = [name for name, on in (("--precisions", precisions), ("--router-statistics", router_statistics)) if on]
    if options and request.task != "generate":
        raise UsageError(
            f"Cannot use {options[0]} with --task {request.task}.", "It applies to --task generate only."
        )


def _infeasible(request: Request, machine: Machine, error: BudgetError, planner: Planner) -> Answer:
    needs, changes = nearest(request, machine, error, planner)
    return Answer(
        request=request,
        machine=machine,
        proposals=(),
        needs_bytes=needs,
        nearest=changes,
        refusal=" ".join(part for part in (error.asked, error.found) if part),
    )


def _precision_rows(request: Request, machine: Machine, subjects: Subjects, *, compared: bool) -> list[Row]:
    """A table of blocks in the opened precisions, if a lossy one is among them or ``compared``."""
    if compared:
        subjects.open(request, machine, None)
        subjects.open(request, machine, _FEWER_BITS)
    opened = {subject.precision: subject for subject in subjects.of(request)}
    if len(opened) < 2 or not any(name in LOSSY for name in opened):
        return []
    return rows_of([subject if subject.machine == machine else subject.on(machine) for subject in opened.values()])


def ranked(request: Request, machine: Machine, proposals: Sequence[Proposal]) -> list[Proposal]:
    """The best ``request.top`` of ``proposals`` by ``request.prefer``; proved ones only, without duplicates."""
    keys: dict[str, Callable[[Proposal], tuple[float, ...]]] = {
        "speed": lambda proposal: (),  # as they come: planners order plans of equal speed by the bytes that they move
        "memory": lambda proposal: (_compute_bytes(proposal, machine), proposal.step_s),
        "quality": lambda proposal: (is_lossy(proposal),),
    }
    kept: list[Proposal] = []
    for proposal in sorted((proposal for proposal in proposals if proposal.proved), key=keys[request.prefer]):
        same = (proposal.plan.decisions, proposal.plan.settings)
        if all(same != (other.plan.decisions, other.plan.settings) for other in kept):
            kept.append(replace(proposal, limited_by=_LIMITS.get(proposal.limited_by, proposal.limited_by)))
    return kept[: request.top]


def is_lossy(proposal: Proposal) -> bool:
    """Return whether weights are rounded further than in training."""
    return any(decision.choice in LOSSY for decision in proposal.plan.decisions)


def _compute_bytes(proposal: Proposal, machine: Machine) -> int:
    """Peak bytes of the tier that the plan computes in: RAM if it leaves the GPU alone."""
    compute = (proposal.hardware or machine.hardware).compute
    return proposal.plan.promise.peak_bytes.get(compute, 0)


_PROMPT_TOKENS, _NEW_TOKENS = 32, 32  # routers are told apart by then, and a streamed model is run in a minute


def routers_of(request: Request, where: str) -> Routers:
    """The statistics in the file ``where``; "auto" is one in the user's cache folder.

    Where there is no such file yet, the model is run for a few tokens, inside the budget of ``request`` where that is
    one of this machine, and the file is written. Raises UsageError for a model without weights or with other layers
    than the file has, FormatError for a file that is none, UnsupportedError for a model without routers.
    """
    path = _remembered(request) if where == AUTO else Path(where).expanduser()
    if not path.exists():
        write_routers(path, _watched(request))
    file = read_routers(path)
    if file.batch != request.batch:
        raise UsageError(
            f"Cannot use the router statistics in {path} for --batch {request.batch}.",
            f"They were recorded with a batch of {file.batch}; another batch uses other experts in a step.",
            "Name another file; brim records it if it does not exist.",
        )
    return {name: statistics_of(path, layer) for name, layer in file.layers.items()}


def _remembered(request: Request) -> Path:
    folder = _folder(request)
    name = fingerprint(sorted(folder.glob("*.safetensors")), VERSION, request.batch, _PROMPT_TOKENS, _NEW_TOKENS)
    return cache_folder() / f"routers-{name}.json"


def _folder(request: Request) -> Path:
    path = Path(request.model).expanduser()
    if not path.exists():
        raise UsageError(
            f"Cannot record router statistics of {request.model}.",
            "brim records them in a short run, which needs the model's weights.",
            "Give a folder with weights, or a file of statistics.",
        )
    return prepare(path)


def bundled_text() -> str:
    """About 800 words of plain English prose, written for this purpose."""
    return resources.files("brim.models").joinpath("quality.txt").read_text(encoding="utf-8")


def _watched(request: Request) -> RouterFile:
    folder = _folder(request)
    tokenizer = read_tokenizer(folder, str(request.model))
    ids = tokenizer(bundled_text(), return_tensors="pt").input_ids[0]
    rows = [ids.roll(-_PROMPT_TOKENS * row)[:_PROMPT_TOKENS] for row in range(request.batch)]
    here = request.gpu is None
    module = load(
        folder,
        vram=request.vram if here else None,
        ram=request.ram if here else None,
        inputs=Inputs(batch=request.batch, prompt=_PROMPT_TOKENS, total=_PROMPT_TOKENS + _NEW_TOKENS),
    )
    try:
        inputs = {"input_ids": torch.stack(rows), "attention_mask": torch.ones(len(rows), _PROMPT_TOKENS)}
        seen = router_statistics(module, inputs, new_tokens=_NEW_TOKENS)
    finally:
        handle: Any = module.brim
        handle.close()  # without bringing it all into memory
    # The first call is the prompt's: what a token asks for is in the others.
    layers = {
        name: Visits(count=layer.count, visits=tuple(named_visit(visit) for visit in layer.visits[1:]))
        for name, layer in seen.items()
    }
    return RouterFile(model=str(request.model), batch=request.batch, layers=layers)
