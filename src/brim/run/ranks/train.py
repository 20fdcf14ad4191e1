"""``torchrun ... --no-python brim train``: the same training on every rank, each with its part of the model.

PyTorch's engine does all communication of a step (FSDP2, DTensor, ``torch.distributed.pipelining``). Rank 0 writes
the only log; an error of any rank ends all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from brim.core.files import identities
from brim.core.hardware import RAM, VRAM
from brim.errors import BrimError, BudgetError, ModelError, is_out_of_memory
from brim.estimation.models import short
from brim.estimation.ranks.split import Split
from brim.estimation.workload import training_precision
from brim.measure.capacity import free_bytes
from brim.models.opening import prepare
from brim.models.training_model import TrainingModel
from brim.planning.inference.machine import refuse_batch
from brim.run.data.dataset import Batches
from brim.run.ranks.checkpoint import SplitSaver
from brim.run.ranks.group import Ranks, joined
from brim.run.ranks.memory import Watched
from brim.run.ranks.model import Part, Recipe, build, check, open_whole
from brim.run.ranks.plan import with_plan
from brim.run.ranks.request import SplitRequest, SplitTraining
from brim.run.ranks.step import Stepper, share_of
from brim.run.train.finite import check_loss, explain_overflow
from brim.run.train.output_folder import OutputFolder, make_writable
from brim.run.train.report import Metrics, StepReport, finished
from brim.run.train.setup import claim, open_batches

T = TypeVar("T")

_AXES = ("pp", "shard", "tp")
_BOTH = "cpu:gloo,cuda:nccl"
_ENGINE_WORDS = ("gloo", "NCCL", "Connection", "Timed out", "timed out", "Broken pipe")


def train(
    request: SplitRequest,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> SplitTraining | None:
    """Train on all ranks that torchrun has started. Returns the result on rank 0, None on the others.

    A rank that fails reports it through rank 0 and ends: the others may be waiting for it inside PyTorch's engine,
    which no exception interrupts. Restarted by torchrun, the training resumes from the last checkpoint.
    Raises UsageError if torchrun has not started this process.
    """

    def work(ranks: Ranks) -> SplitTraining | None:
        if not ranks.is_first:
            return _Run(request, ranks, lambda stage: None, lambda report: None, lambda text: None).result()
        return _Run(request, ranks, on_stage, on_step, on_note).result()

    return run_joined(request.timeout_s, work)


def run_joined(timeout_s: float, work: Callable[[Ranks], T]) -> T:
    """Run ``work`` as a rank; its error is reported once, by rank 0, and ends all ranks."""
    with joined(timeout_s) as ranks:
        try:
            return work(ranks)
        except BrimError as error:
            ranks.give_up(error)
        except Exception as error:
            ranks.give_up(_in_words(error, ranks))
        except KeyboardInterrupt:
            ranks.leave(128 + signal.SIGINT)
        except BaseException:  # SIGTERM, which torchrun sends when another rank has ended
            ranks.leave(128 + signal.SIGTERM)


def _in_words(error: Exception, ranks: Ranks) -> BaseException:
    if is_out_of_memory(error):
        return BudgetError(
            f"Rank {ranks.rank} cannot do its part.", f"Its memory ran out: {' '.join(str(error).split()):.300}",
            "Use more ranks; for training also a smaller --micro-batch, --checkpointing full or a higher --zero.",
        )  # fmt: skip
    if _is_of_engine(error):
        return ranks.stuck(error)
    traceback.print_exception(error)
    return error


def _is_of_engine(error: Exception) -> bool:
    """True for errors of communication and of memory, which the model does not cause."""
    words = any(word in str(error) for word in _ENGINE_WORDS)
    return isinstance(error, dist.DistError) or words or is_out_of_memory(error)


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """The opened model, data and settings, before anything is placed on a device."""

    recipe: Recipe
    training_model: TrainingModel
    batches: Batches
    split: Split
    output: Path
    precision_origin: str


class _Run:
    """The training of this rank, from its first step, or the step at which it resumes, to its last."""

    def __init__(
        self, request: SplitRequest, ranks: Ranks, on_stage: Callable[[str], None],
        on_step: Callable[[StepReport], None], on_note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._ranks, self._on_stage, self._on_step, self._on_note = ranks, on_stage, on_step, on_note
        request.training.check()
        training, self._overwrite = request.training, request.training.overwrite
        if _resumes(request, ranks):
            training = replace(training, resume=True, overwrite=False)
        self._request = replace(request, training=training)
        self._losses: list[float] = []
        self._times_s: list[float] = []
        self._notes: list[str] = []

    def result(self) -> SplitTraining | None:
        ranks = self._ranks
        self._on_stage("opening the model")
        output = ranks.agree(self._claim, in_turn=True)
        with output or contextlib.nullcontext():
            return self._trained(output)

    def _trained(self, output: OutputFolder | None) -> SplitTraining | None:
        """Train; ``output`` is given on the first rank only."""
        ranks, request = self._ranks, self._request.training
        opened = ranks.agree(self._open, in_turn=True)
        ranks.agree(lambda: output.refuse(identities([opened.recipe.folder])) if output else None)
        split = opened.split
        self._on_stage(f"splitting it over {split.describe()}")
        device = ranks.device
        mesh = _mesh(split, device)
        if split.offload_shards:
            _take_processors(ranks.per_node, device)
        part = ranks.agree(lambda: build(opened.recipe, mesh, device, opened.training_model))
        meter = Watched(part, device, ranks.rank)
        saver = SplitSaver(
            ranks, part, opened.recipe, opened.output, request.model, request.course(self._steps(opened)),
            allow_non_finite=request.allow_non_finite, may_change=request.change_settings,
        )  # fmt: skip
        step = saver.start(opened.batches) if request.resume else 0
        if request.overwrite:
            ranks.agree(lambda: output.begin() if output else None)
        for note in saver.notes:
            self._note(note)
        if step >= self._steps(opened):
            self._note(finished(step, self._steps(opened), opened.output))
        self._on_stage("training")
        self._train(opened, part, mesh, saver, step, meter)
        self._on_stage("saving")
        saver.export(max(step, self._steps(opened)), opened.batches, output, keep=request.save_every is not None)
        meter.write(opened.output)
        allocated = ranks.gathered(meter.peak_bytes)
        in_ram = ranks.gathered(meter.ram_bytes) if split.offload_shards else []
        if not ranks.is_first:
            return None
        step_s = statistics.median(self._times_s) if self._times_s else 0.0
        return SplitTraining(
            losses=self._losses, split=split, allocated_bytes=allocated, ram_bytes=in_ram, step_s=step_s,
            output=opened.output, notes=self._notes, precision=opened.recipe.precision,
            precision_origin=opened.precision_origin,
        )  # fmt: skip

    def _claim(self) -> OutputFolder | None:
        """The output folder, locked by the first rank for all; the other ranks only check that it is writable."""
        request = self._request.training
        if self._ranks.is_first:
            return claim(replace(request, overwrite=self._overwrite))
        make_writable(Path(request.output).expanduser())
        return None

    def _open(self) -> _Opened:
        ranks = self._ranks
        planned = self._request.training.plan is not None
        self._request = with_plan(self._request, ranks.world)
        self._request.check()
        request = self._request.training
        refuse_batch(request.batch, request.seq, free_bytes(RAM))  # every rank reads the full batch
        split = self._request.split(ranks.world, ranks.per_node)
        folder = prepare(request.model, trust_remote_code=request.trust_remote_code)
        compute = VRAM if ranks.device.type == "cuda" else RAM
        precision, origin = training_precision(request.precision, compute)
        recipe = Recipe(
            folder=folder, split=split, precision=precision,
            optimizer=request.optimizer, lr=request.lr, sequence=request.seq, checkpointing=request.checkpointing,
            seed=request.seed, trust_remote_code=request.trust_remote_code, method=request.method,
        )  # fmt: skip
        training_model = open_whole(recipe)
        check(training_model, recipe)
        output = Path(request.output).expanduser()
        return _Opened(
            recipe=recipe,
            training_model=training_model,
            batches=open_batches(request, folder),
            split=split,
            output=output,
            precision_origin="by the plan" if planned else origin,
        )

    def _steps(self, opened: _Opened) -> int:
        request = self._request.training
        return request.steps if request.steps is not None else opened.batches.steps(request.epochs or 1)

    def _train(
        self, opened: _Opened, part: Part, mesh: DeviceMesh, saver: SplitSaver, first: int, meter: Watched
    ) -> None:  # fmt: skip
        request, ranks, split = self._request.training, self._ranks, opened.split
        stepper = Stepper(part, split, mesh, ranks.device, request.seq)
        shard, pp = mesh["shard"].get_local_rank(), mesh["pp"].get_local_rank()
        steps = self._steps(opened)
        metrics = Metrics(opened.output, resumed_at=first) if ranks.is_first else None
        for number in range(first, steps):
            ranks.reach(number + 1)
            # Random numbers depend only on the step and the place in the mesh, not on the rank or earlier steps.
            torch.manual_seed(hash((request.seed, number, shard, pp)))
            begin_s = time.perf_counter()
            batch = next(opened.batches)
            lr = request.lr_at(number, steps)
            explaining = explain_overflow(number + 1, opened.output)
            with (
                meter.step(number - first),
                _splits(split, opened.training_model.opened.name, is_first=number == first),
                explaining,
            ):
                loss = stepper.step(share_of(batch, split, shard, ranks.device), lr=lr, clip_norm=request.clip_norm)
            report = StepReport(
                step=number + 1, steps=steps, loss=loss, lr=lr, tokens=batch["input_ids"].numel(),
                step_s=time.perf_counter() - begin_s, peak_bytes={}, moved_bytes={}, gpu_use=None,
            )  # fmt: skip
            self._losses.append(loss)
            self._times_s.append(report.step_s)
            if metrics is not None:
                metrics.write(report)
            self._on_step(report)
            if not request.allow_non_finite:
                check_loss(report, opened.output)
            every = request.save_every
            if every and (number + 1) % every == 0 and number + 1 < steps:
                saver.save(number + 1, opened.batches)
        if metrics is not None:
            metrics.close()

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._on_note(text)


@contextmanager
def _splits(split: Split, model: str, *, is_first: bool) -> Iterator[None]:
    """Explain an error of the first step: a decoder may need whole tensors, or all its layers."""
    try:
        yield
    except Exception as error:
        if not is_first or split.tp * split.pp == 1 or isinstance(error, BrimError) or _is_of_engine(error):
            raise
        raise ModelError(
            f"Cannot train {model} on {split.describe()}.", f"Its first step fails: {short(error)}",
            "Its layers may not split this way: use --zero, or the other of --tp and --pp.",
        ) from error  # fmt: skip


def _mesh(split: Split, device: torch.device) -> DeviceMesh:
    """Axes ``pp``, ``shard`` and ``tp``. Tensors in RAM beside a GPU are sent over gloo: norms, a tied gradient."""
    shape, both = (split.pp, split.shards, split.tp), split.offload_shards and device.type == "cuda"
    override: Any = dict.fromkeys(_AXES, _BOTH) if both else None
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=_AXES, backend_override=override)
    if split.shards > 1 and split.tp > 1:  # norms are summed over both axes at once
        mesh["shard", "tp"]._flatten("all_shards", backend_override=_BOTH if both else None)
    return mesh


def _take_processors(per_node: int, device: torch.device) -> None:
    """Use this rank's share of the node's processors for the optimizer's steps on the CPU: by default torchrun
    restricts it to one (torch/distributed/run.py, ``OMP_NUM_THREADS``)."""
    if device.type == "cuda" and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(max((os.cpu_count() or 1) // per_node, 1))


def _resumes(request: SplitRequest, ranks: Ranks) -> bool:
    """True if the ranks resume: as asked, or because torchrun has restarted them."""
    return request.training.resume or ranks.restarts > 0
