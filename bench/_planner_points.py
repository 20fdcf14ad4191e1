"""The grid of planner.py: models, cells, and the plans of each cell with what is predicted of them."""

from __future__ import annotations

import random
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _checkpoint as checkpoints
from brim.core import Plan
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError
from brim.planning import file as plan_file
from brim.planning.inference.choose import search_generation
from brim.planning.opening import open_subject
from brim.planning.request import Answer, Machine, Proposal, Request, machine_of
from brim.planning.solver.step_profile import FULL, KEEP, Assignment, BlockProfile, Frame
from brim.planning.solver.streaming import plan_of
from brim.planning.strategy.search import TrainingSearch
from brim.planning.training import case_of
from brim.processes import python_command
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.units import exact_bytes

FORCED, SIMPLE, CHOSEN = "forced", "simple", "chosen"
# Deep and thin, few and wide, mostly vocabulary, and with few heads of keys: 340 to 570 MB in float32.
MODELS = {
    "deep": checkpoints.Shape(hidden=512, intermediate=1408, layers=24, heads=8, kv_heads=8, vocabulary=8_000),
    "wide": checkpoints.Shape(hidden=1536, intermediate=4096, layers=4, heads=12, kv_heads=12, vocabulary=8_000),
    "words": checkpoints.Shape(hidden=512, intermediate=1408, layers=8, heads=8, kv_heads=8, vocabulary=64_000),
    "grouped": checkpoints.Shape(hidden=1024, intermediate=3584, layers=8, heads=16, kv_heads=4, vocabulary=16_000),
}
ON_CUDA = {"large": checkpoints.FULL}
TINY = {"tiny": checkpoints.TINY}
_TINY_SHARE = 2.0  # most of what such a plan takes is the process, and a new one takes more than this
SHARES = (0.75, 0.5)  # of what the plain way takes: the budgets that are planned for
_ROOM = 1.25  # a plan made by hand has so much more than it is thought to take, to show what it does
_STEPS, _NEW_TOKENS = 4, 64


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model and one task. ``vram_cap`` None: on the processor."""

    model: str
    shape: checkpoints.Shape
    task: str
    batch: int
    seq: int
    new_tokens: int
    vram_cap: int | None
    shares: Sequence[float]
    few: bool  # two plans by hand and no more

    @property
    def name(self) -> str:
        return f"{self.model}-{self.task}"

    def request(self, folder: Path, budget_bytes: Mapping[str, int]) -> Request:
        amounts: dict[str, Any] = {tier: exact_bytes(count) for tier, count in budget_bytes.items()}
        precision = "fp32" if self.task == "train" else None
        return Request(
            model=str(folder),
            task=self.task,
            batch=self.batch,
            seq=self.seq,
            new_tokens=self.new_tokens,
            precision=precision,
            lossless=True,
            top=1,
            **{tier: amounts[tier] for tier in (VRAM, RAM) if tier in amounts},
        )

    def arguments(self, folder: Path, file: Path, scratch: Path) -> list[str]:
        """What follows ``brim`` to run the plan in ``file``."""
        device = ["--device", "cpu" if self.vram_cap is None else "cuda"]
        if self.task == "generate":
            prompt = " ".join(["a"] * self.seq)
            words = ["generate", str(folder), "--prompt", prompt, "--no-chat"]
            return [*words, "--max-new-tokens", str(self.new_tokens), "--plan", str(file), *device]
        data = scratch / "data.txt"
        data.write_text(" ".join(random.Random(0).choices("abc", k=(_STEPS + 1) * self.batch * self.seq)) + "\n")
        words = ["train", str(folder), "--data", str(data), "--output", str(scratch / "trained")]
        return [*words, "--steps", str(_STEPS), "--disk", str(scratch), "--plan", str(file), *device]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan. ``kind``: made by hand, one of the simple ones, or the planner's choice in its budget."""

    label: str
    kind: str
    plan: Plan
    machine: Machine

    @property
    def budget_bytes(self) -> dict[str, int]:
        return {tier: count for tier, count in self.plan.budget_bytes.items() if tier in (VRAM, RAM)}


