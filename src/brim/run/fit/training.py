"""``brim.fit`` with an optimizer: a plan for training steps of a loop that is somebody else's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.allocator.config import LARGE_SEGMENT_BYTES
from brim.core import Hardware, Timeline
from brim.core.hardware import RAM
from brim.errors import BudgetError, UsageError
from brim.measure.capacity import resident_bytes
from brim.memory import heap
from brim.memory.heap import HeapRetention, retention_limits
from brim.memory.mapped import present_bytes
from brim.planning.inference.choosing import found_with_more
from brim.planning.inference.example_shapes import on_host, without_values
from brim.planning.inference.machine import Device, capability, make_memory
from brim.planning.strategy.case import TrainingStrategy
from brim.planning.strategy.choice import MICRO_BATCH, Choice
from brim.planning.strategy.choose import follow, loop_case, search_training
from brim.planning.strategy.ladder import Orders, fits, too_small
from brim.planning.strategy.prediction import Prediction, Rehearsal, works_in_place
from brim.planning.strategy.search import Planner
from brim.planning.strategy.step import Fitted, apply_choice, bytes_at_once
from brim.predict.lowering.cuda.kernels import cublas_workspace_bytes
from brim.techniques.base import HANDLE_ATTRIBUTE, refuse_second
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.meta_copy import meta_copy_optimizer
from brim.techniques.optimizer_offload.state_blocks import state_blocks
from brim.techniques.streaming.weight_streaming import Weights
from brim.units import parse_bytes

if TYPE_CHECKING:  # plans from files are imported where one is given: a program that fits needs none
    from brim.planning.file import PlanFile

# A budget that leaves less than this beside a step: a loop of the user's own may take more than the one step that
# was looked at, so what is freed is not kept there.
_ROOM_BYTES = 128 << 20
_Example = Mapping[str, Any] | Sequence[Any]


def fit_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    device: Device,
    example: _Example | None,
    activations: str | int | None,
    plan: str | Path | None = None,
) -> Fitted:
    """As ``brim.fit`` says. The loop decides what goes through the model at once; the rest is the plan's."""
    refuse_second(model)
    start_bytes = resident_bytes() - tensor_bytes_of(model, optimizer)
    reserve = parse_bytes(activations) if activations is not None else budget_bytes[hardware.compute] // 8
    search = Search(model, optimizer, hardware, budget_bytes, device, example, reserve)
    if plan is None:
        strategy = search.run()
    else:
        from brim.planning import file as plan_file

        strategy = search.follow(plan_file.read(plan))
    return enforce(search, strategy, start_bytes)


def enforce(search: Search, strategy: TrainingStrategy, start_bytes: int) -> Fitted:
    """Apply ``strategy``, which ``search`` found. ``start_bytes``: the resident set without model and optimizer."""
    model, optimizer, hardware = search.model, search.optimizer, search.hardware
    budget_bytes, device, example = search.budget_bytes, search.device, search.example
    plan = strategy.choice.plan(
        model=type(model).__name__,
        hardware=hardware.name,
        budget_bytes=budget_bytes,
        promise=strategy.prediction.promise(),
    )
    memory = make_memory(plan, hardware, device, Timeline(f"{plan.model} train", measured=True))
    fitted = apply_choice(model, optimizer, plan, memory, strategy.partition, Weights(), example)
    if hardware.compute == RAM:
        _hold_heap(fitted, strategy.prediction.peak_bytes[RAM], budget_bytes[RAM], start_bytes)
    vars(model)[HANDLE_ATTRIBUTE] = vars(optimizer)[HANDLE_ATTRIBUTE] = fitted
    return fitted


def tensor_bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What model and optimizer hold of the resident set now."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return present_bytes(tensors)


def _hold_heap(fitted: Fitted, promised_bytes: int, budget_bytes: int, start_bytes: int) -> None:
    """Keep the resident set to the budget too: what is freed leaves it, at once where the budget is tight.

    ``start_bytes`` is the resident set without model and optimizer.
    """
    limits = retention_limits(promised_bytes, budget_bytes)
    if limits is None or budget_bytes - promised_bytes < _ROOM_BYTES:
        heap.return_freed_memory()
        return
    kept = HeapRetention(start_bytes + budget_bytes - (limits.promised_bytes - limits.return_above_bytes))
    weakref.finalize(fitted, kept.close)
    fitted.hold(kept)


