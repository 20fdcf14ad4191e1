"""Open a model on disk, plan its training inside a budget, and place its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Hardware, Plan, Timeline
from brim.core.hardware import DISK, RAM
from brim.core.options import Method
from brim.errors import BudgetError
from brim.estimation.inputs import check_positions
from brim.memory import heap
from brim.memory.heap import HeapLimits, HeapRetention, retention_limits, watched_limits
from brim.models.training_model import TrainingModel, make_optimizer, open_training_model
from brim.planning.file import PlanFile
from brim.planning.inference.machine import Device, make_memory
from brim.planning.inference.warm_up import spent, warm_up
from brim.planning.proof import check_promise
from brim.planning.seconds.spans import ComputeSpans
from brim.planning.strategy.case import TrainingCase, TrainingStrategy
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.choose import follow, search_training, within
from brim.planning.strategy.ladder import Orders
from brim.planning.strategy.predicted_timeline import placed
from brim.planning.strategy.prediction import Prediction, TrainingStep, works_in_place
from brim.planning.strategy.search import TrainingSearch
from brim.planning.strategy.step import Fitted, apply_choice
from brim.planning.training import BESIDE_BYTES, training_limits
from brim.run.train.plan import partition_of
from brim.techniques import optimizers
from brim.techniques.blocks import Partition, find_blocks
from brim.techniques.checkpointing import technique as checkpointing


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings of a session that hold on every rung. The RAM budget counts from ``start_bytes`` of resident set."""

    method: Method
    precision: str
    optimizer: str
    lr: float
    batch: int
    seq: int
    seed: int
    clip_norm: float | None
    orders: Orders
    hardware: Hardware
    budget_bytes: Mapping[str, int]
    device: Device
    disk_folder: str | None
    start_bytes: int
    trust_remote_code: bool = False
    plan: PlanFile | None = None
    foresee: bool = False  # predict the Timeline of a step


class Session:
    """A model in training. ``rung`` is its plan's place on the ladder; ``planned``: the plan is none of the rungs.

    ``foreseen`` is the predicted step, beginning at 0 s.
    """

    def __init__(
        self,
        terms: Terms,
        training_model: TrainingModel,
        fitted: Fitted,
        strategy: TrainingStrategy,
        heap_limits: HeapLimits | None = None,
        foreseen: Timeline | None = None,
    ) -> None:
        self.terms, self.training_model, self.fitted = terms, training_model, fitted
        self.rung, self.planned, self.foreseen = strategy.rung, strategy.planned, foreseen
        self._heap_retention: HeapRetention | None = None
        self._heap_limits = heap_limits
        assert fitted.streaming is not None, "streaming is in force"
        blocks = [name for name, _ in fitted.streaming.blocks]
        self._spans = ComputeSpans(training_model.module, blocks, fitted.memory, fitted.optimizer)

    @classmethod
    def open(
        cls,
        terms: Terms,
        folder: Path,
        *,
        name: str,
        rung: int | None = None,
        plan: Plan | None = None,
        has_holes: bool = False,
    ) -> Session:
        """Open the model ``name`` in ``folder``, choose a strategy, place the weights.

        ``terms.plan`` is followed exactly; so is ``plan``, of an earlier run, if it still fits and obeys the orders.
        With ``rung`` the first rung from there on that fits is taken, with neither the fastest strategy that fits.
        ``has_holes``: this process has trained before, on an earlier rung. Raises BudgetError when nothing fits,
        UsageError if ``terms.plan`` was made for something else.
        """
        training_model = open_training_model(
            folder,
            method=terms.method,
            precision=terms.precision,
            seed=terms.seed,
            trust_remote_code=terms.trust_remote_code,
        )
        check_positions(training_model.opened.module, terms.seq)
        if terms.plan is not None:
            terms.plan.check(model=training_model.module, hardware=terms.hardware, task="train")
        warm_up(training_model.module, terms.hardware, terms.batch * terms.seq, precision=terms.precision)
        search = TrainingSearch(training_case(terms, training_model))
        strategy = _chosen(search, terms, rung, plan)
        limits = _heap_limits(terms, strategy.prediction, has_holes=has_holes)
        promise = strategy.prediction.with_heap(limits).promise()
        settled = strategy.choice.plan(
            model=name, hardware=terms.hardware.name, budget_bytes=terms.budget_bytes, promise=promise
        )
        step, foreseen = search.case.step, None
        if terms.foresee:
            foreseen = replace(step, partition=strategy.partition).foresee(strategy.choice, promise.step_s)
            heap.collect_and_trim()
        assert step.inputs is not None, "training_case has set them"
        fitted = _place(terms, training_model, settled, strategy.partition, step.inputs(1))
        return cls(terms, training_model, fitted, strategy, limits, foreseen)

    def begin(self) -> None:
        """Begin with steps after a checkpoint was restored: reading it leaves holes of other sizes than steps do, so
        only from here on freed memory is retained for reuse.
        """
        if self._heap_limits is not None:
            heap.collect_and_trim()
            self._heap_retention = HeapRetention(self.terms.start_bytes + self._heap_limits.return_above_bytes)

    @property
    def plan(self) -> Plan:
        return self.fitted.plan

    def timelines(self) -> tuple[Timeline, Timeline | None]:
        """The measured timeline, and the predicted one. Recording ends."""
        self._spans.close()
        measured = self.fitted.timeline()
        return measured, None if self.foreseen is None else placed(self.foreseen, measured)

    def close(self) -> None:
        """Free everything without loading it into memory."""
        self._spans.close()
        self.fitted.close()
        del self.training_model, self.fitted
        if self._heap_retention is not None:
            self._heap_retention.close()
        heap.collect_and_trim()


