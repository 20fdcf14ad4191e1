"""Optimizer offload: the states of an optimizer that updates each parameter on its own rest in RAM or on disk.

They are loaded block by block. The update is the code of the user's own optimizer: for each block its
parameter groups are narrowed to the block's parameters, the block's states are put into ``optimizer.state``, ``step``
runs, and the states are offloaded again. So results are those of the plain optimizer, bit for bit, and learning rate
schedulers, hooks and options work as usual. Beside a GPU, the step of a block with offloaded states runs on the CPU,
or on the GPU, which its states visit: then it is the step of training in VRAM, bit for bit.

Sources: ZeRO-Offload (Ren et al., 2021), stepping on the CPU during backward; torchao's ``CPUOffloadOptimizer``,
leaving the optimizer alone; PyTorch, torch/optim/optimizer.py, for the wrappers of ``step``.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.core.hardware import DISK, RAM
from brim.errors import UnsupportedError, UsageError
from brim.memory.tiers import Memory
from brim.techniques.base import HANDLE_ATTRIBUTE
from brim.techniques.optimizer_offload.gradients import Arrivals, Gradients, clip
from brim.techniques.optimizer_offload.host_device_copy import (
    BackgroundUpdates,
    HostDeviceCopy,
    HostStep,
    padded_bytes,
)
from brim.techniques.optimizer_offload.state_blocks import (
    BLOCK_BYTES,
    UPDATE_PARTS,
    LoadedGradient,
    StateBlock,
    state_blocks,
)
from brim.techniques.optimizer_offload.states import OptimizerState, States
from brim.techniques.optimizer_offload.step_context import (
    Recomputation,
    narrowed,
    place_counters,
    root_task,
    stepping,
)
from brim.techniques.optimizer_offload.trial import Trial, raw_step
from brim.techniques.streaming.weight_streaming import WeightStreaming
from brim.units import MIB

NAME = "optimizer_offload"
KEEP = "keep"
CHOICES = (KEEP, RAM, DISK)
_AHEAD = 64  # blocks whose states are fetched while one is updated, as far as they fit
_WORTH_READING_AHEAD_BYTES = MIB
_PART = 12  # three blocks are then a quarter of all


def apply(
    model: nn.Module,
    optimizer: Optimizer,
    memory: Memory,
    *,
    states: str,
    gradients: str = KEEP,
    keep: Collection[str] = (),
    streaming: WeightStreaming | None = None,
    block_bytes: int = BLOCK_BYTES,
    buffer_bytes: int | None = None,
    brief: bool = False,
    gpu_sixteenths: int = 0,
) -> OptimizerOffload:
    """Offload the states of ``optimizer`` and its gradients to ``ram`` or ``disk``.

    ``keep``: names of blocks whose states stay. ``block_bytes`` bounds the parameters of a block; ``buffer_bytes``
    is the RAM that states on disk pass through (None: enough for three ordinary blocks, or for the largest one). With
    ``brief`` it has room for the largest unit only, so that nothing is read ahead, and is freed at the end of each
    step. With ``gpu_sixteenths`` > 0 states pass through a buffer in VRAM for that many sixteenths of them, those on
    disk through an equal one in RAM before, and the GPU steps.

    Raises UsageError for an unknown choice, ``gpu_sixteenths`` without a GPU or with states that stay, or a fitted
    optimizer, UnsupportedError for an optimizer that needs all its parameters at once, BudgetError and
    TransferError; then nothing has changed.
    """
    check(optimizer, states=states, gradients=gradients)
    if gpu_sixteenths and (memory.host is None or states == KEEP):
        raise UsageError(
            "Cannot update on the GPU.",
            f"States are in {states}.",
            'Offload them beside a GPU (states="ram" or "disk").',
        )
    streamed_blocks = () if streaming is None else streaming.blocks
    trial = Trial(optimizer, on_gpu=gpu_sixteenths > 0)
    blocks = state_blocks(model, optimizer, block_bytes=block_bytes, given=streamed_blocks, trial=trial)
    unknown = set(keep) - {block.name for block in blocks}
    if unknown:
        raise UsageError(f"Unknown blocks keep={sorted(unknown)} of {NAME}.", "The model has no such blocks.")
    choices = Choices(
        states=states,
        gradients=gradients,
        keep=frozenset(keep),
        buffer_bytes=buffer_bytes,
        brief=brief,
        gpu_sixteenths=gpu_sixteenths,
    )
    return OptimizerOffload(model, optimizer, memory, blocks, choices, streaming)


class OptimizerOffload:
    """The handle of a fitted optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        memory: Memory,
        blocks: Sequence[StateBlock],
        choices: Choices,
        streaming: WeightStreaming | None,
    ) -> None:
        self.model, self.optimizer, self.memory = model, optimizer, memory
        self.blocks = dict(enumerate(blocks))
        self._streaming = streaming
        self._streamed = {
            id(p) for _, parameters_of_block in (streaming.blocks if streaming else ()) for p in parameters_of_block
        }
        self._done: set[int] = set()  # blocks that the current step has updated
        self._begun: dict[int, int] = {}  # block -> how many of its units were begun
        self._order: list[int] = list(reversed(self.blocks))  # in which backward completes them, learned
        self._seen: list[int] = []
        self._in_final = self._after_final = self._clipped = self._removed = False
        self._root = -1
        self._storage = OffloadStorage(optimizer, memory, self.blocks, choices)
        self._written_before, self._written = self._storage.written_bytes, -1
        self._recomputation = Recomputation(model)
        self._background = BackgroundUpdates(memory, self._storage.host_copy)
        self._arrivals = Arrivals(self.blocks, self._complete, self._over)
        self._plain_step = vars(optimizer).get("step")
        self._state = OptimizerState(optimizer, self.blocks, self._storage.offloaded, self._storage.states)
        step = stepping(optimizer, self._plain_step is not None, self._step_all, lambda: self._removed)
        vars(optimizer)["step"] = self._step = types.MethodType(step, optimizer)
        vars(optimizer)[HANDLE_ATTRIBUTE] = self
        if streaming is not None:
            streaming.is_updated_by(optimizer, [p for block in blocks for p in block.parameters])

    # -- the step

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """Update each block as soon as its gradients are complete, in the last backward pass before ``step``.

        The gradients of the block are dropped then; ``step`` updates the rest. Raises UsageError for a second
        backward pass and for clipping. It cannot be used with a gradient scaler, which would not see the gradients. A
        block that is computed in part by a nested backward pass (reentrant checkpointing) waits for the end, as it
        may be recomputed with the old weights.
        """
        if self._in_final or self._after_final or self._clipped:
            reason = "Gradients were clipped" if self._clipped else "The last final() was not followed by step()"
            raise UsageError(
                "Cannot enter final().", f"{reason}.", "Call optimizer.step(), or reset() to start again."
            )
        self._in_final, self._root, self._seen = True, root_task(), []
        try:
            yield
        finally:
            self._in_final, self._after_final = False, bool(self._done)
            self._recomputation.allow()
            rest = [index for index in self._order if index not in self._seen]
            self._order = self._seen + rest
            self._background.join()
        self._settle()

    @property
    def partly_updated(self) -> bool:
        """Return whether the current step has updated some weights, so that it cannot be repeated."""
        return bool(self._done or self._begun)

    def reset(self) -> None:
        """Forget the current step after an exception: the next backward pass begins a new one."""
        self._background.give_up()
        self._done.clear()
        self._begun.clear()
        self._arrivals.reset()
        self._after_final = self._clipped = False

    def _complete(self, index: int, task: int) -> None:
        """Update a block, or offload its gradients, which are complete."""
        if index in self._done or index in self._begun:
            if self._in_final or self._after_final:
                raise UsageError(
                    f"Cannot take a gradient for block {self.blocks[index].name}, which is updated already.",
                    "final() is for one backward pass, the last one before optimizer.step().",
                    "Enter it for the last backward pass only, and call step() before the next.",
                )
            self.reset()  # the last step() failed
        ahead = self._order[self._order.index(index) + 1 :]
        if self._in_final and task == self._root:
            self._seen.append(index)
            self._update(index, ahead, dropping=True)
            self._recomputation.forbid(self.blocks[index])
        else:
            self._storage.gradients.store(index)
            self._storage.gradients.expect(ahead[:_AHEAD])

    def _over(self, task: int, incomplete: Sequence[int]) -> None:
        """Handle the end of a backward pass, which left these blocks incomplete."""
        if self._in_final and task == self._root:
            left = [i for i, block in self.blocks.items() if i not in self._done and _has_gradient(block)]
            for position, index in enumerate(left):
                self._update(index, left[position + 1 :], dropping=True)
            return
        for index in incomplete:
            if index not in self._done or not self._after_final:
                self._storage.gradients.store(index)

    def _step_all(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else self._closed(closure)
        todo = [i for i, b in self.blocks.items() if i not in self._done and _has_gradient(b)]
        try:
            for position, index in enumerate(todo):
                self._update(index, todo[position + 1 :], dropping=False)
            self._background.join()
        finally:
            self._background.give_up()  # after an error no update may go on
        self._step_rest()
        self._settle()
        order = self._order if self._after_final else list(self.blocks)  # the best guess
        self._storage.states.end_step(order[:_AHEAD])
        self.reset()
        before, self._written_before = self._written_before, self._storage.written_bytes
        self._written = self._written_before - before
        return loss

    def _closed(self, closure: Callable[[], Any]) -> Any:
        """The result of a closure. PyTorch's optimizers that can be updated block by block call it once, at first."""
        if raw_step(self.optimizer).__module__.partition(".")[0] != "torch":
            raise UnsupportedError(
                f"{type(self.optimizer).__name__}.step was called with a closure.",
                "It may call the closure more than once, for new gradients, but brim updates block by block.",
                "Call backward() before step(), and step() without it.",
            )
        with torch.enable_grad():
            return closure()

    def _step_rest(self) -> None:
        """Step parameters that belong to no block: added later, or frozen when the blocks were created."""
        in_blocks = {id(p) for block in self.blocks.values() for p in block.parameters}
        rest = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in in_blocks]
        if any(p.grad is not None for p in rest):
            with narrowed(self.optimizer, rest):
                raw_step(self.optimizer)(self.optimizer)

    def _update(self, index: int, ahead: Sequence[int], *, dropping: bool) -> None:
        """Step a block. It counts as done even if the step raises, as it may have changed weights."""
        block, is_offloaded, streaming = self.blocks[index], index in self._storage.offloaded, self._streaming
        soon = [i for i in ahead if i not in self._done][:_AHEAD]
        if is_offloaded and self._may_run_in_background(index):
            self._update_in_background(index, soon, dropping=dropping)
            return
        self._background.join()
        with torch.no_grad(), contextlib.ExitStack() as stack:
            streamed = [number for number, p in enumerate(block.parameters) if id(p) in self._streamed]
            weights, resting = [block.parameters[number] for number in streamed], list[int]()
            if streaming is not None and streamed:
                if is_offloaded and not self._storage.on_gpu and streaming.rests_in_ram(weights):
                    resting = streamed
                else:
                    stack.enter_context(streaming.updating(weights))
            gradients = stack.enter_context(self._storage.gradients.present(index, dropping=dropping))
            if streaming is not None and resting:  # after the gradients, which are not in RAM, were loaded
                stack.enter_context(streaming.updating_at_rest(weights))
            if is_offloaded:
                self._update_units(index, gradients, soon, resting)
                return
            self._storage.states.expect(soon)
            self._storage.gradients.expect(soon)
            in_place = self._storage.host_copy.stepping_in_place
            with in_place(block.parameters, gradients, block.name), narrowed(self.optimizer, block.parameters):
                self._done.add(index)
                raw_step(self.optimizer)(self.optimizer)

    def _update_units(
        self, index: int, gradients: Sequence[LoadedGradient | None], soon: Sequence[int], resting: Collection[int]
    ) -> None:
        """Step the units of a block one after the other. After an error the next call goes on with the next unit."""
        self._storage.gradients.expect(soon)
        count = self._storage.units(index, gradients)
        for number in range(self._begun.get(index, 0), count):
            with self._storage.unit(self.optimizer, index, number, gradients, soon, resting):
                self._begun[index] = number + 1
                if number + 1 == count:
                    self._done.add(index)
                raw_step(self.optimizer)(self.optimizer)

    def _may_run_in_background(self, index: int) -> bool:
        """Return whether the block's update shares nothing with the thread of the backward pass."""
        streamed = any(id(p) in self._streamed for p in self.blocks[index].parameters)
        return self._background.possible and not streamed and self._storage.gradients.are_plain(index)

    def _update_in_background(self, index: int, soon: Sequence[int], *, dropping: bool) -> None:
        """Start a step of a block on another thread. Its weights and states must not be read until ``join``."""
        block, states = self.blocks[index], self._storage.states
        stepped = [p.grad is not None for p in block.parameters]

        def update(host_step: HostStep) -> None:
            with torch.no_grad(), states.present(index, 0, stepping=stepped):
                states.expect(soon)
                with host_step.stepping(), narrowed(self.optimizer, block.parameters):
                    raw_step(self.optimizer)(self.optimizer)

        tensors = [(p, p.grad) for p in block.parameters if p.grad is not None]
        self._done.add(index)
        if dropping:
            self._storage.gradients.drop(index)
        self._background.begin(tensors, block.name, update)
        self._storage.gradients.expect(soon)

    def _settle(self) -> None:
        """Wait until streamed weights are stored at rest, where code outside of a step reads and writes them."""
        if self._streaming is not None:
            self._streaming.settle()

    # -- clipping and reports

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of the model's parameters, wherever the gradients are. Exact.

        Returns the norm before clipping. Raises UsageError after ``final()``, which has no gradients left.
        """
        if self._in_final or self._after_final:
            raise UsageError(
                "Cannot clip gradients.",
                "final() updates weights before the norm is known.",
                "Leave out final() in steps that clip.",
            )
        clipped = list(self.model.parameters() if parameters is None else parameters)
        norm = clip(clipped, self.blocks, self._storage.gradients, max_norm, norm_type, error_if_nonfinite, foreach)
        self._clipped = True
        return norm

    @property
    def written_bytes_per_step(self) -> int:
        """The bytes that the last step wrote to disk, accumulated gradients included.

        Before the first step: the bytes that a step with one backward pass will write.
        """
        return self._storage.disk_bytes if self._written < 0 else self._written

    # -- all states

    def iter_state(self, *, values: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every state tensor as (parameter's name + "." + key, tensor on the CPU), loaded one at a time.

        ``values`` False: on the meta device, and none is loaded.
        """
        return self._state.items(values=values)

    def load_state(self, name: str, tensor: torch.Tensor) -> None:
        """Set a state from ``iter_state``, which may keep ``tensor``.

        Raises UsageError for a parameter, or a tensor of one or more dimensions, that this optimizer lacks.
        """
        self._state.load(name, tensor)

    # -- the end

    def close(self) -> None:
        """End the thread of background updates, and ignore their errors. The handle is of no use after that."""
        self._background.close()

    def remove(self) -> None:
        """Give the optimizer back with all states and gradients in memory. A second call does nothing.

        Raises TransferError when the disk cannot be read; then it can be called again.
        """
        if self._removed:
            return
        self._background.give_up()
        self._storage.restore()
        place_counters(self.optimizer)
        self._removed = True
        if self._streaming is not None:
            self._streaming.is_updated_by(self.optimizer, [])
        self._background.close()
        self._arrivals.remove()
        self._recomputation.allow()
        self._state.remove()
        mine = vars(self.optimizer)
        if mine.get("step") is self._step:  # else another wrapper was added later, and this one only passes calls on
            del mine["step"]
            if self._plain_step is not None:
                mine["step"] = self._plain_step
        del mine[HANDLE_ATTRIBUTE]
        self._storage.free()


