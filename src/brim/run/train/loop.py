"""``brim train``: a training loop that follows a plan, and changes to a smaller one if memory runs out."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from brim import accelerator
from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BrimError, BudgetError, is_out_of_memory
from brim.measure.monitor import Monitor, Usage
from brim.measure.nvml import busy_share
from brim.memory import heap
from brim.planning.inference.machine import held_to, on, within_room
from brim.planning.strategy.state import restore_rng, rng_state
from brim.planning.strategy.step import Fitted
from brim.run.data.dataset import IGNORED, Batches, Dataset, one_pass
from brim.run.train.finite import check_loss, explain_overflow
from brim.run.train.report import EvaluationReport, Metrics, StepReport, finished
from brim.run.train.request import Request, Training
from brim.run.train.saving import Saver
from brim.run.train.session import Terms
from brim.run.train.setup import Setup, claim, open_batches, open_dataset, set_up, steps_of
from brim.techniques.micro_batch import split
from brim.techniques.optimizers import set_lr


def train(
    request: Request,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
    on_note: Callable[[str], None] = lambda text: None,
    on_evaluation: Callable[[EvaluationReport], None] = lambda report: None,
    foresee: bool = False,
) -> Training:
    """Train inside the budget. ``on_stage`` is called with each stage, ``on_step`` with each step's report,
    ``on_note`` with unexpected events, ``on_evaluation`` with the loss of ``eval_data``. With ``foresee`` the result
    has the plan's predicted Timeline of a step, which takes an additional tracing.

    Writes ``metrics.jsonl`` and checkpoints into the output folder, and at the end the model. Raises UsageError and
    ModelError for invalid inputs, BudgetError (with the smallest sufficient budget) when nothing fits, ModelError for
    a loss that is not finite, TransferError when a disk refuses.
    """
    request.check()
    with on(request.device) as device:
        return _train(replace(request, device=device), on_stage, on_step, on_note, on_evaluation, foresee=foresee)


def _train(
    request: Request,
    on_stage: Callable[[str], None],
    on_step: Callable[[StepReport], None],
    on_note: Callable[[str], None],
    on_evaluation: Callable[[EvaluationReport], None],
    *,
    foresee: bool,
) -> Training:
    heap.return_freed_memory()
    stage = "measuring this machine (once)"

    def enter(now: str) -> None:
        nonlocal stage
        stage = now
        on_stage(now)

    try:
        enter(stage)
        with claim(request) as output:
            setup = set_up(request, output, enter)
            enter("opening the model and planning")
            limited = held_to(setup.budget_bytes, request.device)
            given = request.ram is not None or request.vram is not None or setup.plan is not None
            setup = replace(setup, budget_bytes=within_room(setup.budget_bytes, given=given))
            terms = replace(setup.terms(), foresee=foresee)
            with Monitor() as monitor:
                run = _Run(setup, terms, on_note, on_evaluation)
                try:
                    enter("training")
                    with limited():  # a step that exceeds the limit is repeated under a smaller plan
                        run.train(on_step)
                    enter("saving")
                    run.finish()
                finally:
                    run.close()
            return run.result(replace(monitor.usage(), ram_entry_bytes=terms.start_bytes))
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, BrimError) or not is_out_of_memory(error):
            raise
        raise _ran_out(stage, error) from error


def _ran_out(stage: str, error: BaseException) -> BudgetError:
    """The error for memory that ran out outside of a step, where a smaller plan does not help."""
    return BudgetError(
        f"The training stopped while {stage}.",
        f"The system has no more memory: {' '.join(str(error).split()) or type(error).__name__:.300}",
        "End other programs and continue with --resume: saved checkpoints are intact.",
    )


class _Run:
    """A training from its first step, or the step at which it resumes, to its last."""

    def __init__(
        self,
        setup: Setup,
        terms: Terms,
        on_note: Callable[[str], None],
        on_evaluation: Callable[[EvaluationReport], None],
    ) -> None:
        self._on_evaluation = on_evaluation
        self.evaluations: list[EvaluationReport] = []
        self._setup, self._request, self._on_note = setup, setup.request, on_note
        self.losses: list[float] = []
        self.times_s: list[float] = []
        self.notes: list[str] = []
        self.disk_bytes = 0
        self.timeline = Timeline("", measured=True)
        self.predicted: Timeline | None = None
        self._terms = terms
        self._batches: Batches = open_batches(setup.request, setup.folder)
        data = setup.request.eval_data
        self._evaluated = None if data is None else open_dataset(setup.request, data, setup.folder)
        self._steps = steps_of(setup.request, self._batches)
        self._saver = Saver(setup)
        self.session, self._next = self._saver.start(self._terms, self._batches)
        self.session_plan = self.session.plan
        with contextlib.ExitStack() as undo:
            undo.callback(self._saver.close)
            undo.callback(self.session.close)
            self._saver.refuse_foreign(self.session)
            if setup.request.overwrite:
                setup.output.begin()
            self._metrics = self._new_metrics()
            undo.callback(self._metrics.close)
            for text in self._saver.notes:
                self._note(text)
            if self._next >= self._steps:
                self._note(finished(self._next, self._steps, setup.output.path))
            undo.pop_all()

    def _new_metrics(self) -> Metrics:
        request = self._request
        shown = {name: value for name, value in vars(request).items() if isinstance(value, str | int | float)}
        return Metrics(self._setup.output.path, resumed_at=self._next, report_to=request.report_to, settings=shown)

    def train(self, on_step: Callable[[StepReport], None]) -> None:
        while self._next < self._steps:
            before = self._batches.state_dict()
            report = self._one_step(next(self._batches), before)
            if report is None:
                continue  # the rung has changed, and perhaps the next step with it
            self.losses.append(report.loss)
            self.times_s.append(report.step_s)
            self._metrics.write(report)
            on_step(report)
            if not self._request.allow_non_finite:
                check_loss(report, self._setup.output.path)
            every = self._request.save_every
            if every and self._next % every == 0 and self._next < self._steps:
                self._saver.save(self.session, self._next, self._batches)
            evaluates_every = self._request.eval_every
            if self._next == self._steps or (evaluates_every and self._next % evaluates_every == 0):
                self._evaluate()

    def _evaluate(self) -> None:
        """Compute and report the loss of ``eval_data``; if memory runs out, change the rung and repeat."""
        if self._evaluated is None:
            return
        begin_s = time.perf_counter()
        try:
            loss = _mean_loss(self.session.fitted, self._evaluated, self._request.seq)
        except (RuntimeError, MemoryError, OSError, BudgetError) as error:
            if not is_out_of_memory(error):
                raise
            failure = " ".join(str(error).split()) or type(error).__name__
        else:
            report = EvaluationReport(step=self._next, loss=loss, seconds=time.perf_counter() - begin_s)
            self.evaluations.append(report)
            self._metrics.evaluated(report)
            self._on_evaluation(report)
            return
        step = self._next
        self._one_rung_down(failure)
        if self._next == step:  # else the steps from there on are repeated, and this evaluation with them
            self._evaluate()

    def _one_step(self, batch: dict[str, torch.Tensor], before: dict[str, Any]) -> StepReport | None:
        """Take a step; returns None if it must be repeated because memory ran out."""
        rng = rng_state()
        lr = self._request.lr_at(self._next, self._steps)
        moved = dict(self.session.fitted.memory.recorder.copied_bytes)
        with Monitor() as monitor:
            begin_s = time.perf_counter()
            with explain_overflow(self._next + 1, self._setup.output.path):
                loss, failure = self._attempt(batch, lr)
            step_s = time.perf_counter() - begin_s
            usage = monitor.usage()
        if failure is not None:
            self._batches.load_state_dict(before)  # saved state must be that of the step's beginning
            restore_rng(rng)
            self._one_rung_down(failure)
            return None
        self._next += 1
        recorder = self.session.fitted.memory.recorder
        peak = {RAM: usage.ram_peak_bytes - self._terms.start_bytes}
        if accelerator.in_use():
            peak[VRAM] = usage.vram_reserved_bytes
        return StepReport(
            step=self._next,
            steps=self._steps,
            loss=loss,
            lr=lr,
            tokens=batch["input_ids"].numel(),
            step_s=step_s,
            peak_bytes=peak,
            moved_bytes={
                f"{source}->{target}": count - moved.get((source, target), 0)
                for (source, target), count in recorder.copied_bytes.items()
            },
            gpu_use=_gpu_use(),
        )

    def _attempt(self, batch: dict[str, torch.Tensor], lr: float) -> tuple[float, str | None]:
        """The loss, or why memory ran out. A separate call: the error would keep the step's tensors alive."""
        session = self.session
        set_lr(session.fitted.optimizer, lr)
        try:
            micros = split(batch, session.fitted.choice.micro_batch)
            return session.fitted.step(micros, clip_norm=self._request.clip_norm).item(), None
        except (RuntimeError, MemoryError, OSError, BudgetError) as error:
            if not is_out_of_memory(error):
                raise
            return math.nan, " ".join(str(error).split()) or type(error).__name__

    def _one_rung_down(self, failure: str) -> None:
        """Save the state from before the step, free everything, and open the model again on the next rung."""
        heap.collect_and_trim()
        session, step = self.session, self._next
        if not session.fitted.is_partly_updated:
            self._saver.save(session, step, self._batches)
        rung = session.rung + 1
        session.close()
        del session, self.session
        heap.collect_and_trim()
        self.session, self._next = self._saver.restart(self._terms, self._batches, rung)
        where = "the same step"
        if self._next != step:
            where = f"step {self._next + 1}, after the last checkpoint" if self._next else "the beginning"
            del self.losses[max(0, len(self.losses) - (step - self._next)) :]
            self._metrics.close()
            self._metrics = self._new_metrics()
            self.evaluations = [evaluation for evaluation in self.evaluations if evaluation.step <= self._next]
        fitted = self.session.fitted
        plan = f"micro-batches of {fitted.choice.micro_batch}, {fitted.summary()}"
        self._note(f"step {step + 1}: memory ran out ({failure:.300}). Continuing with {plan}, from {where}.")
        self.session_plan = self.session.plan

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._metrics.note(self._next, text)
        self._on_note(text)

    def finish(self) -> None:
        """Write the trained model into the output folder."""
        self.disk_bytes = self.session.fitted.memory.disk_peak_bytes
        self._saver.export(self.session, self._next, self._batches)

    def result(self, usage: Usage) -> Training:
        """The result after ``close``. ``usage`` covers the entire run."""
        promised = self.session_plan.promise.peak_bytes
        measured = {RAM: usage.ram_growth_bytes, VRAM: usage.vram_reserved_bytes, DISK: self.disk_bytes}
        return Training(
            losses=self.losses,
            plan=self.session_plan,
            promised_bytes={tier: promised[tier] for tier in measured if tier in promised},
            measured_bytes={tier: count for tier, count in measured.items() if tier in promised},
            step_s=statistics.median(self.times_s) if self.times_s else 0.0,
            output=self._setup.output.path,
            notes=self.notes,
            precision_origin=self._setup.precision()[1],
            truncated=self._batches.truncated,
            evaluations=self.evaluations,
            timeline=self.timeline,
            predicted=self.predicted,
        )

    def close(self) -> None:
        self._metrics.close()
        if hasattr(self, "session"):
            self.timeline, self.predicted = self.session.timelines()
        self._saver.close()
        if hasattr(self, "session"):
            self.session.close()


def _mean_loss(fitted: Fitted, data: Dataset, seq: int) -> float:
    """The mean loss over all of ``data``, every token with a label counted once.

    Micro-batches have the shape of the training's, and nothing is stored for a backward pass: memory stays below that
    of a step's forward pass, so the plan's promise holds.
    """
    total, counted = 0.0, 0
    for batch in one_pass(data, fitted.choice.micro_batch, pad_to=seq):
        tokens = int((batch["labels"][:, 1:] != IGNORED).sum())  # the first token is not predicted
        if tokens:
            total += float(fitted.evaluate(batch)) * tokens
            counted += tokens
    return total / counted if counted else math.nan


def _gpu_use() -> float | None:
    """Recent share of time in which the GPU in use computed; None without a GPU, or if it does not report it."""
    if not torch.cuda.is_initialized():
        return None
    return busy_share(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