def cells(*, tiny: bool, vram_cap: int | None) -> Iterator[Cell]:
    models = TINY if tiny else MODELS | (ON_CUDA if vram_cap else {})
    for name, shape in models.items():
        for task, batch, seq in (("generate", 1, 64), ("train", 4, 64)):
            yield Cell(
                model=name,
                shape=shape,
                task=task,
                batch=batch,
                seq=16 if tiny else seq,
                new_tokens=6 if tiny else _NEW_TOKENS,
                vram_cap=vram_cap,
                shares=(_TINY_SHARE,) if tiny else SHARES,
                few=tiny,
            )


def checkpoint(cell: Cell, directory: Path) -> Path:
    """The model's folder, written where it is not there yet."""
    folder = directory / f"planner-{cell.model}"
    checkpoints.write_checkpoint(folder, cell.shape)
    return folder


def write(path: Path, cell: Cell, point: Point) -> None:
    """The plan as ``brim plan --output`` writes one."""
    model = path.parent.parent / f"planner-{cell.model}"
    proposal = Proposal(
        plan=point.plan, step_s=point.plan.promise.step_s, limited_by="", techniques=(), command="", proved=False
    )
    request = cell.request(model, point.budget_bytes)
    plan_file.write(path, Answer(request=request, machine=point.machine, proposals=(proposal,)))


def make(cell: Cell, directory: Path) -> Iterator[Point]:
    """The plans of a cell: those made by hand, then the planner's choice for shares of what the plain one takes.

    Each is made when it is asked for, with the rates that the machine is known to have then.
    """
    folder = checkpoint(cell, directory)
    largest, plain = _largest(cell, folder), 0
    compute = largest.hardware.compute
    for point in (_generations if cell.task == "generate" else _trainings)(cell, folder):
        plain = max(plain, point.plan.promise.peak_bytes[compute])
        yield point
    for share in cell.shares:
        budget = {**largest.budget_bytes, compute: min(int(share * plain), largest.budget_bytes[compute])}
        request = cell.request(folder, budget)
        chosen = _chosen(request, directory)
        if chosen is not None:
            label = f"chosen in {share:.0%}"
            yield Point(label=label, kind=CHOSEN, plan=chosen, machine=machine_of(request))


def _chosen(request: Request, directory: Path) -> Plan | None:
    """What `brim plan` says in a process of its own, to which libraries are new as to a run; None: nothing fits."""
    with tempfile.TemporaryDirectory(prefix="planner-", dir=directory) as scratch:
        file = Path(scratch) / "plan.json"
        command = python_command("-m", *shlex.split(request.command()), "--output", file)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == BudgetError.exit_code:
            return None
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr[-500:]}")
        return replace(plan_file.read(file).plan, model=Path(request.model).name)


def _largest(cell: Cell, folder: Path) -> Machine:
    """This machine with all that may be used of it."""
    budget = {} if cell.vram_cap is None else {VRAM: cell.vram_cap}
    return machine_of(cell.request(folder, budget))


def _in(machine: Machine, made: Plan) -> Plan:
    """``made`` with room for what it may really take."""
    budget = {tier: int(_ROOM * made.promise.peak_bytes.get(tier, 0)) + (64 << 20) for tier in machine.budget_bytes}
    return replace(made, budget_bytes={t: min(n, machine.budget_bytes[t]) for t, n in budget.items()})


# -- generation