def _has_gradient(block: StateBlock) -> bool:
    return any(p.grad is not None for p in block.parameters)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """``states`` and ``gradients``: ``keep``, ``ram`` or ``disk``; ``keep``: names of blocks whose states stay.

    ``brief``: the buffer that states pass through has room for the largest unit only, and is freed between steps.
    ``gpu_sixteenths``: the buffer is in VRAM for this many sixteenths of the states, and the GPU steps; 0: the CPU.
    """

    states: str
    gradients: str
    keep: frozenset[str]
    buffer_bytes: int | None
    brief: bool
    gpu_sixteenths: int


def check(optimizer: Optimizer, **choices: str) -> None:
    """Raise UsageError for unknown choices or a fitted optimizer, UnsupportedError if its step was replaced."""
    if HANDLE_ATTRIBUTE in vars(optimizer):
        raise UsageError(
            f"Cannot fit {type(optimizer).__name__}.", "It is fitted already.", "Call .brim.remove() on it first."
        )
    for what, choice in choices.items():
        if choice not in CHOICES:
            raise UsageError(
                f"Unknown option {what}={choice!r} of optimizer_offload.", f"Known: {', '.join(CHOICES)}."
            )
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise UnsupportedError(
            f"Cannot fit {type(optimizer).__name__}.",
            "Another library has replaced its step.",
            "Fit the optimizer first and wrap its step afterwards.",
        )


