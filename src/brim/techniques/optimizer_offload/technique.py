"""Optimizer offload: the states of any optimizer that updates each parameter on its own rest in RAM or on disk.

They visit the optimizer block by block. The update is the user's own optimizer's own code: for each block its
parameter groups are narrowed to the block's parameters, the block's states are put into ``optimizer.state``, ``step``
runs, and they go again. So results are those of the plain optimizer, bit for bit, and learning rate schedulers, hooks
and options work as ever. Where a GPU computes, the step of a block whose states are away runs on the CPU.

Sources: ZeRO-Offload (Ren et al., 2021), stepping on the CPU during backward; torchao's ``CPUOffloadOptimizer``,
leaving the optimizer alone; PyTorch, torch/optim/optimizer.py, for what wraps ``step``.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.errors import UnsupportedError, UsageError
from brim.memory.tiers import Memory
from brim.techniques.base import HANDLE_ATTRIBUTE
from brim.techniques.optimizer_offload.background_update import BackgroundUpdates
from brim.techniques.optimizer_offload.clipping import clip
from brim.techniques.optimizer_offload.gradients import Arrivals
from brim.techniques.optimizer_offload.parts import Here
from brim.techniques.optimizer_offload.places import (
    KEEP,
    Choices,
    Places,
    Streaming,
    check,
)
from brim.techniques.optimizer_offload.states import StateBlock, state_blocks
from brim.techniques.optimizer_offload.trial import Trial, raw_step
from brim.techniques.optimizer_offload.whole import WholeState
from brim.techniques.streaming.host_device_copy import Carried
from brim.techniques.streaming.step_context import (
    Recomputation,
    narrowed,
    place_counters,
    root_task,
    stepping,
)

NAME = "optimizer_offload"
BLOCK_BYTES = 16 << 20
_AHEAD = 4  # blocks whose states are fetched while one is updated, as far as they fit


def find_blocks(
    model: nn.Module, optimizer: Optimizer, *, block_bytes: int = BLOCK_BYTES, streaming: Streaming | None = None
) -> list[StateBlock]:
    """The blocks that ``apply`` makes with these arguments."""
    streamed_blocks = () if streaming is None else streaming.blocks
    return state_blocks(model, optimizer, block_bytes=block_bytes, given=streamed_blocks)


def apply(
    model: nn.Module,
    optimizer: Optimizer,
    memory: Memory,
    *,
    states: str,
    gradients: str = KEEP,
    keep: Collection[str] = (),
    streaming: Streaming | None = None,
    block_bytes: int = BLOCK_BYTES,
    buffer_bytes: int | None = None,
    brief: bool = False,
) -> OptimizerOffload:
    """Let the states of ``optimizer`` and its gradients rest in ``ram`` or on ``disk``.

    ``keep``: names of blocks whose states stay. ``block_bytes`` bounds the parameters of a block; ``buffer_bytes``
    is the RAM through which states on disk pass (None: enough for three ordinary blocks, or for the largest one).
    ``brief``: it is for one at a time, so that nothing is read ahead, and is given back at the end of each step.
    Raises UsageError for an unknown choice or an optimizer that is fitted already, UnsupportedError for an
    optimizer that needs all its parameters at once, BudgetError and TransferError; then nothing has changed.
    """
    check(optimizer, states=states, gradients=gradients)
    streamed_blocks, trial = () if streaming is None else streaming.blocks, Trial(optimizer)
    blocks = state_blocks(model, optimizer, block_bytes=block_bytes, given=streamed_blocks, trial=trial)
    unknown = set(keep) - {block.name for block in blocks}
    if unknown:
        raise UsageError(f"Unknown blocks keep={sorted(unknown)} of {NAME}.", "The model has no such blocks.")
    choices = Choices(
        states=states, gradients=gradients, keep=frozenset(keep), buffer_bytes=buffer_bytes, brief=brief
    )
    return OptimizerOffload(model, optimizer, memory, blocks, trial, choices, streaming)


class OptimizerOffload:
    """The handle of a fitted optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        memory: Memory,
        blocks: Sequence[StateBlock],
        trial: Trial,
        choices: Choices,
        streaming: Streaming | None,
    ) -> None:
        self.model, self.optimizer, self.memory = model, optimizer, memory
        self.blocks = dict(enumerate(blocks))
        self._streaming = streaming
        self._streamed = {
            id(p) for _, parameters_of_block in (streaming.blocks if streaming else ()) for p in parameters_of_block
        }
        self._done: set[int] = set()  # blocks of the step under way that are updated
        self._begun: dict[int, int] = {}  # and of how many units that is true, of those that are under way too
        self._order: list[int] = list(reversed(self.blocks))  # in which backward completes them, learned
        self._seen: list[int] = []
        self._in_final = self._after_final = self._clipped = self._removed = False
        self._root = -1
        self._places = Places(optimizer, memory, self.blocks, choices)
        self._written_before, self._written = self._places.written_bytes, -1
        self._recomputation = Recomputation(model)
        self._background = BackgroundUpdates(memory, self._places.host_copy)
        self._arrivals = Arrivals(self.blocks, self._complete, self._over)
        self._plain_step = vars(optimizer).get("step")
        self._whole = WholeState(optimizer, self.blocks, self._places.leaving, self._places.states, trial)
        step = stepping(optimizer, self._plain_step is not None, self._step_all, lambda: self._removed)
        vars(optimizer)["step"] = self._step = types.MethodType(step, optimizer)
        vars(optimizer)[HANDLE_ATTRIBUTE] = self
        if streaming is not None:
            streaming.is_updated_by(optimizer, [p for block in blocks for p in block.parameters])

    # -- the step

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """Around the last backward pass before ``step``: each block is updated as soon as its gradients are there.

        Its gradients are gone then; ``step`` does what is left. One backward pass only, and no clipping: raises
        UsageError. Not with a gradient scaler either: gradients are used before it sees them. A block that is
        computed in part by a backward pass within the backward pass (reentrant checkpointing) waits for the end, as
        it may be computed again with the old weights.
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
        """Whether some weights are new already while ``step`` is still to come: the step cannot be repeated."""
        return bool(self._done or self._begun)

    def reset(self) -> None:
        """Forget the step under way, after an exception in it: the next backward pass begins a new one."""
        self._background.give_up()
        self._done.clear()
        self._begun.clear()
        self._arrivals.reset()
        self._after_final = self._clipped = False

    def _complete(self, index: int, task: int) -> None:
        """All gradients of a block are there."""
        if index in self._done or index in self._begun:
            if self._in_final or self._after_final:
                raise UsageError(
                    f"Cannot take a gradient for block {self.blocks[index].name}, which is updated already.",
                    "final() is for one backward pass, the last one before optimizer.step().",
                    "Enter it for the last backward pass only, and call step() before the next.",
                )
            self.reset()  # a step() that failed was given up
        ahead = self._order[self._order.index(index) + 1 :]
        if self._in_final and task == self._root:
            self._seen.append(index)
            self._update(index, ahead, dropping=True)
            self._recomputation.forbid(self.blocks[index])
        else:
            self._places.gradients.store(index)
            self._places.gradients.expect(ahead[:_AHEAD])

    def _over(self, task: int, incomplete: Sequence[int]) -> None:
        """A backward pass has ended; these blocks have got some of their gradients."""
        if self._in_final and task == self._root:
            left = [i for i, block in self.blocks.items() if i not in self._done and _has_gradient(block)]
            for position, index in enumerate(left):
                self._update(index, left[position + 1 :], dropping=True)
            return
        for index in incomplete:
            if index not in self._done or not self._after_final:
                self._places.gradients.store(index)

    def _step_all(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else self._closed(closure)
        todo = [i for i, b in self.blocks.items() if i not in self._done and _has_gradient(b)]
        try:
            for position, index in enumerate(todo):
                self._update(index, todo[position + 1 :], dropping=False)
            self._background.join()
        finally:
            self._background.give_up()  # after an error it would go on while the caller handles that
        self._step_rest()
        self._settle()
        order = self._order if self._after_final else list(self.blocks)  # as far as one can tell
        self._places.states.ends_step(order[:_AHEAD])
        self.reset()
        before, self._written_before = self._written_before, self._places.written_bytes
        self._written = self._written_before - before
        return loss

    def _closed(self, closure: Callable[[], Any]) -> Any:
        """What it returns. PyTorch's optimizers that can be updated block by block call it once, before all else."""
        if raw_step(self.optimizer).__module__.partition(".")[0] != "torch":
            raise UnsupportedError(
                f"{type(self.optimizer).__name__}.step was called with a closure.",
                "It may call the closure more than once, for new gradients, but brim updates block by block.",
                "Call backward() before step(), and step() without it.",
            )
        with torch.enable_grad():
            return closure()

    def _step_rest(self) -> None:
        """What is in no block: parameters that came later, or were frozen when the blocks were made."""
        in_blocks = {id(p) for block in self.blocks.values() for p in block.parameters}
        rest = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in in_blocks]
        if any(p.grad is not None for p in rest):
            with narrowed(self.optimizer, rest):
                raw_step(self.optimizer)(self.optimizer)

    def _update(self, index: int, ahead: Sequence[int], *, dropping: bool) -> None:
        """The optimizer's own step on one block. It counts as done even if that raises: it did what it did."""
        block, leaves = self.blocks[index], index in self._places.leaving
        soon = [i for i in ahead if i not in self._done][:_AHEAD]
        if leaves and self._may_run_in_background(index):
            self._update_in_background(index, soon, dropping=dropping)
            return
        self._background.join()
        with torch.no_grad(), contextlib.ExitStack() as stack:
            streamed = [number for number, p in enumerate(block.parameters) if id(p) in self._streamed]
            resting = streamed if leaves and self._rest_in_ram(block, streamed) else []
            if streamed and not resting:
                stack.enter_context(self._bound(block))
            gradients = stack.enter_context(self._places.gradients.present(index, dropping=dropping))
            if resting:  # after their gradients were looked at, which are not where they rest
                stack.enter_context(self._at_rest(block))
            if leaves:
                self._update_units(index, gradients, soon, resting)
                return
            self._places.states.expect(soon)
            self._places.gradients.expect(soon)
            place = self._places.host_copy.stepping_in_place
            with place(block.parameters, gradients, block.name), narrowed(self.optimizer, block.parameters):
                self._done.add(index)
                raw_step(self.optimizer)(self.optimizer)

    def _update_units(
        self, index: int, gradients: Sequence[Here | None], soon: Sequence[int], resting: Collection[int]
    ) -> None:
        """What of a block is updated at once, one after the other. After an error it goes on with the next one."""
        self._places.gradients.expect(soon)
        count = self._places.units(index, gradients)
        for number in range(self._begun.get(index, 0), count):
            with self._places.unit(self.optimizer, index, number, gradients, soon, resting):
                self._begun[index] = number + 1
                if number + 1 == count:
                    self._done.add(index)
                raw_step(self.optimizer)(self.optimizer)

    def _may_run_in_background(self, index: int) -> bool:
        """Whether the block's update needs nothing that the thread of the backward pass uses as well."""
        streamed = any(id(p) in self._streamed for p in self.blocks[index].parameters)
        return self._background.possible and not streamed and self._places.gradients.are_plain(index)

    def _update_in_background(self, index: int, soon: Sequence[int], *, dropping: bool) -> None:
        """As ``_update``, on another thread. Nobody may look at the weights, or at states, until it has joined."""
        block, states = self.blocks[index], self._places.states
        stepped = [p.grad is not None for p in block.parameters]

        def update(carried: Carried) -> None:
            with torch.no_grad(), states.present(index, 0, stepping=stepped):
                states.expect(soon)
                with carried.stepping(), narrowed(self.optimizer, block.parameters):
                    raw_step(self.optimizer)(self.optimizer)

        tensors = [(p, p.grad) for p in block.parameters if p.grad is not None]
        self._done.add(index)
        if dropping:
            self._places.gradients.drop(index)
        self._background.begin(tensors, block.name, update)
        self._places.gradients.expect(soon)

    def _bound(self, block: StateBlock) -> contextlib.AbstractContextManager[Any]:
        """Streamed weights have their values within."""
        streamed = [p for p in block.parameters if id(p) in self._streamed]
        if self._streaming is None or not streamed:
            return contextlib.nullcontext()
        return self._streaming.updating(streamed)

    def _rest_in_ram(self, block: StateBlock, numbers: Sequence[int]) -> bool:
        """Whether these parameters of a block can be stepped where they rest."""
        streaming = self._streaming
        return streaming is not None and streaming.rests_in_ram([block.parameters[number] for number in numbers])

    def _at_rest(self, block: StateBlock) -> contextlib.AbstractContextManager[Any]:
        """Streamed weights point to where they rest in RAM within."""
        assert self._streaming is not None
        return self._streaming.updating_at_rest([p for p in block.parameters if id(p) in self._streamed])

    def _settle(self) -> None:
        """Streamed weights are new where they rest: from here on code that reads or writes them does so there."""
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
        norm = clip(clipped, self.blocks, self._places.gradients, max_norm, norm_type, error_if_nonfinite, foreach)
        self._clipped = True
        return norm

    @property
    def written_bytes_per_step(self) -> int:
        """Bytes that the last step wrote to disk, accumulated gradients included; they wear a drive.

        Before the first step: what one with one backward pass will write.
        """
        return self._places.disk_bytes if self._written < 0 else self._written

    # -- states as a whole

    def state_dict(self) -> dict[str, Any]:
        """``optimizer.state_dict()``: every state in memory, on the CPU where it was away."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def iter_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every state as (parameter's name + "." + key, tensor on the CPU), one in memory at a time; numbers too."""
        return self._whole.items()

    def load_state(self, name: str, tensor: torch.Tensor) -> None:
        """Put back what ``iter_state`` gave. Raises UsageError for a name or a shape that this optimizer has not."""
        self._whole.load(name, tensor)

    # -- the end

    def close(self) -> None:
        """End the thread that updates blocks, however its updates end; of no use after that."""
        self._background.close()

    def remove(self) -> None:
        """Give the optimizer back with all states and gradients in memory. A second call does nothing.

        Raises TransferError when the disk does not give them; then it can be called again.
        """
        if self._removed:
            return
        self._background.give_up()
        self._places.restore()
        place_counters(self.optimizer)
        self._removed = True
        if self._streaming is not None:
            self._streaming.is_updated_by(self.optimizer, [])
        self._background.close()
        self._arrivals.remove()
        self._recomputation.allow()
        self._whole.remove()
        mine = vars(self.optimizer)
        if mine.get("step") is self._step:  # else somebody wrapped it since, and it only passes on from now on
            del mine["step"]
            if self._plain_step is not None:
                mine["step"] = self._plain_step
        del mine[HANDLE_ATTRIBUTE]
        self._places.free()


def _has_gradient(block: StateBlock) -> bool:
    return any(p.grad is not None for p in block.parameters)
