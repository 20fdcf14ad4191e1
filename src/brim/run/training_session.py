"""From a model on disk to a model in training inside a budget: opened, planned, placed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Hardware, Plan, Timeline
from brim.core.hardware import DISK, RAM
from brim.errors import BudgetError, UnsupportedError
from brim.memory import heap
from brim.memory.kept_heap import HeapLimits, KeptHeap, kept_limits
from brim.planner.step_profile import KEEP, OFFLOAD, Limits
from brim.run import plan_file
from brim.run.fitted import Fitted, apply_choice
from brim.run.fitting import Device, Need, make_memory, make_plan
from brim.run.foreseen_step import placed
from brim.run.inference import warm_up
from brim.run.plan_file import PlanFile
from brim.run.planning_training import OWN_STEPS, program_bytes, training_limits
from brim.run.spans import ComputeSpans
from brim.run.trainee import Method, Trainee, make_optimizer, open_trainee
from brim.run.training_case import Case
from brim.run.training_choice import Choice
from brim.run.training_ladder import (
    Found,
    Orders,
    Subject,
    climb_down,
    fits,
    is_small,
    ladder,
    no_smaller,
    too_small,
)
from brim.run.training_plan import partition_of
from brim.run.training_prediction import Prediction, Rehearsal, works_in_place
from brim.run.training_search import Planner
from brim.techniques import checkpointing, chunked_loss, optimizers
from brim.techniques.blocks import Partition, find_blocks, tensor_bytes
from brim.techniques.weight_streaming import NAME as STREAMING

_PROOFS = 4  # how often a streaming plan is tightened before it is given up
_WORTH_IT = 0.02  # a plan that is predicted to be faster by less is not worth being another one than a rung


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a session keeps to on whatever rung. The RAM budget counts from a resident set of ``start_bytes``."""

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
    foresee: bool = False  # whether a session has the Timeline that its plan foresees


class Session:
    """A model in training. ``rung`` is where on the ladder its plan stands; ``planned``: it is none of the rungs.

    ``foreseen`` is a step from 0 s on, as it was predicted.
    """

    def __init__(
        self,
        terms: Terms,
        trainee: Trainee,
        fitted: Fitted,
        found: Found,
        heap_limits: HeapLimits | None = None,
        foreseen: Timeline | None = None,
    ) -> None:
        self.terms, self.trainee, self.fitted = terms, trainee, fitted
        self.rung, self.planned, self.foreseen = found.rung, found.planned, foreseen
        self._kept_heap: KeptHeap | None = None
        if heap_limits is not None:
            self._kept_heap = KeptHeap(terms.start_bytes + heap_limits.return_above_bytes)
        assert fitted.streaming is not None, "it is in force"
        blocks = [name for name, _ in fitted.streaming.blocks]
        self._spans = ComputeSpans(trainee.module, blocks, fitted.memory, fitted.optimizer)

    @classmethod
    def open(
        cls, terms: Terms, folder: Path, *, name: str, rung: int | None = None, plan: Plan | None = None
    ) -> Session:
        """Open the model ``name`` in ``folder``, choose what to do, place the weights.

        With ``terms.plan`` that is done and nothing else; so is ``plan``, that of an earlier run, where it still fits
        and is still what was ordered. With ``rung`` it is the first rung from there on that fits, and with neither
        the fastest way that is known to fit. Raises BudgetError when nothing fits, UsageError where ``terms.plan``
        was made for something else.
        """
        trainee = open_trainee(
            folder,
            method=terms.method,
            precision=terms.precision,
            seed=terms.seed,
            trust_remote_code=terms.trust_remote_code,
        )
        if terms.plan is not None:
            plan_file.check(terms.plan, model=trainee.module, hardware=terms.hardware, task="train")
        warm_up(trainee.module, terms.hardware, terms.seq)
        search = _Search(terms, trainee)
        partition, found = search.choose(rung, plan)
        limits = _heap_limits(terms, found.prediction, rung or 0)
        promise = found.prediction.with_heap(limits).promise()
        made = found.choice.plan(
            model=name, hardware=terms.hardware.name, budget_bytes=terms.budget_bytes, promise=promise
        )
        foreseen = search.foresee(partition, found.choice) if terms.foresee else None
        fitted = _place(terms, trainee, made, partition, search.inputs(1))
        return cls(terms, trainee, fitted, found, limits, foreseen)

    @property
    def plan(self) -> Plan:
        return self.fitted.plan

    def timelines(self) -> tuple[Timeline, Timeline | None]:
        """What was measured, and what was foreseen beside it. No more is recorded after that."""
        self._spans.close()
        measured = self.fitted.timeline()
        return measured, None if self.foreseen is None else placed(self.foreseen, measured)

    def close(self) -> None:
        """Let everything go without bringing it back into memory."""
        self._spans.close()
        self.fitted.close()
        del self.trainee, self.fitted
        if self._kept_heap is not None:
            self._kept_heap.close()
        heap.trim()