class OffloadStorage:
    """The states of the ``offloaded`` blocks, the gradients of all, and the copies between RAM and compute tier."""

    def __init__(
        self, optimizer: Optimizer, memory: Memory, blocks: Mapping[int, StateBlock], choices: Choices
    ) -> None:
        self._blocks, self.on_gpu = blocks, choices.gpu_sixteenths > 0
        no_move = {KEEP, memory.compute.tier}
        gradients = None if choices.gradients in no_move else choices.gradients
        self.offloaded = {
            index: block
            for index, block in blocks.items()
            if choices.states not in no_move and block.name not in choices.keep
        }
        offloaded = self.offloaded.values()
        largest = max((padded_bytes(p) for b in blocks.values() for p in b.parameters), default=0)
        with contextlib.ExitStack() as undo:
            self.host_copy = HostDeviceCopy(
                memory,
                work_bytes=0 if self.on_gpu else work_bytes(offloaded),
                gradient_bytes=largest if gradients is not None else 0,
            )
            undo.callback(self.host_copy.free)
            at_once = memory.host is not None and not self.on_gpu  # a block is copied to RAM and back without cuts
            sizes = [size for b in offloaded for size in ([b.state_bytes] if at_once else b.unit_bytes())]
            usual = max(sizes, default=0) if choices.brief else usual_buffer_bytes(sizes)
            if self.on_gpu and not choices.brief:
                usual = choices.gpu_sixteenths * sum(sizes) // UPDATE_PARTS
            room = choices.buffer_bytes or usual
            tier = RAM if choices.states == KEEP else choices.states
            self.states = States(
                optimizer,
                memory,
                self.offloaded,
                tier=tier,
                buffer_bytes=room,
                at_once=at_once,
                brief=choices.brief,
                on_gpu=self.on_gpu,
            )
            undo.callback(self.states.records.free)
            room = choices.buffer_bytes or gradient_buffer_bytes([b.bytes for b in blocks.values()])
            self.gradients = Gradients(memory, blocks, self.host_copy, tier=gradients, buffer_bytes=room)
            undo.callback(self.gradients.free)
            undo.callback(self.states.restore)
            self.states.take_all()
            self.states.records.free_buffer()
            undo.pop_all()
        self._records = [self.states.records, *([self.gradients.records] if self.gradients.records else [])]

    def units(self, index: int, gradients: Sequence[LoadedGradient | None]) -> int:
        """The number of units of an offloaded block's update: 1 with a sparse gradient, which has no parts."""
        sparse = any(gradient is not None and gradient.tensor.is_sparse for gradient in gradients)
        return self.states.units(index) if self.states.fit_parts(index) and not sparse else 1

    @contextlib.contextmanager
    def unit(
        self,
        optimizer: Optimizer,
        index: int,
        number: int,
        gradients: Sequence[LoadedGradient | None],
        soon: Sequence[int],
        resting: Collection[int],
    ) -> Iterator[None]:
        """Restrict ``optimizer`` to a unit of a block, where it is stepped, within. ``soon``: the blocks after it.
        ``resting``: the numbers of the block's parameters that are in RAM already.
        """
        block, states, bound = self._blocks[index], self.states, self.host_copy.stepping_offloaded
        if self.units(index, gradients) < states.units(index):
            with (
                states.gathered(index),
                bound(block.parameters, gradients, block.name, resting),
                narrowed(optimizer, block.parameters),
            ):
                yield
            return
        parts = states.parts(index, number)
        owners = [block.parameters[part.parameter] for part in parts]
        part_gradients = [
            None if (whole := gradients[part.parameter]) is None else whole._replace(tensor=part.of(whole.tensor))
            for part in parts
        ]
        with states.present(
            index, number, stepping=[gradient is not None for gradient in part_gradients]
        ) as stand_ins:
            states.expect([index, *soon], number + 1)
            parts_at_rest = [place for place, part in enumerate(parts) if part.parameter in resting]
            with bound(stand_ins, part_gradients, block.name, parts_at_rest), narrowed(optimizer, owners, stand_ins):
                yield

    @property
    def written_bytes(self) -> int:
        return sum(records.written_bytes for records in self._records)

    @property
    def disk_bytes(self) -> int:
        return sum(sum(records.sizes.values()) for records in self._records if records.tier == DISK)

    def restore(self) -> None:
        """Bring all states and gradients back to memory. It can be called again after an error."""
        self.states.restore()
        self.gradients.restore()

    def free(self) -> None:
        self.gradients.free()
        self.states.records.free()
        self.host_copy.free()


def work_bytes(blocks: Iterable[StateBlock]) -> int:
    """The RAM for the parameters and gradients of the largest block, to be stepped there."""
    return max((2 * sum(padded_bytes(p) for p in block.parameters) for block in blocks), default=0)


def usual_buffer_bytes(sizes: Sequence[int]) -> int:
    """Room for three ordinary blocks (one is read, one stepped, one written), at least for the largest block.

    Only for the largest where three would be a large part of all, as in a model of a few large layers, or where
    blocks are so small that reading ahead gains nothing.
    """
    ordinary = max(sorted(sizes)[: max(1, len(sizes) * 9 // 10)], default=0)
    three = 3 * ordinary if ordinary >= _WORTH_READING_AHEAD_BYTES and _PART * ordinary <= sum(sizes) else 0
    return max([three, *sizes])


def gradient_buffer_bytes(sizes: Sequence[int]) -> int:
    """Room for three ordinary blocks, but not for more than all: accumulated gradients move many times a step."""
    ordinary = sorted(sizes)[: max(1, len(sizes) * 9 // 10)]
    return max([min(3 * max(ordinary, default=0), sum(sizes)), *sizes])
