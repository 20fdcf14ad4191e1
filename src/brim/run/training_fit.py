"""``brim.fit`` with an optimizer: a plan for training steps of a loop that is somebody else's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from brim.core import Hardware, Timeline
from brim.errors import UsageError
from brim.run.fitted import Fitted, apply_choice, update_bytes
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

_PROOFS = 4
_Example = Mapping[str, Any] | Sequence[Any]


def fit_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    device: Device,
    example: _Example | None,
    activations: str | int | None,
) -> Fitted:
    """As ``brim.fit`` says. The loop decides what goes through the model at once; the rest is the plan's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"brim.fit was given a {type(optimizer).__name__} as the optimizer.", "It takes torch's.")
    refuse_second(model)
    reserve = parse_bytes(activations) if activations is not None else budget_bytes[hardware.compute] // 8
    search = _Search(model, optimizer, hardware, budget_bytes, device, example, reserve)
    partition, found = search.run()
    plan = found.choice.plan(
        model=type(model).__name__,
        hardware=hardware.name,
        budget_bytes=budget_bytes,
        promise=found.prediction.promise(),
    )
    memory = make_memory(plan, hardware, device, Timeline(f"{plan.model} train", measured=True))
    fitted = apply_choice(model, optimizer, plan, memory, partition, Weights(), example)
    vars(model)[HANDLE_ATTRIBUTE] = vars(optimizer)[HANDLE_ATTRIBUTE] = fitted
    return fitted


class _Search:
    """The ladder without what only a loop of brim's own can do, and below it weight streaming."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        hardware: Hardware,
        budget_bytes: Mapping[str, int],
        device: Device,
        example: _Example | None,
        reserve_bytes: int,
    ) -> None:
        self._model, self._optimizer, self._hardware = model, optimizer, hardware
        self._budget, self._example, self._reserve = budget_bytes, example, reserve_bytes
        self._partition = find_blocks(model)
        self._rehearsal = Rehearsal(
            name=type(model).__name__,
            model=model,
            partition=self._partition,
            weights=Weights(),
            optimizer=lambda twin: twin_optimizer(twin, model, optimizer),
            inputs=lambda count: _hollow(example),
            batch=1,
            hardware=hardware,
            device=device,
            budget_bytes=budget_bytes,
        )

    def run(self) -> tuple[Partition, Found]:
        known = self._example is not None
        blocks = checkpointing.blocks(self._model) if known else []
        subject = Subject(
            compute=self._hardware.compute,
            batch=1,
            blocks=blocks,
            in_place=known and works_in_place(self._model, self._example),
            chunkable=False,
            single_pass=False,
        )
        orders = Orders(precision="fp32", micro_batch=1, checkpointing=None if known else "none")
        predict = self._rehearsal.predict if known else self._estimate
        found = climb_down(
            ladder(subject, orders),
            predict,
            self._budget,
            compute=subject.compute,
            batch=1,
            order=orders,
            one_by_one=is_small(self._model),
        )
        return (self._partition, found) if found.fits else self._streamed(found, predict)

    def _estimate(self, choice: Choice) -> Prediction:
        """Without an example: what stays, what passes, and what was set aside for a step."""
        size = update_bytes(self._model)
        offload = optimizer_offload.find_blocks(self._model, self._optimizer, block_bytes=size)
        gradients = (
            sum(b.bytes for b in offload) if choice.gradients == "keep" else _largest(b.bytes for b in offload)
        )
        states = sum(b.state_bytes for b in offload)
        if choice.states != "keep":
            states = 3 * _largest(b.state_bytes for b in offload)
        weights = sum(
            b.bytes for b in self._partition.blocks if choice.streaming.get(b.name, "resident") == "resident"
        )
        held = weights + self._partition.loose_bytes + gradients + states + self._reserve
        return Prediction(peak_bytes={self._hardware.compute: held})

    def _streamed(self, base: Found, predict: Callable[[Choice], Prediction]) -> tuple[Partition, Found]:
        compute = self._hardware.compute
        step_bytes = max(0, base.prediction.peak_bytes[compute] - self._partition.bytes)
        for _ in range(_PROOFS):
            need = Need(step_bytes=step_bytes, tokens=1)
            partition, plan = make_plan(self._model, self._hardware, self._budget, need, Weights(), task="train")
            choice = replace(base.choice, streaming=plan.choices(STREAMING), streaming_settings=plan.settings)
            if predict == self._estimate:
                return partition, Found(
                    rung=-1, choice=choice, prediction=Prediction(peak_bytes=plan.promise.peak_bytes)
                )
            found = replace(self._rehearsal, partition=partition).predict(choice)
            if fits(found.peak_bytes, self._budget):
                return partition, Found(rung=-1, choice=choice, prediction=found)
            step_bytes += found.peak_bytes[compute] - self._budget[compute] + (1 << 20)
        raise too_small(found.peak_bytes, self._budget)


def _largest(sizes: Any) -> int:
    return max(sizes, default=0)


def _hollow(example: _Example | None) -> Any:
    """Inputs like ``example``, made where this is called."""
    return tree_map_only(torch.Tensor, lambda value: torch.empty(value.shape, dtype=value.dtype), example)
