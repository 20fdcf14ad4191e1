"""Plan the training of a model from its configuration, on this machine or another one."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Timeline
from brim.core.hardware import RAM, VRAM
from brim.core.options import STORED, words
from brim.errors import BudgetError, ModelError, UnsupportedError
from brim.estimation.inputs import check_positions
from brim.estimation.models import find_model
from brim.estimation.silence import quiet
from brim.estimation.workload import training_precision
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.heap import retention_limits
from brim.memory.pool import PAGE_BYTES
from brim.models.training_model import make_optimizer, weights_dtype, with_adapters
from brim.planning import factory
from brim.planning.factory import is_factory
from brim.planning.file import described, parameter_count, quantized_module
from brim.planning.inference.warm_up import most_grown, spent, warm_up
from brim.planning.request import PLAN_FILE, Machine, Proposal, Request
from brim.planning.seconds.block_timing import block_seconds
from brim.planning.solver.step_profile import Limits
from brim.planning.strategy.case import Clock, TrainingCase, TrainingStrategy
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.choose import loop_case, search_training
from brim.planning.strategy.effects import effects, frees
from brim.planning.strategy.ladder import Orders, spread
from brim.planning.strategy.prediction import TrainingStep, works_in_place
from brim.planning.strategy.search import TrainingSearch
from brim.requests.train import Request as TrainRequest
from brim.techniques import optimizers
from brim.techniques.blocks import Partition, find_blocks
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.streaming.weight_streaming import Weights
from brim.units import format_bytes

OWN_STEPS = ("bf16-stochastic", "bf16-master")  # precisions that replace the optimizer's step
# Bytes beside tensors: threads' stacks, kernels' packing buffers and autograd's objects took 4 to 6 MiB of RAM in
# steps of models of 8 to 75 M parameters, deep and thin, short and wide, decoders and an encoder-decoder.
BESIDE_BYTES = {RAM: 12 << 20, VRAM: 64 << 20}
# The bytes beside tensors of the planning process and of the run have differed by up to 4 MiB.
_BETWEEN_RUNS_BYTES = 12 << 20
_TENSOR_ALIGNMENT_BYTES = 8  # of a safetensors file's data (its format's description)
DATA, TRAINED = "data.jsonl", "trained"  # the data's and the output's names in proposed commands
_SAME = ("method", "batch", "seq", "optimizer")  # options of a training that are those of its plan


def plan_training(request: Request, machine: Machine) -> list[Proposal]:
    """Return up to ``request.top`` proved proposals, the fastest first.

    All techniques are lossless, so only speed decides within a precision. The precision is the request's, else that
    of ``brim train``: fp32 on a processor, bf16-mixed on a GPU, and fp32 there too with ``prefer="quality"``. Raises
    BudgetError, with ``smallest_bytes``, when nothing fits.
    """
    _refuse_states(request, machine)
    if request.method == "lora" and importlib.util.find_spec("peft") is not None:
        importlib.import_module("peft")  # a training imports it before its bytes are counted
    start_bytes = machine.start_bytes()
    with quiet():
        search = TrainingSearch(case_of(request, machine, start_bytes))
        strategies = search_training(search, top=request.top)
    return [_proposal(request, machine, search, strategy, first=strategy is strategies[0]) for strategy in strategies]


def states_of(request: Request) -> int:
    """Return the bytes of weights and optimizer states, which a full training keeps in its tiers."""
    dtype = weights_dtype("full", precision_of(request, VRAM)[0])
    held = torch.empty(parameter_count(request.model), dtype=dtype, device="meta")
    return held.nbytes + optimizers.state_bytes(request.optimizer, [held])


def _refuse_states(request: Request, machine: Machine) -> None:
    """Raise BudgetError, without a search, where all tiers together have no room for weights and states."""
    if request.method != "full" or is_factory(request.model):
        return
    least, room = states_of(request), sum(machine.budget_bytes.values())
    if least > room:
        tiers = ", ".join(f"{format_bytes(count)} of {tier.upper()}" for tier, count in machine.budget_bytes.items())
        raise BudgetError(
            f"Cannot train {request.model} with {tiers}.",
            f"Its weights and optimizer states alone take {format_bytes(least)}, and there are {format_bytes(room)}.",
            "Give more --ram or --disk, train adapters by --method lora, or take an optimizer with smaller states.",
            smallest_bytes={RAM: machine.budget_bytes.get(RAM, 0) + least - room},
        )


def precision_of(request: Request, compute: str) -> tuple[str, str]:
    """Return the precision and its origin: the request's, else the planner's choice."""
    if request.precision is None and is_factory(request.model):
        return "fp32", "by default: your own loop is not changed"
    if request.precision is None and request.prefer == "quality":
        return "fp32", "by --prefer quality"
    return training_precision(request.precision, request.method, compute)


def training_limits(
    model: nn.Module, precision: str, budget_bytes: Mapping[str, int], *, clips: bool, adapters: frozenset[str]
) -> Limits:
    """Return the limits of a training in ``precision``; ``adapters`` are parameters that no file has."""
    states_leave = precision not in OWN_STEPS
    frozen = not any(p.requires_grad and n not in adapters for n, p in model.named_parameters())
    return Limits(
        budget_bytes=dict(budget_bytes),
        single_pass=states_leave and not clips and precision != "fp16-mixed",
        gradients_leave=precision != "fp16-mixed" and states_leave,
        states_leave=states_leave,
        streams=states_leave or frozen,
    )


def case_of(request: Request, machine: Machine, start_bytes: int) -> TrainingCase:
    if is_factory(request.model):
        return _case_of_factory(request, machine, start_bytes)
    hardware = machine.hardware
    precision, _ = precision_of(request, hardware.compute)
    model = _model(request, precision)
    check_positions(model, request.seq)
    base = frozenset(name for name, _ in model.named_parameters() if ".lora_" not in name)
    adapters = frozenset(name for name, _ in model.named_parameters()) - base
    if here := _is_here(request, machine):
        warm_up(model, hardware, request.batch * request.seq, precision=precision)

    def inputs(count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, request.seq, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    partition = find_blocks(model, stay=adapters)
    step = _step_of(request, machine, model, partition, dict(_sources(model, base)), inputs, start_bytes)
    return TrainingCase(
        step=step,
        state_bytes=partial(optimizers.state_bytes, request.optimizer),
        precision=precision,
        limits=training_limits(model, precision, machine.budget_bytes, clips=False, adapters=adapters),
        tokens=request.seq,
        stay=adapters,
        in_place=lambda: works_in_place(model, inputs(1)),
        clock=_clock(model, partition, inputs) if here and precision in ("fp32", STORED) else None,
    )


def _case_of_factory(request: Request, machine: Machine, start_bytes: int) -> TrainingCase:
    """Return the case of the user's loop with ``brim.fit``, whose budget and promise count tensors only."""
    model, example = factory.made_by(find_model(request.model))
    compute, partition = machine.hardware.compute, checkpointing.partition_of(model)
    precision, _ = precision_of(request, compute)

    def inputs(count: int) -> Any:
        return factory.with_rows(example, count)

    step = _step_of(request, machine, model, partition, {}, inputs, start_bytes)  # no weights in files
    return loop_case(
        replace(step, spent_bytes=dict),
        budget_bytes=machine.budget_bytes,
        orders=Orders(micro_batch=request.batch if factory.sees_rows_together(model) else None),
        in_place=lambda: works_in_place(model, inputs(request.batch)),
        precision=precision,
        states_leave=precision not in OWN_STEPS,
    )


