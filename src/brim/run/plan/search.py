"""``brim plan``: the fastest plans for a machine, which may be another one, and the changes needed when none fits."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from brim.core import Plan
from brim.core.hardware import DISK, RAM, VRAM
from brim.core.options import STORED, Method, build
from brim.errors import BudgetError, UsageError
from brim.estimation.models import quantized_by, weight_type
from brim.estimation.workload import ASKED
from brim.measure.user_cache import fingerprint
from brim.memory.scratch import scratch_folder
from brim.planning import file as plan_file
from brim.planning.factory import is_factory, resolved
from brim.planning.file import described_source
from brim.planning.generation import plan_generation
from brim.planning.inference.machine import refuse_batch
from brim.planning.inference.memory import Sizes, scores_bytes
from brim.planning.nearest import Planner, in_the_least, nearest
from brim.planning.opening import Subjects, timed_weights
from brim.planning.precision_table import rows_of
from brim.planning.request import LOSSY, PLAN_FILE, Answer, Machine, Proposal, Request, Row, machine_of
from brim.planning.seconds.measurement_cache import Remembered
from brim.planning.solver.passes import CPU
from brim.planning.solver.schedule import UPDATE, lane_of
from brim.planning.training import plan_training, precision_of
from brim.processes import bound, python_command
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
# Short runs of the best plans.
_METHOD = 1  # raised when the runs change
MOST_PLANS = 3
_UNCERTAIN = 1.5  # slower plans are not timed: most predictions are off by less
_LIMIT_S = 120.0  # of a plan's run, loading included
_TRIAL_STEPS, _TRIAL_TOKENS = 3, 16


def plan(
    model: str | Path, *, task: Literal["generate", "train"] = "generate",
    gpu: str | None = None, vram: str | int | None = None,
    ram: str | int | None = None, ram_gb_per_s: float | None = None, disk: str | int | None = None,
    batch: int = 1, seq: int = 1024, new_tokens: int = 128,
    precision: str | None = None, optimizer: str = "adamw", method: Method = "full",
    prefer: Literal["speed", "memory", "quality"] = "speed", lossless: bool = False,
    host_compute: bool = True, top: int = 5,
    precisions: bool = False,
) -> Answer:  # fmt: skip
    """Find the fastest plans to train or run a model that fit a machine.

    Where a model does not fit in this machine's memory, the best three plans are run for a few steps. Otherwise no
    weights are read.

    Each plan is proved: a step is traced with the plan in force, and the peaks of this trace are the promise.

    Args:
        model: A hub id, a name of the catalog, a Hugging Face folder, or a ``.gguf`` file; for training also
            ``"file.py:build"``, a function that returns a model and its inputs as a pair.
        task: ``"generate"`` or ``"train"``.
        gpu: A name of the catalog (``"RTX 3060"``). None: this machine.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"80%"`` of it. None: its memory without the CUDA context;
            on this machine nine tenths of the free memory.
        ram: Budget of host memory, in the same forms. None: nine tenths of the free memory; with a ``gpu``, of the
            RAM of the machine in which that GPU is sold, or of 64 GiB if the catalog does not have it.
        ram_gb_per_s: With a ``gpu``: the rate of its host's memory in GB/s. None: from the same machine as ``ram``.
        disk: Budget of disk space, in the same forms. None: for training, nine tenths of the free space; with a
            ``gpu``, 1 TiB.
        batch: Sequences of a step.
        seq: Tokens of a training sequence, or of the prompt.
        new_tokens: Tokens to generate.
        precision: For generating ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"int4"``; for
            training ``"fp32"``, ``"tf32"``, ``"bf16-mixed"``, ``"fp16-mixed"``, ``"bf16"``, ``"bf16-stochastic"``,
            ``"bf16-master"``, ``"stored"`` (LoRA) or ``"fp8"``. None: the planner's choice.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"sgd-momentum"``, ``"adafactor"``, ``"rmsprop"``,
            ``"adagrad"``, ``"lion"`` or ``"adamw8bit"``.
        method: ``"full"`` or ``"lora"``.
        prefer: The order of the plans: ``"speed"``, ``"memory"`` (least bytes in the compute tier), or ``"quality"``
            (the fastest that rounds no weights).
        lossless: Use no precision that rounds weights to 8 bits or fewer.
        host_compute: For generating: True lets the CPU compute blocks that are in RAM. Its kernels round differently;
            with False results are equal to the GPU's bit for bit.
        top: The largest number of plans.
        precisions: For generating: also compare each kind of block in 8 bits and in 16 bits.

    Returns:
        The answer: ``proposals``, the best first. If nothing fits it has none, and ``nearest`` has changes under
        which something fits.

    Raises:
        UsageError: A value that is not allowed, or an unknown name.
        ModelError: The model's files are missing or damaged.
        BudgetError: No plan can fit: the inputs alone exceed the memory.
        UnsupportedError: The model is one that brim cannot run.
    """
    return answer_to(build(Request, locals()), precisions=precisions)


def answer_to(request: Request, *, precisions: bool = False) -> Answer:
    """Answer ``request``: proved proposals, or the changes that would be needed.

    ``precisions``: add a table of blocks' bytes and seconds in 8 bits and in 16, which is there in any case where
    fewer bits were considered. Raises UsageError and ModelError for wrong requests, UnsupportedError for a model that
    brim cannot run.
    """
    request.check()
    if precisions and request.task != "generate":
        raise UsageError(
            f"Cannot use --precisions with --task {request.task}.", "It applies to --task generate only."
        )
    if is_factory(request.model):
        request = resolved(request)
    begin_s = time.perf_counter()
    machine = machine_of(request)
    if not is_factory(request.model):
        refuse_batch(request.batch, request.seq, machine.budget_bytes[RAM], labels=request.task == "train")
    subjects = Subjects()
    planner = plan_training if request.task == "train" else partial(plan_generation, subjects=subjects)
    if request.task == "generate" and not is_factory(request.model):
        _refuse_scores(request, machine, subjects)
    timed_from = timed_weights(request, machine)
    several = request if timed_from is None else replace(request, top=max(request.top, MOST_PLANS))
    try:
        proposals = planner(several, machine)
    except BudgetError as error:
        best = _infeasible(request, machine, error, planner)
    else:
        if request.prefer == "memory" and request.task == "train":
            proposals = [*proposals, *(in_the_least(machine, lambda tight: planner(request, tight)) or [])]
        proposals = ranked(several, machine, proposals)
        best = Answer(request=request, machine=machine, proposals=proposals)
        if timed_from is not None:
            best = with_trials(best, timed_from)
        best = replace(best, proposals=best.proposals[: request.top])
    rows = _precision_rows(request, machine, subjects, compared=precisions)
    precision = _precision(request, machine, subjects)
    return replace(best, precisions=rows, precision=precision, took_s=time.perf_counter() - begin_s)


def _precision(request: Request, machine: Machine, subjects: Subjects) -> tuple[str, str]:
    """The precision of plans that name no other, and its origin."""
    if request.task == "train":
        return precision_of(request, machine.hardware.compute)
    if request.precision is not None:
        return request.precision, ASKED
    precision, source = subjects.open(request, machine).precision, described_source(request.model)
    by_settings = f"by quantization_config of its configuration ({quantized_by(source)})"
    return precision, by_settings if precision == STORED else weight_type(source).origin_and_type


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


def _infeasible(request: Request, machine: Machine, error: BudgetError, planner: Planner) -> Answer:
    needs, changes = nearest(request, machine, error, planner)
    return Answer(
        request=request,
        machine=machine,
        proposals=(),
        needs_bytes=needs,
        nearest=changes,
        refusal=" ".join(part for part in (error.request, error.reason) if part),
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
        # Weights that are rounded further than in training come last.
        "quality": lambda proposal: (any(decision.choice in LOSSY for decision in proposal.plan.decisions),),
    }
    kept: list[Proposal] = []
    for proposal in sorted((proposal for proposal in proposals if proposal.proved), key=keys[request.prefer]):
        same = (proposal.plan.decisions, proposal.plan.settings)
        if all(same != (other.plan.decisions, other.plan.settings) for other in kept):
            kept.append(replace(proposal, limited_by=_LIMITS.get(proposal.limited_by, proposal.limited_by)))
    return kept[: request.top]


def _compute_bytes(proposal: Proposal, machine: Machine) -> int:
    """Peak bytes of the tier that the plan computes in: RAM if it leaves the GPU alone."""
    compute = (proposal.hardware or machine.hardware).compute
    return proposal.plan.promise.peak_bytes.get(compute, 0)


def with_trials(answer: Answer, folder: Path) -> Answer:
    """Return ``answer`` with its fastest plans timed by the weights in ``folder``, and the fastest of them first.

    Plans whose run fails follow. Runs are made once for a request, and their seconds are cached: with other plans,
    which differ with the bytes that a process holds, a plan that is made twice would not be the same plan.
    """
    near = [p for p in answer.proposals if p.step_s <= _UNCERTAIN * answer.proposals[0].step_s][:MOST_PLANS]
    if len(near) < 2 or not near[0].techniques:  # nothing is faster than all in memory
        return answer
    files = sorted(folder.glob("*.safetensors"))
    request = fingerprint(files, replace(answer.request, top=MOST_PLANS).command())
    memory = Remembered("timed-plans", (_METHOD, answer.machine.hardware.name, torch.__version__))
    if memory.get(request, count=1) is None:
        seconds = {f"{request} {_kind(each.plan)}": _run_s(answer, each) for each in near}
        measured = {name: [step_s] for name, step_s in seconds.items() if step_s is not None}
        memory.keep({request: [len(measured) + 1.0], **measured})
    timed = [_timed(each, memory.get(f"{request} {_kind(each.plan)}", count=1)) for each in near]
    timed.sort(key=lambda each: (not each.timed, each.step_s if each.timed else 0.0))
    return replace(answer, proposals=[*timed, *answer.proposals[len(near) :]])


def _kind(plan: Plan) -> str:
    """Return a name of the techniques and settings. Proposals of an answer differ in more than numbers of blocks."""
    choices = sorted({(decision.technique, decision.choice) for decision in plan.decisions})
    return fingerprint((), choices, len(plan.decisions), sorted(plan.settings.items()))


def _timed(proposal: Proposal, seconds: Sequence[float] | None) -> Proposal:
    if seconds is None:
        return proposal
    plan = replace(proposal.plan, promise=replace(proposal.plan.promise, step_s=seconds[0]))
    return replace(proposal, plan=plan, step_s=seconds[0], timed=True)


def _run_s(answer: Answer, proposal: Proposal) -> float | None:
    """Return the seconds of a step in a short run of the plan; None where it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="brim-trial-", dir=scratch_folder()) as scratch:
        file = Path(scratch) / PLAN_FILE
        plan_file.write(file, replace(answer, proposals=(proposal,)))
        device = [] if proposal.hardware is None else ["--device", "cpu"]
        words = [*_arguments(answer, Path(scratch)), *device, "--plan", str(file), "--json"]
        command = bound(python_command("-m", "brim", *words, "--", str(answer.request.model)))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
        except (subprocess.TimeoutExpired, OSError):
            return None
    if done.returncode:
        return None
    if answer.request.task == "train":
        return float(json.loads(done.stdout)["step_s"])
    if answer.request.batch == 1:
        seconds = json.loads(done.stdout)["steady_s_per_token"]  # None: the model ended after a few tokens
        return None if seconds is None else float(seconds)
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    return float(summary["seconds"] * summary["batch"] / summary["tokens"])


def _arguments(answer: Answer, scratch: Path) -> Sequence[str]:
    """Return the words of a short run: of a few steps over a generated text, or of a few tokens."""
    request = answer.request
    if request.task == "train":
        data = scratch / "data.txt"
        data.write_text("a b c d " * ((_TRIAL_STEPS + 1) * request.batch * request.seq), encoding="utf-8")
        return ["train", "--data", str(data), "--output", str(scratch / "trained"), "--steps", str(_TRIAL_STEPS)]
    words = ["generate", "--no-chat", "--max-new-tokens", str(min(_TRIAL_TOKENS, request.new_tokens))]
    if request.batch == 1:
        return [*words, "--prompt", "a b c"]
    prompts = scratch / "prompts.txt"
    prompts.write_text("a b c\n" * request.batch, encoding="utf-8")
    return [*words, "--prompts", str(prompts)]
