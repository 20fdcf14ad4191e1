"""What a training step will take, found by applying the plan to a model without bytes and tracing a step of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from brim.core import Hardware, Promise, Timeline, Trace
from brim.core.hardware import DISK, RAM
from brim.estimation.simulation import simulate
from brim.memory.tiers import Memory, fake_memory
from brim.predict import cost
from brim.predict.tracer import trace
from brim.run.fitted import apply_choice
from brim.run.training_choice import Choice
from brim.techniques.blocks import Partition
from brim.techniques.micro_batch import MicroBatch
from brim.techniques.weight_streaming import Weights

# What lies between and around tensors in a process: the heap's holes, autograd's own objects, pages half used. In
# steps of a 135 M model, what was measured was 0.7 to 2.6 % above what tensors and the program before them took.
_AROUND_TENSORS = 0.03
_ENDLESS_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The peaks of a step per tier, the program's share included, and its seconds as far as the machine is known."""

    peak_bytes: Mapping[str, int]
    step_s: float = 0.0
    bound_s: float = 0.0
    limited_by: str = ""

    def promise(self) -> Promise:
        return Promise(
            peak_bytes=dict(self.peak_bytes), step_s=self.step_s, bound_s=self.bound_s, limited_by=self.limited_by
        )


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A training to be predicted. ``model`` is never run, only its shape is used; it may have no values.

    ``optimizer`` makes the optimizer of a model; ``inputs`` a batch of so many sequences, as long as they come;
    ``spent_bytes`` says what the program itself takes per tier.
    Parameters with a source in ``weights`` hold nothing until their block is placed.
    """

    name: str
    model: nn.Module
    partition: Partition
    weights: Weights
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    batch: int
    hardware: Hardware
    clip_norm: float | None = None
    spent_bytes: Callable[[], Mapping[str, int]] = dict

    def predict(self, choice: Choice) -> Prediction:
        """Peak bytes per tier and seconds of a step under ``choice``."""
        seen: list[Memory] = []
        moved: list[dict[tuple[str, str], int]] = []
        made = trace(
            lambda: self._build(choice, seen, moved),
            steps=1,
            target="cpu" if self.hardware.compute == RAM else "cuda",
            model=self.name,
        )
        memory = seen[0]
        compute = self.hardware.compute
        peak = {compute: simulate(made).peak_bytes.reserved}
        if memory.host is not None:
            peak[RAM] = memory.host.peak_bytes
        peak[DISK] = memory.scratch().peak_bytes
        memory.close()
        step = {way: count - moved[0].get(way, 0) for way, count in moved[1].items()}
        timed = _timed(made, step, self.hardware)
        del made, memory
        spent = self.spent_bytes()  # asked last: what the tracing itself leaves behind is part of it
        if compute == RAM and spent:
            peak[RAM] += int(peak[RAM] * _AROUND_TENSORS)
        return replace(timed, peak_bytes={tier: count + spent.get(tier, 0) for tier, count in peak.items()})

    def _build(
        self, choice: Choice, seen: list[Memory], moved: list[dict[tuple[str, str], int]]
    ) -> Callable[[], None]:
        model = twin(self.model, self.weights).train()
        optimizer = self.optimizer(model)
        plan = choice.plan(model=self.name, hardware=self.hardware.name, budget_bytes={}, promise=_NOTHING)
        memory = fake_memory(
            Timeline(self.name, measured=False),
            compute_tier=self.hardware.compute,
            compute_bytes=_ENDLESS_BYTES,
            ram_bytes=_ENDLESS_BYTES,
        )
        seen.append(memory)
        if choice.states == "keep":
            _make_states(optimizer)
        fitted = apply_choice(model, optimizer, plan, memory, self.partition, self.weights)
        # Two of many micro-batches have the peaks of all: the first adds up gradients, the last lets them go.
        count = min(2, -(-self.batch // choice.micro_batch))
        micros = [MicroBatch(inputs=self.inputs(choice.micro_batch), weight=1 / count) for _ in range(count)]

        def step() -> None:
            moved.append(dict(memory.recorder.copied_bytes))
            fitted.step(micros, clip_norm=self.clip_norm)
            moved.append(dict(memory.recorder.copied_bytes))

        return step


_NOTHING = Promise(peak_bytes={})


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """What a first step would leave in the optimizer: from the second on, a step meets it."""
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        held, parameter.data = parameter.data, torch.empty(parameter.shape, dtype=parameter.dtype)
        parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        parameter.grad, parameter.data = None, held


def twin(model: nn.Module, weights: Weights) -> nn.Module:
    """A copy of ``model`` for tracing: parameters and buffers of its shapes, made where this is called.

    Parameters whose values are in files hold nothing, as they do in a module that is being loaded.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if name in weights.sources:
            data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        else:
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def _timed(made: Trace, moved: Mapping[tuple[str, str], int], hardware: Hardware) -> Prediction:
    """Copies run beside compute, so the slowest lane sets the pace."""
    lanes = {"compute": cost.step_cost(made, hardware).step_s}
    for (source, target), count in moved.items():
        rate = hardware.link(*_known(hardware, source, target)).bytes_per_s
        lanes[f"{source} -> {target}"] = count / rate
    slowest = max(lanes, key=lambda lane: lanes[lane])
    return Prediction(peak_bytes={}, step_s=lanes[slowest], bound_s=lanes[slowest], limited_by=slowest)


def _known(hardware: Hardware, source: str, target: str) -> tuple[str, str]:
    """A link that was measured: writing to a drive is taken to be as fast as reading where it was not."""
    have = {(link.source, link.target) for link in hardware.links}
    return (source, target) if (source, target) in have else (target, source)