def _is_here(request: Request, machine: Machine) -> bool:
    return request.gpu is None and not machine.assumed


def _step_of(
    request: Request,
    machine: Machine,
    model: nn.Module,
    partition: Partition,
    sources: dict[str, TensorSource],
    inputs: Callable[[int], Any],
    start_bytes: int,
) -> TrainingStep:
    here = _is_here(request, machine)
    return TrainingStep(
        name=str(request.model),
        model=model,
        partition=partition,
        weights=Weights(sources=sources),
        optimizer=lambda module: make_optimizer(request.optimizer, module, 1e-4),
        inputs=inputs,
        batch=request.batch,
        hardware=machine.hardware,
        budget_bytes=machine.budget_bytes,
        spent_bytes=_share(model, request, machine, start_bytes) if here else (lambda: BESIDE_BYTES),
    )


def _clock(model: nn.Module, partition: Partition, inputs: Callable[[int], Any]) -> Clock:
    """Return a clock of blocks on this machine; empty where they need values that only a real run has."""

    def seconds(batch: int) -> Mapping[str, tuple[float, float, float]]:
        try:
            timed = block_seconds(model, partition, inputs(batch), training=True)
            unsaved = block_seconds(model, partition, inputs(batch), training=False)
        except UnsupportedError:
            return {}
        return {
            name: (block.forward_s, block.backward_s, min(block.forward_s, unsaved[name].forward_s))
            for name, block in timed.items()
            if name
        }

    return seconds