def _heap_limits(terms: Terms, found: Prediction, rung: int) -> HeapLimits | None:
    """Where tensors are in the heap and the budget has room, what is freed is kept: fresh pages are dear.

    A heap that was kept on a rung above has holes that only watching gives back.
    """
    if terms.hardware.compute != RAM:
        return None
    promised = found.peak_bytes[RAM]
    watched = HeapLimits(promised_bytes=promised, return_above_bytes=promised) if rung else None
    return kept_limits(promised, terms.budget_bytes[RAM]) or watched


def _place(terms: Terms, trainee: Trainee, plan: Plan, partition: Partition, example: Any) -> Fitted:
    optimizer = make_optimizer(terms.optimizer, trainee.module, terms.lr)
    memory = make_memory(plan, terms.hardware, terms.device, Timeline(f"{plan.model} train", measured=True))
    memory.use_disk(folder=terms.disk_folder, limit_bytes=terms.budget_bytes.get(DISK))
    return apply_choice(trainee.module, optimizer, plan, memory, partition, trainee.weights, example)


class _Search:
    """The planner, the ladder, and below it weight streaming planned for the budget and proved."""

    def __init__(self, terms: Terms, trainee: Trainee) -> None:
        self._terms, self._trainee = terms, trainee
        self._partition = find_blocks(trainee.module, stay=trainee.stay)
        self._rehearsal = Rehearsal(
            name=trainee.opened.name,
            model=trainee.module,
            partition=self._partition,
            weights=replace(trainee.weights, verify=None),
            optimizer=lambda model: make_optimizer(terms.optimizer, model, terms.lr),
            inputs=self.inputs,
            batch=terms.batch,
            hardware=terms.hardware,
            device=terms.device,
            budget_bytes=terms.budget_bytes,
            clip_norm=terms.clip_norm,
            spent_bytes=lambda: program_bytes(terms.start_bytes),
        )

    def foresee(self, partition: Partition, choice: Choice) -> Timeline:
        made = replace(self._rehearsal, partition=partition).foresee(choice)
        heap.trim()
        return made

    def inputs(self, count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, self._terms.seq, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    def choose(self, rung: int | None, plan: Plan | None) -> tuple[Partition, Found]:
        """What is to be done, as ``Session.open`` says."""
        if self._terms.plan is not None and rung is None:
            return self.follow(self._terms.plan.plan)
        if plan is not None and self._is_ordered(Choice.of(plan)):
            with contextlib.suppress(BudgetError):
                return self.follow(plan)
        return self.fastest() if rung is None else self.search(rung)

    def _is_ordered(self, choice: Choice) -> bool:
        fixed = self._terms.orders.fixed(checkpointing.blocks(self._trainee.module))
        streams = self._terms.orders.stream_weights is not False or not choice.streams
        return streams and all(getattr(choice, name) == value for name, value in fixed.items())

    def follow(self, plan: Plan) -> tuple[Partition, Found]:
        """What ``plan`` decided, proved for the budget that there is now."""
        choice, budget = Choice.of(plan), self._terms.budget_bytes
        partition = partition_of(self._trainee.module, plan, self._trainee.stay)
        found = replace(self._rehearsal, partition=partition).predict(choice)
        if not fits(found.peak_bytes, budget):
            raise too_small(found.peak_bytes, budget)
        return partition, Found(rung=-1, choice=choice, prediction=found, planned=True)

    def fastest(self) -> tuple[Partition, Found]:
        """What the ladder finds, or what the planner does where that is faster.

        What is all in memory, or all that was ordered, is not made faster by any plan.
        """
        refused: BudgetError | None = None
        try:
            partition, found = self.search(0)
        except BudgetError as error:
            refused = error
        else:
            if found.rung == 0 or not found.fits:
                return partition, found
        limits = self._limits()
        if limits is None or (planned := self._planned(limits, None if refused else found)) is None:
            if refused is not None:
                raise refused
            return partition, found
        return self._partition, planned

    def _limits(self) -> Limits | None:
        """What the planner may do within the orders; None where it cannot keep to them."""
        terms, orders = self._terms, self._terms.orders
        if orders.offload_activations:
            return None  # a number of blocks is no choice for each of them
        if is_small(self._trainee.module):
            return None  # its step is over before a plan is made
        adapters = self._trainee.stay
        limits = training_limits(
            self._trainee.module,
            terms.precision,
            terms.budget_bytes,
            clips=terms.clip_norm is not None,
            adapters=adapters,
        )
        fixed: dict[str, object] = {}
        if orders.micro_batch is not None:
            fixed["micro_batch"] = orders.micro_batch
        if orders.offload_optimizer is not None:
            fixed["states"] = orders.offload_optimizer
            if orders.offload_optimizer == KEEP:
                fixed["gradients"] = KEEP
        kept = {None: limits.activations, "none": (KEEP, OFFLOAD)}
        activations = kept.get(orders.checkpointing, (str(orders.checkpointing),))
        if orders.offload_activations == 0:
            activations = tuple(choice for choice in activations if choice != OFFLOAD)
        return replace(
            limits,
            fixed=fixed,
            activations=activations,
            streams=limits.streams and orders.stream_weights is not False,
        )

    def _planned(self, limits: Limits, found: Found | None) -> Found | None:
        """What the planner offers where it is faster than ``found``, every layer of it proved."""
        terms = self._terms
        planner = Planner(
            Case(
                rehearsal=self._rehearsal,
                optimizer=terms.optimizer,
                precision=terms.precision,
                limits=limits,
                tokens=terms.seq,
            )
        )
        try:
            (best,) = planner.search(1)
        except BudgetError:
            return None
        way = None if found is None else planner.way(found.choice)
        if found is not None:
            known_s = found.prediction.step_s if way is None else planner.seconds(way)
            if best.step_s > known_s * (1 - _WORTH_IT):
                return None
        proved = self._rehearsal.predict(best.choice)
        if not fits(proved.peak_bytes, terms.budget_bytes):
            return None
        rung = 0 if found is None else found.rung
        prediction = replace(proved, step_s=best.step_s, bound_s=best.prediction.bound_s, limited_by=best.limited_by)
        return Found(rung=rung, choice=best.choice, prediction=prediction, planned=True)

    def search(self, start: int) -> tuple[Partition, Found]:
        """The first rung from ``start`` on that fits."""
        start, terms = max(0, start), self._terms
        subject = Subject(
            compute=terms.hardware.compute,
            batch=terms.batch,
            blocks=checkpointing.blocks(self._trainee.module),
            in_place=works_in_place(self._trainee.module, self.inputs(1)),
            chunkable=_chunkable(self._trainee.module),
            single_pass=terms.clip_norm is None and terms.precision != "fp16-mixed",
            gradients_leave=terms.precision != "fp16-mixed",
            states_leave=terms.precision not in OWN_STEPS,
        )
        rungs = ladder(subject, replace(terms.orders, precision=terms.precision))
        if start > len(rungs):  # weight streaming, below the last of them, was in force
            raise no_smaller()
        found = climb_down(
            rungs,
            self._rehearsal.predict,
            terms.budget_bytes,
            compute=terms.hardware.compute,
            batch=terms.batch,
            order=terms.orders,
            start=start,
            floor=self._floor_bytes,
            one_by_one=is_small(self._trainee.module),
        )
        if found.fits:
            return self._partition, found
        if terms.orders.stream_weights is False or not (subject.states_leave or self._streamable_are_frozen()):
            peak_bytes = found.prediction.peak_bytes
            raise no_smaller() if fits(peak_bytes, terms.budget_bytes) else too_small(peak_bytes, terms.budget_bytes)
        partition, choice, prediction = self._streamed(found)
        return partition, Found(rung=len(rungs), choice=choice, prediction=prediction)

    def _floor_bytes(self, choice: Choice) -> Mapping[str, int]:
        """Weights, gradients and optimizer states that a choice keeps for good in the compute tier."""
        trained = sum(tensor_bytes(p) for p in self._trained())
        held = self._partition.bytes
        if not choice.in_backward and choice.gradients == "keep":
            held += trained
        if choice.states == "keep":
            held += sum(optimizers.state_bytes(self._terms.optimizer, self._trained()))
        return {self._terms.hardware.compute: held}

    def _streamable_are_frozen(self) -> bool:
        """Whether what can be streamed is only read. What is trained would be updated block by block."""
        stay = self._trainee.stay
        return not any(p.requires_grad and n not in stay for n, p in self._trainee.module.named_parameters())

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._trainee.module.parameters() if p.requires_grad]

    def _streamed(self, base: Found) -> tuple[Partition, Choice, Prediction]:
        """Weight streaming on top of ``base``: planned, predicted, and tightened until it is proved to fit."""
        terms, compute, rung = self._terms, self._terms.hardware.compute, base.choice
        program = program_bytes(terms.start_bytes)
        step_bytes = max(0, base.prediction.peak_bytes[compute] - program[compute] - self._partition.bytes)
        for _ in range(_PROOFS):
            need = Need(
                step_bytes=step_bytes,
                tokens=3 * rung.micro_batch * terms.seq,  # backward multiplies twice
                stay=self._trainee.stay,
                spent_bytes=program,
            )
            partition, plan = make_plan(
                self._trainee.module, terms.hardware, terms.budget_bytes, need, self._trainee.weights, task="train"
            )
            choice = replace(rung, streaming=plan.choices(STREAMING), streaming_settings=plan.settings)
            found = replace(self._rehearsal, partition=partition).predict(choice)
            if fits(found.peak_bytes, terms.budget_bytes):
                return partition, choice, found
            # Never less: where another tier is full, room that is left here would only be filled with weights.
            step_bytes += max(0, found.peak_bytes[compute] - terms.budget_bytes[compute]) + (1 << 20)
        raise too_small(found.peak_bytes, terms.budget_bytes)


def _chunkable(model: nn.Module) -> bool:
    try:
        chunked_loss.find_head(model)
    except UnsupportedError:
        return False
    return True
