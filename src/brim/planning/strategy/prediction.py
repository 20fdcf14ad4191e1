"""Predict a training step's peaks and seconds: apply the plan to a model without data and trace a step of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from brim.core import Hardware, Phase, Promise, Timeline, Trace
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, UnsupportedError
from brim.estimation.simulation import lives, simulate
from brim.memory.heap import HeapGrowth, HeapLimits
from brim.memory.pool import Pool, TorchSource
from brim.memory.recorder import Recorder
from brim.memory.tiers import Memory
from brim.model_inputs import map_tensors
from brim.planning.inference.machine import Device, capability
from brim.planning.proof import ENDLESS_BYTES
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.predicted_timeline import known_way, step_timeline
from brim.planning.strategy.step import Fitted, apply_choice
from brim.predict import cost
from brim.predict.dispatch import on_host
from brim.predict.tracer import trace
from brim.techniques.activation_offload import inplace as inplace_activations
from brim.techniques.blocks import Partition
from brim.techniques.meta_copy import make_states, meta_copy
from brim.techniques.micro_batch import MicroBatch
from brim.techniques.precision import PrecisionHandle, states_dtype
from brim.techniques.streaming.weight_streaming import RESIDENT, Weights

# Offloading needs threads, requests, hooks and pages of files for look-ups. They took up to 7 MB after the first step
# began, in a 135 M model with weights and states on disk.
_MOVING_BYTES = 8 << 20
# The first pass has no gradients to add to, the last may free them in its backward; all others are equal.
_TRACED_PASSES = 3
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's peaks per tier, the program's share included, and its seconds on a known machine."""

    peak_bytes: Mapping[str, int]
    step_s: float = 0.0
    bound_s: float = 0.0
    limited_by: str = ""

    def with_heap(self, limits: HeapLimits | None) -> Prediction:
        """Return the prediction for a heap that keeps freed memory up to ``limits``."""
        if limits is None:
            return self
        return replace(self, peak_bytes={**self.peak_bytes, RAM: limits.promised_bytes})

    def promise(self) -> Promise:
        return Promise(
            peak_bytes=dict(self.peak_bytes), step_s=self.step_s, bound_s=self.bound_s, limited_by=self.limited_by
        )


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A traced step, and its peaks per tier without the program's own share.

    ``timed`` has its seconds by the machine's rates.
    """

    trace: Trace
    peak_bytes: Mapping[str, int]
    timed: Prediction


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A training to predict. ``model`` is never run and may have no values.

    ``optimizer`` creates the optimizer of a model; ``inputs`` creates a batch of a number of sequences of the longest
    length (None: the step is unknown, and only the memory before it is predicted); ``spent_bytes`` returns the
    program's own bytes per tier. ``device`` is "emulated" where RAM plays VRAM. Parameters with a source in
    ``weights`` hold nothing until their block is placed. ``update_bytes`` are updated at once (None: depends on the
    size of ``model``). ``in_place`` caches in-place activations by techniques for later predictions.
    """

    name: str
    model: nn.Module
    partition: Partition
    weights: Weights
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Callable[[int], Any] | None
    batch: int
    hardware: Hardware
    device: Device = "auto"
    budget_bytes: Mapping[str, int] = field(default_factory=dict)
    clip_norm: float | None = None
    spent_bytes: Callable[[], Mapping[str, int]] = dict
    update_bytes: int | None = None
    in_place: dict[Any, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def reserves(self) -> bool:
        """True where PyTorch's CUDA allocator manages the compute tier."""
        return self.hardware.compute == VRAM and self.device != "emulated"

    def trace(self, choice: Choice) -> Trace:
        """Trace the step under ``choice``, without the memory of other tiers."""
        run = _Run(self, choice, ENDLESS_BYTES)
        try:
            return run.trace()
        finally:
            run.memory.close()

    def predict(self, choice: Choice) -> Prediction:
        """Predict peak bytes per tier and seconds of a step under ``choice``."""
        seen = self.simulate(choice)
        timed, peak_bytes = seen.timed, seen.peak_bytes
        del seen
        return replace(timed, peak_bytes=self.in_all(choice, peak_bytes))

    def simulate(self, choice: Choice) -> SimulatedStep:
        """Trace the step under ``choice``, without the program's own share."""
        try:
            # Slabs depend on the budget of RAM, so it is set; where it is too small the search needs the bytes that
            # would do, so it is lifted.
            return self._see_in(choice, self.budget_bytes.get(RAM, ENDLESS_BYTES))
        except BudgetError:
            return self._see_in(choice, ENDLESS_BYTES)

    def in_all(self, choice: Choice, peak_bytes: Mapping[str, int]) -> dict[str, int]:
        """Add the program's own share to ``peak_bytes`` of a step under ``choice``."""
        peak = dict(peak_bytes)
        moves = choice.streams or choice.offloads_optimizer or choice.activations
        if self.hardware.compute == RAM and moves and self.spent_bytes is not dict:
            peak[RAM] += _MOVING_BYTES
        spent = self.spent_bytes()  # called last, as memory that the tracing leaves behind is part of it
        return {tier: count + spent.get(tier, 0) for tier, count in peak.items()}

    def foresee(self, choice: Choice, promised_s: float) -> Timeline:
        """Return the traced passes of a step under ``choice`` as a Timeline from 0 s on.

        They take their share of the step's computation in ``promised_s``.
        """
        run = _Run(self, choice, ENDLESS_BYTES)
        trace = run.trace()
        run.memory.close()
        name = f"{self.name}: a step, {run.traced_passes} of {run.passes} passes"
        blocks = [block.name for block in self.partition.blocks]
        drawn_s, further_s = _computes_s(trace, run, self.hardware)
        whole_s = promised_s or _timed(trace, run, self.hardware).step_s
        step_s = whole_s * (drawn_s / (drawn_s + further_s) if drawn_s else 1.0)
        timeline = step_timeline(name, trace, run.memory.recorder.timeline, blocks, self.hardware, step_s)
        timeline.facts["promised_step_s"] = promised_s
        return timeline

    def _see_in(self, choice: Choice, ram_bytes: int) -> SimulatedStep:
        run = _Run(self, choice, ram_bytes)
        trace = run.trace()
        memory, compute = run.memory, self.hardware.compute
        peak = {compute: _resident_bytes(trace) if compute == RAM else simulate(trace).peak_bytes.reserved}
        if memory.host is not None:
            peak[RAM] = memory.host.peak_bytes
        peak[DISK] = memory.disk_peak_bytes
        memory.close()
        timed = Prediction(peak_bytes={}) if self.inputs is None else _timed(trace, run, self.hardware)
        return SimulatedStep(trace=trace, peak_bytes=peak, timed=timed)


class _HostSource(TorchSource):
    """Host memory beside the traced device."""

    def make(self, bytes: int) -> torch.Tensor:
        with on_host():
            return super().make(bytes)


class _Run:
    """A step without data under a choice: the function that ``trace`` calls, and its results."""

    def __init__(self, step: TrainingStep, choice: Choice, ram_bytes: int) -> None:
        self._step, self._choice = step, choice
        self.on_cuda = step.reserves
        self.passes = -(-step.batch // choice.micro_batch)
        self.traced_passes = min(_TRACED_PASSES, self.passes) if step.inputs is not None else 0
        self._precision: PrecisionHandle | None = None
        self.moved: dict[tuple[str, str], int] = {}  # bytes over each link in the traced step
        self.moved_between: dict[tuple[str, str], int] = {}  # in each pass that is neither the first nor the last
        recorder = Recorder(Timeline(step.name, measured=False))
        device = torch.device("cuda" if self.on_cuda else "cpu")
        host = None
        if step.hardware.compute != RAM:
            host = Pool(RAM, ram_bytes, _HostSource(_CPU), recorder)
        compute = Pool(step.hardware.compute, ENDLESS_BYTES, TorchSource(device), recorder)
        self.memory = Memory(compute=compute, host=host, recorder=recorder, device=device, fake=True)

    def trace(self) -> Trace:
        target = "cuda" if self.on_cuda else "cpu"
        of = capability(self._step.hardware) if self.on_cuda else (8, 0)
        try:
            return trace(self.build, steps=1, target=target, model=self._step.name, capability=of)
        finally:
            if self._precision is not None:
                self._precision.close()

    def build(self) -> Callable[[], None]:
        step, choice, memory = self._step, self._choice, self.memory
        model = meta_copy(step.model, absent=self._absent(), device=memory.device).train()
        optimizer = step.optimizer(model)
        if choice.states == "keep":
            make_states(optimizer, memory.device, states_dtype(choice.precision))
        # In-place activations are tried before the model is moved, so on its present device.
        first = next(model.parameters(), None)
        fitted = self._fitted(model, optimizer, self._inputs(None if first is None else first.device))
        self._precision = fitted.precision
        micros = [MicroBatch(inputs=self._inputs(), weight=1 / self.traced_passes) for _ in range(self.traced_passes)]
        copied, begins = memory.recorder.copied_bytes, []
        model.register_forward_pre_hook(lambda *_: begins.append(dict(copied)))

        def run_step() -> None:
            before = dict(copied)
            if micros:
                fitted.step(micros, clip_norm=step.clip_norm)
            self.moved = _grown(before, copied)
            if len(begins) > 2:
                self.moved_between = _grown(begins[1], begins[2])

        return run_step

    def _fitted(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> Fitted:
        step, choice = self._step, self._choice
        plan = choice.plan(
            model=step.name, hardware=step.hardware.name, budget_bytes={}, promise=Promise(peak_bytes={})
        )
        beside = (choice.micro_batch, choice.precision, repr(choice.checkpointing), choice.chunk_tokens)
        fitted = apply_choice(
            model,
            optimizer,
            plan,
            self.memory,
            step.partition,
            step.weights,
            inputs,
            update_bytes=step.update_bytes,
            in_place=step.in_place.get(beside),
        )
        if choice.in_place:
            step.in_place[beside] = fitted.in_place
        return fitted

    def _inputs(self, device: torch.device | None = None) -> Any:
        """Return a batch on ``device`` (None: the compute tier's)."""
        if self._step.inputs is None:
            return None
        inputs = self._step.inputs(self._choice.micro_batch)
        return map_tensors(inputs, lambda value: value.to(device or self.memory.device))

    def _absent(self) -> set[str]:
        """Return parameters whose values are moved, so that their memory in the module is freed."""
        step, streaming = self._step, self._choice.streaming
        named = dict(step.model.named_parameters())
        if step.hardware.compute == RAM:
            blocks = [b for b in step.partition.blocks if streaming.get(b.name, RESIDENT) != RESIDENT]
            return {name for block in blocks for name in block.tensors} | set(step.weights.sources)
        # Parameters without values yet will be loaded to RAM.
        return {name for name, p in named.items() if p.device.type in ("cpu", "meta")} | set(step.weights.sources)


def works_in_place(model: nn.Module, example: Any) -> bool:
    """Return True where some activations of ``model`` may write over their inputs."""
    try:
        return inplace_activations.saved_bytes(model, example) > 0
    except UnsupportedError:  # it cannot be tried without bytes
        return False


def _resident_bytes(trace: Trace) -> int:
    """Return the bytes by which a process grows for the tensors of a step on the CPU."""
    heap = HeapGrowth()
    for storage, born, _ in lives(trace):
        if born:
            heap.alloc(storage.id, storage.bytes)
        else:
            heap.free(storage.id)
    return heap.peak_bytes


def _grown(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    return {way: bytes - before.get(way, 0) for way, bytes in after.items()}


def _middle_pass(trace: Trace) -> Trace:
    """Return the second of three passes, which stands for all further ones: it adds to existing gradients."""
    phases = itertools.groupby((op for op in trace.ops if op.step == 0), lambda op: op.phase is Phase.BACKWARD)
    return replace(trace, ops=tuple(op for _, ops in itertools.islice(phases, 2, 4) for op in ops))


def _computes_s(trace: Trace, run: _Run, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of the traced passes with the update, and of all others."""
    more = run.passes - run.traced_passes
    middle_s = cost.step_s(_middle_pass(trace), hardware) if more else 0.0
    return cost.step_s(trace, hardware), more * middle_s


def _timed(trace: Trace, run: _Run, hardware: Hardware) -> Prediction:
    """Time the step by its slowest lane, as copies overlap with compute. All other passes are equal."""
    lanes = {"compute": sum(_computes_s(trace, run, hardware))}
    more = run.passes - run.traced_passes
    for (source, target), bytes in run.moved.items():
        count = bytes + more * run.moved_between.get((source, target), 0)
        rate = hardware.link(*known_way(hardware, source, target)).bytes_per_s
        lanes[f"{source} -> {target}"] = count / rate
    slowest = max(lanes, key=lambda lane: lanes[lane])
    return Prediction(peak_bytes={}, step_s=lanes[slowest], bound_s=lanes[slowest], limited_by=slowest)