def _share(model: nn.Module, request: Request, machine: Machine, start_bytes: int) -> Callable[[], Mapping[str, int]]:
    """Return a function for the program's bytes beside tensors here: its growth, or a larger earlier one."""

    def share() -> dict[str, int]:
        program = spent(start_bytes, BESIDE_BYTES)
        tokens = request.batch * request.seq
        grown = most_grown(f"train {request.method}", model, tokens, program[RAM], machine.left_bytes)
        return {**program, RAM: grown + _BETWEEN_RUNS_BYTES}

    return share


def _model(request: Request, precision: str) -> nn.Module:
    """Build the model in train mode, on meta."""
    if (opened := quantized_module(replace(request, precision=precision))) is not None:
        return opened
    model: Any = described(request.model, weights_dtype(request.method, precision))
    if not model.can_generate():
        raise ModelError(
            f"Cannot train {request.model} on text.",
            f"{type(model).__name__} is not a language model that computes its own loss.",
            "Give a causal language model.",
        )
    model.config.use_cache = False
    if request.method == "lora":
        with torch.device("meta"):
            model = with_adapters(model, 0)
    trained: nn.Module = model.train()
    return trained


def _sources(model: nn.Module, names: frozenset[str]) -> Iterator[tuple[str, TensorSource]]:
    """Yield the parameters' places in an assumed checkpoint: a single file, in order.

    Its header is not known, so tensors begin where blocks of the file reach into the most pages.
    """
    offset = PAGE_BYTES - _TENSOR_ALIGNMENT_BYTES
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        count = parameter.numel() * parameter.element_size()
        extent = Extent(path=str(Path("model.safetensors").absolute()), offset=offset, bytes=count)
        yield name, TensorSource(name=name, dtype=parameter.dtype, shape=tuple(parameter.shape), extents=(extent,))
        offset += count


# -- proposals


def _proposal(
    request: Request, machine: Machine, search: TrainingSearch, strategy: TrainingStrategy, *, first: bool
) -> Proposal:
    compute, peaks = machine.hardware.compute, strategy.prediction.peak_bytes
    limits = retention_limits(peaks[RAM], machine.budget_bytes[RAM]) if compute == RAM else None
    plan = strategy.choice.plan(
        model=str(request.model),
        hardware=machine.hardware.name,
        budget_bytes=machine.budget_bytes,
        promise=strategy.prediction.with_heap(limits).promise(),
    )
    timeline: Timeline | None = None
    if first and strategy.schedule is not None:
        timeline = strategy.schedule.timeline(f"{request.model} train", compute)
    return Proposal(
        plan=plan,
        step_s=strategy.step_s,
        limited_by=strategy.limited_by,
        techniques=[] if strategy.assignment is None else effects(search, strategy.assignment),
        command=(
            factory.command()
            if is_factory(request.model)
            else command(request, strategy.choice, [block.name for block in strategy.partition.blocks])
        ),
        gap=0.0 if strategy.assignment is None else strategy.assignment.gap,
        frees=frees(search, strategy.assignment) if first and strategy.assignment is not None else (),
        timeline=timeline,
    )


def command(request: Request, choice: Choice, blocks: list[str]) -> str:
    """Return the command of a choice: with options where they express all of it, else with the plan's file."""
    run = TrainRequest(model=request.model, data=DATA, output=TRAINED)
    orders = _orders(choice, blocks)
    if orders is None:
        return shlex.join(["brim", "train", *words(replace(run, plan=PLAN_FILE))])
    same = {name: getattr(request, name) for name in ("vram", "ram", *_SAME)}
    run = replace(run, **{**same, "precision": choice.precision, **orders})
    return shlex.join(["brim", "train", *words(run, always=_SAME)])


def _orders(choice: Choice, blocks: list[str]) -> dict[str, Any] | None:
    """Return the fields of a request that express a choice; None where a decision has no option."""
    kept = {choice.checkpointing.get(name, "none") for name in _repeated(choice, blocks)} or {"none"}
    evenly = choice.activations == spread(_repeated(choice, blocks), len(choice.activations))
    untold = choice.streams or choice.chunk_tokens or choice.in_backward or choice.gradients != "keep"
    untold = untold or choice.in_place or choice.brief_buffer or choice.gpu_sixteenths or choice.block_rows
    if untold or len(kept) > 1 or not evenly:
        return None
    return {
        "micro_batch": choice.micro_batch,
        "checkpointing": kept.pop(),
        "offload_activations": len(choice.activations),
        "offload_optimizer": choice.states,
        "stream_weights": False,
    }


def _repeated(choice: Choice, blocks: list[str]) -> list[str]:
    """Return the numbered blocks, for which checkpointing can be chosen."""
    return [name for name in blocks if name.rpartition(".")[2].isdigit()]