def _generations(cell: Cell, folder: Path) -> Iterator[Point]:
    """Shares of the blocks resident, through rings of several depths."""
    machine = _largest(cell, folder)
    opened = open_subject(cell.request(folder, machine.budget_bytes), machine)
    shapes = ((1.0, 2), (0.75, 2), (0.5, 2), (0.5, 4), (0.25, 2), (0.25, 3), (0.0, 2))
    for share, slots in shapes[:: len(shapes) - 1] if cell.few else shapes:
        machine = _largest(cell, folder)
        case = opened.on(machine).case
        chosen = search_generation(case)
        job = case.job(next(iter(chosen.cuts)), chosen.need)
        blocks = [block.name for block in job.blocks]
        home = FROM_DISK if machine.hardware.compute == RAM else FROM_RAM
        kept = _spread(blocks, share)
        choices = {name: RESIDENT if name in kept else home for name in blocks}
        placed = plan_of(job, machine.hardware, machine.budget_bytes, choices, slots)
        others = [one for one in chosen.plan.decisions if one.technique != STREAMING]
        made = replace(
            chosen.plan,
            decisions=(*placed.decisions, *others),
            promise=placed.promise,
            settings={**chosen.plan.settings, **placed.settings},
        )
        kind = SIMPLE if share in (0.0, 1.0) else FORCED
        yield Point(label=f"{share:.0%} resident, {slots} slots", kind=kind, plan=_in(machine, made), machine=machine)


def _spread(names: Sequence[str], share: float) -> set[str]:
    count = round(share * len(names))
    return {names[index * len(names) // count] for index in range(count)}


# -- training


def _trainings(cell: Cell, folder: Path) -> Iterator[Point]:
    """Ways as people set them up by hand, and mixes of them."""
    machine = _largest(cell, folder)
    start_bytes = machine.start_bytes()
    request = cell.request(folder, machine.budget_bytes)
    blocks = TrainingSearch(case_of(request, machine, start_bytes)).profile.blocks
    for label, kind, way in _ways(cell, machine.hardware.compute, blocks):
        machine = _largest(cell, folder)
        planner = TrainingSearch(case_of(request, machine, start_bytes))
        try:
            found = planner.prove(way, corrects=False)
        except BudgetError:
            continue
        if found is None:  # more than this machine has
            continue
        made = found.choice.plan(
            model=folder.name,
            hardware=machine.hardware.name,
            budget_bytes=machine.budget_bytes,
            promise=found.prediction.promise(),
        )
        yield Point(label=label, kind=kind, plan=_in(machine, made), machine=machine)


def _ways(cell: Cell, compute: str, blocks: Sequence[BlockProfile]) -> Iterator[tuple[str, str, Assignment]]:
    """What each is called, its kind, and the way."""
    away, home = ("disk", FROM_DISK) if compute == RAM else ("ram", FROM_RAM)
    names = [block.name for block in blocks]
    keep: dict[str, str] = dict.fromkeys(names, KEEP)
    full = {block.name: FULL if FULL in block.kept_bytes else KEEP for block in blocks}
    whole, half = Frame(micro_batch=cell.batch), Frame(micro_batch=cell.batch // 2)
    moved = Frame(micro_batch=cell.batch, states=away)
    fused = Frame(micro_batch=cell.batch, states=away, in_backward=True)
    shapes = (
        ("plain", SIMPLE, whole, 1.0, keep),
        ("checkpointing", SIMPLE, whole, 1.0, full),
        ("half micro-batches", FORCED, half, 1.0, keep),
        ("logits in pieces", FORCED, replace(whole, chunked=True), 1.0, keep),
        ("updated in backward", FORCED, replace(whole, in_backward=True), 1.0, keep),
        (f"states in {away}", FORCED, moved, 1.0, keep),
        (f"states in {away}, updated in backward", FORCED, fused, 1.0, full),
        (f"half streamed, states in {away}", FORCED, fused, 0.5, keep),
        (f"all streamed, states in {away}", SIMPLE, fused, 0.0, full),
    )
    for label, kind, frame, share, activations in shapes[:: len(shapes) - 1] if cell.few else shapes:
        kept = _spread(names, share)
        weights = {name: RESIDENT if name in kept else home for name in names}
        yield label, kind, Assignment(frame=frame, weights=weights, activations=activations)