def _heap_limits(terms: Terms, prediction: Prediction, *, has_holes: bool) -> HeapLimits | None:
    """Limits for retaining freed memory where tensors are in the heap and the budget has room: fresh pages are slow.

    A heap retained on an earlier rung has holes that only a watched heap returns.
    """
    if terms.hardware.compute != RAM:
        return None
    promised = prediction.peak_bytes[RAM]
    return retention_limits(promised, terms.budget_bytes[RAM]) or (watched_limits(promised) if has_holes else None)


def _place(terms: Terms, training_model: TrainingModel, plan: Plan, partition: Partition, example: Any) -> Fitted:
    optimizer = make_optimizer(terms.optimizer, training_model.module, terms.lr)
    memory = make_memory(plan, terms.hardware, terms.device, Timeline(f"{plan.model} train", measured=True))
    memory.use_disk(folder=terms.disk_folder, limit_bytes=terms.budget_bytes.get(DISK))
    return apply_choice(training_model.module, optimizer, plan, memory, partition, training_model.weights, example)


def training_case(terms: Terms, training_model: TrainingModel) -> TrainingCase:
    """The case for the search of ``brim train``."""
    model, orders = training_model.module, terms.orders

    def inputs(count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, terms.seq, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    step = TrainingStep(
        name=training_model.opened.name,
        model=model,
        partition=find_blocks(model, stay=training_model.stay),
        weights=replace(training_model.weights, verify=None),
        optimizer=lambda copy: make_optimizer(terms.optimizer, copy, terms.lr),
        inputs=inputs,
        batch=terms.batch,
        hardware=terms.hardware,
        device=terms.device,
        budget_bytes=terms.budget_bytes,
        clip_norm=terms.clip_norm,
        spent_bytes=partial(spent, terms.start_bytes, BESIDE_BYTES),
    )
    limits = training_limits(
        model, terms.precision, terms.budget_bytes, clips=terms.clip_norm is not None, adapters=training_model.stay
    )
    limits = within(orders, limits)
    return TrainingCase(
        step=step,
        state_bytes=partial(optimizers.state_bytes, terms.optimizer),
        precision=terms.precision,
        limits=limits,
        tokens=terms.seq,
        orders=orders,
        stay=training_model.stay,
        in_place=lambda: works_in_place(model, inputs(1)),
        finer=limits.streams,
        proves_all=True,
    )


def _chosen(search: TrainingSearch, terms: Terms, rung: int | None, plan: Plan | None) -> TrainingStrategy:
    """Choose the strategy, as described in ``Session.open``."""
    case = search.case

    def follow_plan(given: Plan) -> TrainingStrategy:
        return follow(search, given, partition_of(case.step.model, given, case.stay))

    if terms.plan is not None and rung is None:
        strategy = follow_plan(terms.plan.plan)
        check_promise(terms.plan.plan, strategy.prediction.peak_bytes, case.step.spent_bytes())
        return strategy
    if plan is not None and _is_ordered(terms.orders, Choice.of(plan), case.step.model):
        with contextlib.suppress(BudgetError):
            return follow_plan(plan)
    (strategy,) = search_training(search, start=rung or 0)
    return strategy


def _is_ordered(orders: Orders, choice: Choice, model: nn.Module) -> bool:
    fixed = orders.fixed(checkpointing.blocks(model))
    streams = orders.stream_weights is not False or not choice.streams
    return streams and all(getattr(choice, name) == value for name, value in fixed.items())
