"""From a model on disk to a model in training inside a budget: opened, planned, placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Hardware, Plan, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UnsupportedError
from brim.memory import heap
from brim.memory.kept_heap import HeapLimits, KeptHeap, kept_limits
from brim.run.fitted import Fitted, apply_choice
from brim.run.fitting import Device, Need, make_memory, make_plan
from brim.run.inference import resident_bytes, warm_up
from brim.run.trainee import Method, Trainee, make_optimizer, open_trainee
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
from brim.run.training_prediction import Prediction, Rehearsal, works_in_place
from brim.techniques import checkpointing, chunked_loss, optimizers
from brim.techniques.blocks import Partition, find_blocks, tensor_bytes
from brim.techniques.weight_streaming import NAME as STREAMING

# What threads' stacks, kernels' packing buffers and autograd's own objects take beside tensors: 4 to 6 MiB of RAM in
# steps of models of 8 to 75 M parameters, deep and thin, short and wide, decoders and an encoder-decoder.
_BESIDE_BYTES = {RAM: 12 << 20, VRAM: 64 << 20}
_OWN_STEPS = ("bf16-stochastic", "bf16-master")  # precisions that put a step of their own in the optimizer's place
_PROOFS = 4  # how often a streaming plan is tightened before it is given up


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


class Session:
    """A model in training. ``rung`` is where on the ladder its plan stands."""

    def __init__(
        self, terms: Terms, trainee: Trainee, fitted: Fitted, rung: int, heap_limits: HeapLimits | None = None
    ) -> None:
        self.terms, self.trainee, self.fitted, self.rung = terms, trainee, fitted, rung
        self._kept_heap: KeptHeap | None = None
        if heap_limits is not None:
            self._kept_heap = KeptHeap(terms.start_bytes + heap_limits.return_above_bytes)

    @classmethod
    def open(cls, terms: Terms, folder: Path, *, name: str, rung: int = 0) -> Session:
        """Open the model ``name`` in ``folder``, choose the first rung from ``rung`` on that fits, place the weights.

        Raises BudgetError when nothing fits.
        """
        trainee = open_trainee(
            folder,
            method=terms.method,
            precision=terms.precision,
            seed=terms.seed,
            trust_remote_code=terms.trust_remote_code,
        )
        warm_up(trainee.module, terms.hardware, terms.seq)
        search = _Search(terms, trainee)
        partition, found = search.search(rung)
        promise, limits = found.prediction.promise(), _heap_limits(terms, found.prediction, rung)
        if limits is not None:
            promise = replace(promise, peak_bytes={**promise.peak_bytes, RAM: limits.promised_bytes})
        plan = found.choice.plan(
            model=name, hardware=terms.hardware.name, budget_bytes=terms.budget_bytes, promise=promise
        )
        fitted = _place(terms, trainee, plan, partition, search.inputs(1))
        return cls(terms, trainee, fitted, found.rung, limits)

    @property
    def plan(self) -> Plan:
        return self.fitted.plan

    def close(self) -> None:
        """Let everything go without bringing it back into memory."""
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
    """The ladder, and below it weight streaming planned for the budget and proved."""

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
            spent_bytes=lambda: _program_bytes(terms.start_bytes),
        )

    def inputs(self, count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, self._terms.seq, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    def search(self, start: int) -> tuple[Partition, Found]:
        terms = self._terms
        subject = Subject(
            compute=terms.hardware.compute,
            batch=terms.batch,
            blocks=checkpointing.blocks(self._trainee.module),
            in_place=works_in_place(self._trainee.module, self.inputs(1)),
            chunkable=_chunkable(self._trainee.module),
            single_pass=terms.clip_norm is None and terms.precision != "fp16-mixed",
            gradients_leave=terms.precision != "fp16-mixed",
            states_leave=terms.precision not in _OWN_STEPS,
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
        program = _program_bytes(terms.start_bytes)
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


def _program_bytes(start_bytes: int) -> dict[str, int]:
    """What the program has grown by until now, and will need beside tensors, per tier."""
    heap.trim()
    return {
        tier: count + (tier == RAM) * max(0, resident_bytes() - start_bytes) for tier, count in _BESIDE_BYTES.items()
    }


def _chunkable(model: nn.Module) -> bool:
    try:
        chunked_loss.find_head(model)
    except UnsupportedError:
        return False
    return True
