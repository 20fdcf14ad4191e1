"""``brim.fit`` with an optimizer: a plan for training steps of a loop that is somebody else's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from brim.core import Hardware, Timeline
from brim.core.hardware import RAM
from brim.errors import UsageError
from brim.measure.capacity import resident_bytes
from brim.memory import heap
from brim.memory.kept_heap import KeptHeap, kept_limits
from brim.memory.mapped import present_bytes
from brim.run.example_shapes import speaks
from brim.run.fitted import Fitted, apply_choice, bytes_at_once
from brim.run.fitting import Device, Need, make_memory, make_plan
from brim.run.training_choice import Choice
from brim.run.training_ladder import Found, Orders, Subject, climb_down, fits, is_small, ladder, too_small
from brim.run.training_prediction import Prediction, Rehearsal, works_in_place
from brim.run.training_twin import twin_optimizer
from brim.techniques import checkpointing, optimizer_offload
from brim.techniques.base import HANDLE_ATTRIBUTE, refuse_second
from brim.techniques.blocks import Partition, find_blocks
from brim.techniques.weight_streaming import NAME as STREAMING
from brim.techniques.weight_streaming import Weights
from brim.units import parse_bytes

if TYPE_CHECKING:  # plans from files are imported where one is given: a program that fits needs none
    from brim.run.plan_file import PlanFile

_PROOFS = 4
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
        partition, found = search.run()
    else:
        from brim.run import plan_file

        partition, found = search.follow(plan_file.read(plan))
    return enforce(search, partition, found, start_bytes)


def enforce(search: Search, partition: Partition, found: Found, start_bytes: int) -> Fitted:
    """Put what ``search`` has found into force. ``start_bytes``: the resident set without model and optimizer."""
    model, optimizer, hardware = search.model, search.optimizer, search.hardware
    budget_bytes, device, example = search.budget_bytes, search.device, search.example
    made = found.choice.plan(
        model=type(model).__name__,
        hardware=hardware.name,
        budget_bytes=budget_bytes,
        promise=found.prediction.promise(),
    )
    memory = make_memory(made, hardware, device, Timeline(f"{made.model} train", measured=True))
    fitted = apply_choice(model, optimizer, made, memory, partition, Weights(), example)
    if hardware.compute == RAM:
        _hold_heap(fitted, found.prediction.peak_bytes[RAM], budget_bytes[RAM], start_bytes)
    vars(model)[HANDLE_ATTRIBUTE] = vars(optimizer)[HANDLE_ATTRIBUTE] = fitted
    return fitted


def tensor_bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What model and optimizer hold of the resident set now."""
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    held += [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return present_bytes(held)


def _hold_heap(fitted: Fitted, promised_bytes: int, budget_bytes: int, start_bytes: int) -> None:
    """Keep the resident set to the budget too: what is freed leaves it, at once where the budget is tight.

    ``start_bytes`` is the resident set without model and optimizer.
    """
    limits = kept_limits(promised_bytes, budget_bytes)
    if limits is None or budget_bytes - promised_bytes < _ROOM_BYTES:
        heap.return_freed_memory()
        return
    kept = KeptHeap(start_bytes + budget_bytes - (limits.promised_bytes - limits.return_above_bytes))
    weakref.finalize(fitted, kept.close)
    fitted.hold(kept)


class Search:
    """The ladder without what only a loop of brim's own can do, and below it weight streaming.

    ``states_leave`` False: for an optimizer that cannot be stepped block by block. ``in_place`` False: activations
    are not to be tried in place, which calls the model's hooks on tensors without values when put into force.
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
        self._reserve, self._states_leave, self._in_place = reserve_bytes, states_leave, in_place
        self._known: list[tuple[Choice, Prediction]] = []
        self._partition = find_blocks(model)
        self._rehearsal = Rehearsal(
            name=type(model).__name__,
            model=model,
            partition=self._partition,
            weights=Weights(),
            optimizer=lambda twin: twin_optimizer(twin, model, optimizer),
            inputs=None if example is None else lambda count: _hollow(example),
            batch=1,
            hardware=hardware,
            device=device,
            budget_bytes=budget_bytes,
        )

    def untouched(self) -> Prediction:
        """What a step takes without brim."""
        return self._predict(Choice())

    def run(self, start: int = 0) -> tuple[Partition, Found]:
        """The fastest that fits from rung ``start`` on. Raises BudgetError."""
        known = self.example is not None
        blocks = checkpointing.blocks(self.model) if known else []
        subject = Subject(
            compute=self.hardware.compute,
            batch=1,
            blocks=blocks,
            in_place=known and self._in_place and works_in_place(self.model, self.example),
            chunkable=False,
            single_pass=False,
            states_leave=self._states_leave,
        )
        orders = Orders(precision="fp32", micro_batch=1, checkpointing=None if known else "none")
        found = climb_down(
            ladder(subject, orders),
            self._predict,
            self.budget_bytes,
            compute=subject.compute,
            batch=1,
            order=orders,
            start=start,
            one_by_one=is_small(self.model),
        )
        return (self._partition, found) if found.fits else self._streamed(found)

    def follow(self, file: PlanFile) -> tuple[Partition, Found]:
        """What a file's plan decided, proved for the budget that there is now. Raises UsageError for another's."""
        from brim.run import plan_file
        from brim.run.factory import parts

        plan_file.check(file, model=self.model, hardware=self.hardware, task="train")
        choice = Choice.of(file.plan)
        if choice.in_backward or choice.chunk_tokens or choice.streams or choice.precision != "fp32":
            raise UsageError(
                f"The plan for {file.plan.model} was given to brim.fit.",
                "It takes a loop of brim's own: streamed weights, updates in backward, logits in pieces or autocast.",
                "Run it by brim train --plan, or plan for file.py:build.",
            )
        partition = parts(self.model)
        at_once = replace(choice, micro_batch=1)  # as here: whatever the loop gives at once
        found = self._predict(at_once, partition)
        if not fits(found.peak_bytes, self.budget_bytes):
            raise too_small(found.peak_bytes, self.budget_bytes)
        return partition, Found(rung=-1, choice=at_once, prediction=found, planned=True)

    def _predict(self, choice: Choice, partition: Partition | None = None) -> Prediction:
        """Without an example, what the plan holds, gradients, and what was set aside for a step."""
        known = next((found for one, found in self._known if partition is None and one == choice), None)
        if known is None:
            known = self._predict_anew(choice, partition)
            if partition is None:
                self._known.append((choice, known))
        return known

    def _predict_anew(self, choice: Choice, partition: Partition | None) -> Prediction:
        rehearsal = self._rehearsal if partition is None else replace(self._rehearsal, partition=partition)
        found = rehearsal.predict(choice)
        if self.example is not None:
            return found
        compute, size = self.hardware.compute, bytes_at_once(self.model)
        blocks = optimizer_offload.find_blocks(self.model, self.optimizer, block_bytes=size)
        made = sum(b.bytes for b in blocks) if choice.gradients == "keep" else _largest(b.bytes for b in blocks)
        held = found.peak_bytes[compute] + made + self._reserve
        return replace(found, peak_bytes={**found.peak_bytes, compute: held})

    def _streamed(self, base: Found) -> tuple[Partition, Found]:
        compute = self.hardware.compute
        step_bytes = max(0, base.prediction.peak_bytes[compute] - self._partition.bytes)
        for _ in range(_PROOFS):
            need = Need(step_bytes=step_bytes, tokens=1)
            partition, plan = make_plan(self.model, self.hardware, self.budget_bytes, need, Weights(), task="train")
            choice = replace(base.choice, streaming=plan.choices(STREAMING), streaming_settings=plan.settings)
            found = self._predict(choice, partition)
            if fits(found.peak_bytes, self.budget_bytes):
                return partition, Found(rung=-1, choice=choice, prediction=found)
            margin = min(1 << 20, self.budget_bytes[compute] // 64)
            step_bytes += max(0, found.peak_bytes[compute] - self.budget_bytes[compute]) + margin
        raise too_small(found.peak_bytes, self.budget_bytes)


def _largest(sizes: Any) -> int:
    return max(sizes, default=0)


def _hollow(example: _Example | None) -> Any:
    """Inputs like ``example``, made where this is called."""
    return tree_map_only(torch.Tensor, _without_values, example)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """What a step does may depend on whole numbers (a mask, lengths), so where these are few they are told."""
    if speaks(tensor):
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