class Search:
    """What a loop that is not brim's own can do, for a model that it trains now.

    ``states_leave`` False: for an optimizer that cannot be stepped block by block. ``in_place`` False: activations
    are not to be tried in place, which calls the model's hooks on tensors without values when put into force.
    Without an ``example``, ``reserve_bytes`` are set aside for a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        hardware: Hardware,
        budget_bytes: Mapping[str, int],
        device: Device,
        example: _Example | None,
        reserve_bytes: int,
        *,
        states_leave: bool = True,
        in_place: bool = True,
    ) -> None:
        self.model, self.optimizer, self.hardware = model, optimizer, hardware
        self.budget_bytes, self.device, self.example = budget_bytes, device, example
        self._reserve_bytes = reserve_bytes
        knows_inputs, told = example is not None, on_host(example)
        rehearsal = Rehearsal(
            name=type(model).__name__,
            model=model,
            partition=checkpointing.partition_of(model),
            weights=Weights(),
            optimizer=lambda copy: meta_copy_optimizer(copy, model, optimizer),
            inputs=None if example is None else lambda count: without_values(told),
            batch=1,  # whatever the loop gives at once
            hardware=hardware,
            device=device,
            budget_bytes=budget_bytes,
        )
        case = loop_case(
            rehearsal,
            budget_bytes=budget_bytes,
            orders=Orders(micro_batch=1, checkpointing=None if knows_inputs else "none"),
            in_place=lambda: knows_inputs and in_place and works_in_place(model, example),
            states_leave=states_leave,
            aside=(lambda choice: 0) if knows_inputs else self._aside,
            finer=True,
            exact=True,  # what of the program's own optimizer belongs to fewer layers is not known
        )
        self._planner = Planner(case)

    def untouched(self) -> Prediction:
        """What a step takes without brim, its seconds left out."""
        return self._planner.predicted(Choice())

    def run(self) -> TrainingStrategy:
        """The fastest that fits. Raises BudgetError.

        For a GPU it names a budget that was proved: a plan for more has other segments than the one that was refused.
        """
        try:
            return self._within(self.budget_bytes)
        except BudgetError as error:
            if not self._planner.case.rehearsal.reserves:
                raise
            strategy = found_with_more(self._within, self.budget_bytes, error)
            if not fits(strategy.prediction.peak_bytes, self.budget_bytes):
                raise too_small(strategy.prediction.peak_bytes, self.budget_bytes) from error
            return strategy

    def _within(self, budget_bytes: Mapping[str, int]) -> TrainingStrategy:
        (strategy,) = search_training(self._planner.within(budget_bytes))
        return strategy

    def follow(self, file: PlanFile) -> TrainingStrategy:
        """What a file's plan decided, proved for the budget that there is now. Raises UsageError for another's."""
        file.check(model=self.model, hardware=self.hardware, task="train")
        choice = Choice.of(file.plan)
        if choice.in_backward or choice.chunk_tokens or choice.streams or choice.precision != "fp32":
            raise UsageError(
                f"Cannot follow the plan for {file.plan.model} in brim.fit.",
                "It needs brim's own loop: streamed weights, updates in backward, logits in pieces or autocast.",
                "Run it by brim train --plan, or plan for file.py:build.",
            )
        settings = {**file.plan.settings, MICRO_BATCH: 1}  # as here: whatever the loop gives at once
        return follow(self._planner, replace(file.plan, settings=settings), self._planner.case.rehearsal.partition)

    def _aside(self, choice: Choice) -> int:
        """Without an example: gradients, and what was set aside for a step."""
        size = bytes_at_once(self.model)
        blocks = state_blocks(self.model, self.optimizer, block_bytes=size)
        aside_bytes = (
            sum(b.bytes for b in blocks) if choice.gradients == "keep" else _largest(b.bytes for b in blocks)
        )
        if self._planner.case.rehearsal.reserves:
            # Each of the two passes has a thread, and cuBLAS a workspace for it.
            aside_bytes += 2 * cublas_workspace_bytes(capability(self.hardware)) + LARGE_SEGMENT_BYTES
        return aside_bytes + self._reserve_bytes


def _largest(sizes: Any) -> int:
    return max(sizes, default=0)
