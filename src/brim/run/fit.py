"""``brim.fit``: fit any existing ``nn.Module`` into a budget, in place; with an optimizer, for training."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from brim.allocator.config import LARGE_SEGMENT_BYTES
from brim.core import Hardware, Plan, Timeline
from brim.core.hardware import RAM
from brim.errors import BudgetError, UsageError
from brim.measure.capacity import resident_bytes
from brim.memory import heap
from brim.memory.heap import HeapRetention, retention_limits
from brim.memory.mapped import present_bytes
from brim.models.prequantized import TakenApart
from brim.planning.inference.example_shapes import on_host, without_values
from brim.planning.inference.forward_prediction import forward_need, search_forward
from brim.planning.inference.machine import (
    Device,
    budgets,
    capability,
    machine,
    make_memory,
    on,
    put_in_force,
)
from brim.planning.inference.pipelines import PipelineModels, is_pipeline, pipeline_arguments
from brim.planning.proof import plan_or_smallest_budget
from brim.planning.strategy.case import TrainingStrategy
from brim.planning.strategy.choice import MICRO_BATCH, Choice
from brim.planning.strategy.choose import follow, loop_case, search_training, stream_weights
from brim.planning.strategy.ladder import Orders, too_small
from brim.planning.strategy.prediction import Prediction, TrainingStep, works_in_place
from brim.planning.strategy.search import TrainingSearch
from brim.planning.strategy.step import Fitted, apply_choice, bytes_at_once
from brim.predict.lowering.cuda.products import cublas_workspace_bytes
from brim.random_numbers import all_generators, restored
from brim.techniques.base import HANDLE_ATTRIBUTE, refuse_second, refuse_special_tensors
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.dry_run import as_arguments
from brim.techniques.meta_copy import meta_copy_optimizer
from brim.techniques.optimizer_offload.state_blocks import state_blocks
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from brim.units import parse_bytes

if TYPE_CHECKING:  # imported where a plan file is given: a program that fits needs none
    from brim.planning.file import PlanFile

# If the budget leaves less than this beside a step, freed memory is not retained: the user's loop may take more than
# the step that was predicted.
_ROOM_BYTES = 128 << 20
_Example = Mapping[str, Any] | Sequence[Any]


@overload
def fit(
    model: Any,
    optimizer: None = None,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    example: torch.Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    activations: str | int | None = None,
) -> WeightStreaming: ...


@overload
def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    example: torch.Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    activations: str | int | None = None,
    plan: str | Path | None = None,
) -> Fitted: ...


def fit(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    example: torch.Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    activations: str | int | None = None,
    plan: str | Path | None = None,
) -> WeightStreaming | Fitted:
    """Fit an existing module into a memory budget, in place.

    Without ``optimizer``, for inference: blocks that do not fit are streamed while the model runs. With it, for
    training: the budget also covers gradients and the optimizer's states, and your loop is not changed:
    ``loss.backward(); optimizer.step(); optimizer.zero_grad()``. The budget covers the module's tensors and
    activations. On a machine without CUDA the model computes in RAM, and tensors that do not fit there are in a
    scratch file (in the folder ``BRIM_SCRATCH``, else in the temporary folder).

    The models of a diffusers pipeline share one budget and one plan, as they run one after another. If no plan fits,
    the decoder's tiling is switched on until ``remove()``, with a warning.

    Args:
        model: Any module with ordinary parameters, or a diffusers pipeline. No part of it may be fitted already. A
            model on a GPU stays on that GPU.
        optimizer: The optimizer that trains it, a ``torch.optim.Optimizer``. None: inference.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"90%"`` of its capacity. None: nine tenths of the free memory
            and of the memory that the model uses there already.
        ram: Budget of host memory, in the same forms. If the model computes in RAM, the smaller of the two budgets
            holds.
        device: ``"auto"`` (CUDA, else the CPU), ``"cuda"``, ``"xpu"``, ``"npu"``, ``"cuda:1"`` (a GPU by number),
            ``"cpu"``, or ``"emulated"`` (a part of RAM replaces VRAM, to try plans without a GPU).
        example: Inputs of the model: a tensor, a tuple or list of positional inputs, or a dictionary of named ones.
            Activations are predicted from it; nothing is run. For a pipeline: the named arguments of its call
            (None: an empty prompt in the default size).
        activations: Bytes of a step's activations, instead of an example. Without both, an eighth of the budget is
            reserved for them.
        plan: For training: a file from ``brim plan --task train --output``. brim follows it exactly; your loop must
            use the plan's micro-batch.

    Returns:
        The handle, also at ``model.brim``: ``plan``, ``timeline()``, ``remove()``.

    Raises:
        BudgetError: Nothing fits; ``smallest_bytes`` is a sufficient budget.
        UsageError: An argument has the wrong type or value, or the model is fitted already.
        UnsupportedError: Parameters with more state than their bytes: quantized by another library (in training only
            bitsandbytes' layers are taken), sharded, sparse, or on the meta device.
    """
    if is_pipeline(model):
        if optimizer is not None or plan is not None:
            raise UsageError(
                f"Cannot fit the pipeline {type(model).__name__} for training.",
                "Its models are trained one at a time.",
                "Fit one of its models with its optimizer.",
            )
        return _fit_pipeline(model, vram, ram, device, example, activations)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"Cannot fit a {type(model).__name__}.", "The model must be an nn.Module or a diffusers pipeline."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"Cannot use a {type(optimizer).__name__} as the optimizer.", "It must be a torch.optim.Optimizer."
        )
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper calls the module inside
    refuse_second(model)
    if optimizer is None:
        return _fit(model, None, vram, ram, device, example, activations, plan)
    taken_apart = TakenApart(model)
    try:
        fitted = _fit(model, optimizer, vram, ram, device, example, activations, plan)
    except BaseException:
        taken_apart.remove()
        raise
    assert isinstance(fitted, Fitted), "there is an optimizer"
    fitted.hold(taken_apart, longest=True)
    return fitted


def _fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    vram: str | int | None,
    ram: str | int | None,
    device: Device | str,
    example: torch.Tensor | Mapping[str, Any] | Sequence[Any] | None,
    activations: str | int | None,
    plan: str | Path | None,
) -> WeightStreaming | Fitted:
    refuse_special_tensors(model)
    inputs = None if example is None else as_arguments(example)
    # Tensors created in inference mode could never be changed outside of it.
    with on(device, model) as kind, torch.inference_mode(False), restored(all_generators()):
        hardware = machine(kind)
        budget = budgets(hardware, vram, ram, kind, [model] if optimizer is None else [model, optimizer])
        if optimizer is not None:
            return fit_training(model, optimizer, hardware, budget, kind, inputs, activations, plan)
        if plan is not None:
            raise UsageError(
                f"Cannot use the plan {plan} without an optimizer.",
                "brim.fit follows plans in training only.",
                "Give the optimizer.",
            )
        return _fit_inference(model, hardware, budget, kind, inputs, activations)


def _fit_inference(
    model: nn.Module,
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    device: Device,
    example: _Example | None,
    activations: str | int | None,
    shares: Mapping[str, float] | None = None,
) -> WeightStreaming:
    need = forward_need(model, budget_bytes, hardware, example, activations)
    need = replace(need, shares=shares or {})
    placed = search_forward(model, hardware, budget_bytes, need, example, device)
    return put_in_force(model, placed.partition, placed.plan, hardware, Weights(), device)


def _fit_pipeline(
    pipe: Any, vram: str | int | None, ram: str | int | None, device: str, example: Any, activations: str | int | None
) -> WeightStreaming:
    models = PipelineModels(pipe)
    refuse_second(models)
    refuse_special_tensors(models)
    arguments = pipeline_arguments(pipe, example) if activations is None else None
    tiles: list[Any] = [part for part in models.children() if hasattr(part, "enable_tiling") and not part.use_tiling]
    with on(device, models) as kind, torch.inference_mode(False):
        hardware = machine(kind)
        budget = budgets(hardware, vram, ram, kind, [models])

        def fitted() -> WeightStreaming:
            calls, shares = (None, None) if arguments is None else models.recorded(pipe, arguments)
            return _fit_inference(models, hardware, budget, kind, calls, activations, shares)

        try:
            handle = fitted()
        except BudgetError:
            if arguments is None or not tiles:
                raise
            with ExitStack() as untiled:
                for part in tiles:
                    part.enable_tiling()
                    untiled.callback(part.disable_tiling)
                handle = fitted()
                handle.at_end.push(untiled.pop_all())
            handle.plan = replace(handle.plan, settings={**handle.plan.settings, "tiled_models": len(tiles)})
            warnings.warn(
                "The decoder works in tiles, as nothing else fits: pictures differ. handle.remove() ends it.",
                stacklevel=3,
            )
        pipe.brim = handle
        return handle


def fit_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    device: Device,
    example: _Example | None,
    activations: str | int | None,
    plan: str | Path | None,
) -> Fitted:
    """Fit for training, as described in ``brim.fit``. The loop decides the rows of a micro-batch, the plan the
    rest."""
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
    """Apply ``strategy``, a result of ``search``. ``start_bytes``: the resident set without model and optimizer."""
    model, optimizer, hardware = search.model, search.optimizer, search.hardware
    budget_bytes, device, example = search.budget_bytes, search.device, search.example
    plan = search.plan_of(strategy)
    memory = make_memory(plan, hardware, device, Timeline(f"{plan.model} train", measured=True))
    fitted = apply_choice(model, optimizer, plan, memory, strategy.partition, Weights(), example)
    if hardware.compute == RAM:
        _hold_heap(fitted, strategy.prediction.peak_bytes[RAM], budget_bytes[RAM], start_bytes)
    vars(model)[HANDLE_ATTRIBUTE] = vars(optimizer)[HANDLE_ATTRIBUTE] = fitted
    return fitted


def tensor_bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the resident set that model and optimizer hold now."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return present_bytes(tensors)


def _hold_heap(fitted: Fitted, promised_bytes: int, budget_bytes: int, start_bytes: int) -> None:
    """Keep the resident set within the budget: freed memory leaves it, at once if the budget is tight.

    ``start_bytes`` is the resident set without model and optimizer.
    """
    limits = retention_limits(promised_bytes, budget_bytes)
    if limits is None or budget_bytes - promised_bytes < _ROOM_BYTES:
        heap.return_freed_memory()
        return
    retention = HeapRetention(start_bytes + budget_bytes - (limits.promised_bytes - limits.return_above_bytes))
    weakref.finalize(fitted, retention.close)
    fitted.hold(retention)


class Search:
    """Search for a strategy for a model that the user's own loop trains.

    ``states_leave`` False: for an optimizer that cannot be stepped block by block. ``in_place`` False: in-place
    activations are not tried, because enforcing them calls the model's hooks on tensors without values.
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
        knows_inputs, host_example = example is not None, on_host(example)
        step = TrainingStep(
            name=type(model).__name__,
            model=model,
            partition=checkpointing.partition_of(model),
            weights=Weights(),
            optimizer=lambda copy: meta_copy_optimizer(copy, model, optimizer),
            inputs=None if example is None else lambda count: without_values(host_example),
            batch=1,  # the loop decides
            hardware=hardware,
            device=device,
            budget_bytes=budget_bytes,
        )
        case = loop_case(
            step,
            budget_bytes=budget_bytes,
            orders=Orders(micro_batch=1, checkpointing=None if knows_inputs else "none"),
            in_place=lambda: knows_inputs and in_place and works_in_place(model, example),
            states_leave=states_leave,
            aside=(lambda choice: 0) if knows_inputs else self._aside,
            finer=True,
            exact=True,  # the states of the program's own optimizer for fewer layers are not known
        )
        self._search = TrainingSearch(case)

    def untouched(self) -> Prediction:
        """Prediction of a step without brim, its seconds left out."""
        return self._search.predicted(Choice())

    def run(self) -> TrainingStrategy:
        """The fastest strategy that fits. Raises BudgetError.

        For a GPU it names a proved budget: a plan for a larger budget has other segments than the refused plan.
        """
        return self._searched(lambda search: search_training(search)[0])

    def stream_weights(self) -> TrainingStrategy:
        """The fastest placement of weights under which a step fits, with nothing else offloaded. Raises
        BudgetError, as ``run`` does."""
        return self._searched(lambda search: stream_weights(search, search.proved(Choice())))

    def _searched(self, run: Callable[[TrainingSearch], TrainingStrategy]) -> TrainingStrategy:
        def within(budget_bytes: Mapping[str, int]) -> TrainingStrategy:
            return run(self._search.within(budget_bytes))

        if not self._search.case.step.reserves:
            return within(self.budget_bytes)
        return plan_or_smallest_budget(
            within,
            lambda strategy: strategy.prediction.peak_bytes,
            self.budget_bytes,
            lambda peaks: too_small(peaks, self.budget_bytes),
        )

    def plan_of(self, strategy: TrainingStrategy) -> Plan:
        return strategy.choice.plan(
            model=type(self.model).__name__,
            hardware=self.hardware.name,
            budget_bytes=self.budget_bytes,
            promise=strategy.prediction.promise(),
        )

    def follow(self, file: PlanFile) -> TrainingStrategy:
        """The decisions of a plan file, proved for the present budget. Raises UsageError for another machine's or
        model's."""
        file.check(model=self.model, hardware=self.hardware, task="train")
        choice = Choice.of(file.plan)
        if choice.in_backward or choice.chunk_tokens or choice.streams or choice.precision != "fp32":
            raise UsageError(
                f"Cannot follow the plan for {file.plan.model} in brim.fit.",
                "It needs brim's own loop: streamed weights, updates in backward, chunked loss or autocast.",
                "Run it by brim train --plan, or plan for file.py:build.",
            )
        settings = {**file.plan.settings, MICRO_BATCH: 1}  # as here: the loop decides
        return follow(self._search, replace(file.plan, settings=settings), self._search.case.step.partition)

    def _aside(self, choice: Choice) -> int:
        """Bytes set aside without an example: gradients, and ``reserve_bytes`` for a step."""
        size = bytes_at_once(self.model, choice)
        blocks = state_blocks(self.model, self.optimizer, block_bytes=size)
        aside_bytes = (
            sum(b.bytes for b in blocks) if choice.gradients == "keep" else _largest(b.bytes for b in blocks)
        )
        if self._search.case.step.reserves:
            # Forward and backward pass have a thread each, with its own cuBLAS workspace.
            aside_bytes += 2 * cublas_workspace_bytes(capability(self.hardware)) + LARGE_SEGMENT_BYTES
        return aside_bytes + self._reserve_bytes


def _largest(sizes: Any) -> int:
    return max(sizes, default=0)
