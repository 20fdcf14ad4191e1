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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from brim.core import options
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
from brim.run.data.dataset import IGNORED, Batches
from brim.run.ranks.checkpoint import SplitSaver
from brim.run.ranks.group import Ranks, joined
from brim.run.ranks.memory import Watched
from brim.run.ranks.model import Chunk, Part, Recipe, build, check, open_whole
from brim.run.ranks.plan import with_plan
from brim.run.ranks.request import SplitRequest, SplitTraining
from brim.run.train.finite import check_loss, explain_overflow
from brim.run.train.output_folder import OutputFolder, make_writable
from brim.run.train.report import Metrics, StepReport, finished
from brim.run.train.setup import claim, open_batches, steps_of
from brim.techniques.optimizers import set_lr
from brim.techniques.parallel import context_parallel, sharding

T = TypeVar("T")

_AXES = ("pp", "shard", "tp")
_BOTH = "cpu:gloo,cuda:nccl"
_ENGINE_WORDS = ("gloo", "NCCL", "Connection", "Timed out", "timed out", "Broken pipe")


def train(
    request: SplitRequest,
    *,
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
            return _Run(request, ranks, lambda report: None, lambda text: None).result()
        return _Run(request, ranks, on_step, on_note).result()

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
        self,
        request: SplitRequest,
        ranks: Ranks,
        on_step: Callable[[StepReport], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._ranks, self._on_step, self._on_note = ranks, on_step, on_note
        request.training.check()
        training, self._overwrite = request.training, request.training.overwrite
        if training.resume or ranks.restarts > 0:  # torchrun has restarted them
            training = replace(training, resume=True, overwrite=False)
        self._request = replace(request, training=training)
        self._losses: list[float] = []
        self._times_s: list[float] = []
        self._notes: list[str] = []

    def result(self) -> SplitTraining | None:
        ranks = self._ranks
        output = ranks.agree(self._claim, in_turn=True)
        with output or contextlib.nullcontext():
            return self._trained(output)

    def _trained(self, output: OutputFolder | None) -> SplitTraining | None:
        """Train; ``output`` is given on the first rank only."""
        ranks, request = self._ranks, self._request.training
        opened = ranks.agree(self._open, in_turn=True)
        ranks.agree(lambda: output.refuse(identities([opened.recipe.folder])) if output else None)
        split = opened.split
        device = ranks.device
        mesh = _mesh(split, device)
        if split.offload_shards:
            _take_processors(ranks.per_node, device)
        part = ranks.agree(lambda: build(opened.recipe, mesh, device, opened.training_model))
        meter = Watched(part, device, ranks.rank)
        steps = steps_of(request, opened.batches)
        saver = SplitSaver(
            ranks, part, opened.recipe, opened.output, request.model, request.course(steps),
            allow_non_finite=request.allow_non_finite, may_change=request.change_settings,
        )  # fmt: skip
        step = saver.start(opened.batches) if request.resume else 0
        if request.overwrite:
            ranks.agree(lambda: output.begin() if output else None)
        for note in saver.notes:
            self._note(note)
        if step >= steps:
            self._note(finished(step, steps, opened.output))
        self._train(opened, part, mesh, saver, step, steps, meter)
        saver.export(max(step, steps), opened.batches, output, keep=request.save_every is not None)
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
        precision, origin = training_precision(request.precision, request.method, compute)
        settings = {"folder": folder, "split": split, "precision": precision, "sequence": request.seq}
        recipe = options.build(Recipe, vars(request) | settings)
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

    def _train(
        self, opened: _Opened, part: Part, mesh: DeviceMesh, saver: SplitSaver, first: int, steps: int, meter: Watched
    ) -> None:  # fmt: skip
        request, ranks, split = self._request.training, self._ranks, opened.split
        stepper = Stepper(part, split, mesh, ranks.device, request.seq)
        shard, pp = mesh["shard"].get_local_rank(), mesh["pp"].get_local_rank()
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


@dataclass(frozen=True, kw_only=True)
class Share:
    """A data-parallel rank's rows of a batch, (rows, tokens) each, and a weight for each micro-batch."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def share_of(batch: dict[str, torch.Tensor], split: Split, shard: int, device: torch.device) -> Share:
    """The rows of the batch, which all ranks have read, for data-parallel rank ``shard``; ranks of a context-parallel
    group have the same rows and count different tokens of them.

    Weights are multiplied by the number of ranks, because FSDP2 averages gradients over them.
    """
    rows = split.micro_batch * split.micro_batches
    labels = batch["labels"]
    counted = torch.nn.functional.pad(labels[:, 1:] != IGNORED, (0, 1))
    dp, cp = divmod(shard, split.cp)
    mine = slice(dp * rows, (dp + 1) * rows)
    counts = context_parallel.own(counted[mine], cp, split.cp).sum(1)
    of_micro = counts.reshape(split.micro_batches, split.micro_batch).sum(1)
    weights = of_micro * split.shards / counted.sum()
    labels = labels[mine].clone()
    for index in (of_micro == 0).nonzero().flatten().tolist():  # the mean of no tokens is NaN, even times 0
        labels[index * split.micro_batch : (index + 1) * split.micro_batch] = 0
    return Share(
        input_ids=batch["input_ids"][mine].to(device), labels=labels.to(device),
        weights=weights.to(device, torch.float32),
    )  # fmt: skip


class Stepper:
    """Executes the training steps of this rank: its share of the batch through PyTorch's engine, clipping, update.

    The loss of a batch is the mean over its counted tokens, on all ranks: every micro-batch's mean is weighted by its
    share of the batch's counted tokens.
    """

    def __init__(self, part: Part, split: Split, mesh: DeviceMesh, device: torch.device, sequence: int) -> None:
        self._part, self._split, self._mesh, self._device = part, split, mesh, device
        self._schedule = _schedule(part, split, mesh, device, sequence) if split.pp > 1 else None

    def step(self, share: Share, *, lr: float, clip_norm: float | None) -> float:
        """Take a step; returns the loss of the full batch, on every rank."""
        set_lr(self._part.optimizer, lr)
        own = self._backward(share) if self._schedule is None else self._pipelined(share)
        if self._part.tied_weight is not None:
            self._part.tied_weight.add()
        for chunk in self._part.chunks:
            chunk.handle.settle()
        loss = self._total_loss(own)
        if clip_norm is not None:
            self._clip(clip_norm)
        with self._part.chunks[0].handle.stepping():
            self._part.optimizer.step()
        self._part.optimizer.zero_grad()
        return loss

    def _backward(self, share: Share) -> torch.Tensor:
        (chunk,) = self._part.chunks
        own = torch.zeros((), device=self._device)
        many, rows = self._split.micro_batches, self._split.micro_batch
        for index in range(many):
            at = slice(index * rows, (index + 1) * rows)
            with chunk.handle.micro_batch(last=index == many - 1):
                loss = chunk.module(share.input_ids[at], share.labels[at]) * share.weights[index]
                loss.backward()
            own += _local(loss.detach())
            del loss  # it would keep parts of the graph through the next forward pass
        return own

    def _pipelined(self, share: Share) -> torch.Tensor:
        chunks = self._part.chunks
        losses: list[torch.Tensor] = []
        inputs = (share.input_ids,) if chunks[0].module.part.embeds else ()
        last = chunks[-1].module.part.has_head
        named: dict[str, Any] = {"labels": share.labels} if last else {}
        target = share.weights if last else None
        assert self._schedule is not None
        with chunks[-1].handle.losses():
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **named)
        return sum((_local(loss.detach()) for loss in losses), torch.zeros((), device=self._device))

    def _total_loss(self, own: torch.Tensor) -> float:
        """The loss of the full batch, counting each tensor-parallel group once."""
        mine = own.to(torch.float64) * (self._mesh["tp"].get_local_rank() == 0)
        dist.all_reduce(mine)
        return float(mine) / self._split.shards

    def _clip(self, most: float) -> None:
        """Scale all gradients so that their norm over all ranks is at most ``most``.

        Like ``torch.nn.utils.clip_grad_norm_``, which supports neither several meshes nor pipelines.
        """
        trained = [p for group in self._part.optimizer.param_groups for p in group["params"] if p.grad is not None]
        kinds = sharding.by_mesh(trained)
        square = torch.zeros((), device=self._device)
        for kind in sharding.by_mesh(p for p in trained if not self._counted_elsewhere(p)):
            norm = torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])
            square += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        if self._split.pp > 1:
            dist.all_reduce(square, group=self._mesh.get_group("pp"))
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, most, square.sqrt())

    def _counted_elsewhere(self, parameter: torch.Tensor) -> bool:
        """True for a tied embedding and output table on later stages: the first stage counts its gradient."""
        tied_weight = self._part.tied_weight
        return tied_weight is not None and tied_weight.weight is parameter and self._mesh["pp"].get_local_rank() > 0


class _Stage(PipelineStage):
    """PyTorch's stage of a chunk whose weights are sharded by brim's handle, which defers ZeRO's reductions."""

    def __init__(self, chunk: Chunk, module: torch.nn.Module, **settings: Any) -> None:
        super().__init__(module, chunk.index, chunk.of, **settings)
        self._handle = chunk.handle

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._handle.set_last_backward(last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class _Wrapped(torch.nn.Module):
    """Hides that a chunk is FSDP's from PyTorch's stage, which would override the handle's settings."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(*inputs, **named)
        return output


def _schedule(part: Part, split: Split, mesh: DeviceMesh, device: torch.device, sequence: int) -> Any:
    """1F1B, or interleaved 1F1B where a rank has several chunks."""
    group = mesh.get_group("pp")
    tokens = split.between(sequence)
    hidden = torch.empty(split.micro_batch, tokens, part.hidden, dtype=part.dtype, device="meta")
    stages: list[Any] = [
        _Stage(chunk, _Wrapped(chunk.module), device=device, group=group, **_shapes(chunk, split, sequence, hidden))
        for chunk in part.chunks
    ]
    settings: dict[str, Any] = {
        "n_microbatches": split.micro_batches,
        "loss_fn": lambda loss, weight: loss * weight[0],
        "scale_grads": False,
    }
    if split.interleave == 1:
        return Schedule1F1B(stages[0], **settings)
    return ScheduleInterleaved1F1B(stages, **settings)


def _shapes(chunk: Chunk, split: Split, sequence: int, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs and outputs of a stage, so that PyTorch need not run it to infer them."""
    tokens = torch.empty(split.micro_batch, sequence, dtype=torch.long, device="meta")
    inner = hidden.clone().requires_grad_()
    embeds, has_head = chunk.module.part.embeds, chunk.module.part.has_head
    return {
        "input_args": tokens if embeds else inner,
        "output_args": torch.empty((), device="meta", requires_grad=True) if has_head else inner,
    }


def _local(loss: torch.Tensor) -> torch.Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
