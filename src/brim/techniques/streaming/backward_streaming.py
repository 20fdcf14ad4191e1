"""Backward through streamed weights: autograd saves references to a block, which is loaded again for them.

Autograd runs the nodes of a backward pass from the last created to the first (``torch/csrc/autograd/engine.h``,
``CompareNodeTaskTime``). So a call's nodes are all done once a node that was created before the call runs: then the
blocks of the call are released.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from brim.errors import UsageError
from brim.techniques.saved_tensor_hooks import Saving, Unpack
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.streamed_blocks import StreamedBlocks


@dataclasses.dataclass
class _Use:
    """A block that backward needs for nodes made at ``start`` or later (autograd's sequence number)."""

    streamed: StreamedBlock
    start: int


@dataclasses.dataclass
class _Task:
    """A call of the autograd engine; another can run inside of it."""

    number: int
    uses: list[_Use] = dataclasses.field(default_factory=list)


class BackwardStreaming:
    """Brings blocks back in backward and releases them. ``settle`` is called at the end of a backward pass."""

    def __init__(self, streamed_blocks: StreamedBlocks, settle: Callable[[], None]) -> None:
        self.streamed_blocks, self._settle = streamed_blocks, settle
        self._tasks: list[_Task] = []

    # -- forward

    def saving(self, start: int) -> Saving:
        """The saved-tensor hooks of a call, which replace tensors in slots by references."""
        return Saving(_CallPacker(self, start))

    def refer(self, tensor: torch.Tensor, start: int) -> Unpack | None:
        ring = self.streamed_blocks.ring
        holder = None if ring is None or tensor.layout is not torch.strided else ring.holder(tensor)
        if holder is None:
            return None
        streamed = self.streamed_blocks[holder]
        at = int(tensor.storage_offset()) * tensor.element_size()
        index = streamed.index_at(at)
        return None if index is None else _Reference(self, streamed, index, start, tensor).unpack

    def announce(self, blocks: Sequence[StreamedBlock], start: int, output: object) -> None:
        """Bring ``blocks`` back before backward enters the call that returned ``output``.

        Where ``torch.utils.checkpoint`` wraps a module's ``forward`` (as transformers does), the call is repeated in
        backward without the module's hooks, and its weights must be there for it.
        """
        for tensor in _tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._on_gradient(blocks, start))

    def _on_gradient(self, blocks: Sequence[StreamedBlock], start: int) -> Callable[[torch.Tensor], None]:
        def bring_back(gradient: torch.Tensor) -> None:
            node = torch._C._current_autograd_node()
            # A tensor that was only handed through belongs to nodes before the call.
            if node is not None and node._sequence_nr() >= start and not self.streamed_blocks.removed:
                for streamed in blocks:
                    self._use(streamed, start, node._sequence_nr())

        return bring_back

    # -- backward

    def bring(
        self, streamed: StreamedBlock, start: int, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The result of ``make`` on the block's slot, valid while the running node needs it."""
        ring, node = self.streamed_blocks.ring, torch._C._current_autograd_node()
        assert ring is not None
        if node is None or torch.is_grad_enabled():
            # Read outside of backward, or with backward recorded: no node marks the end of its use.
            self.streamed_blocks.enter(streamed)
            try:
                return make(ring.buffer(streamed.index).tensor).clone()
            finally:
                self.streamed_blocks.leave(streamed)
        self._use(streamed, start, node._sequence_nr())
        return make(ring.buffer(streamed.index).tensor)

    def _use(self, streamed: StreamedBlock, start: int, now: int) -> None:
        task, is_used = self._task(torch._C._current_graph_task_id()), False
        for use in list(task.uses):
            if use.streamed is streamed:
                use.start = min(use.start, start)
                is_used = True
            elif use.start > now:
                task.uses.remove(use)
                self.streamed_blocks.leave(use.streamed)
        if not is_used:
            self.streamed_blocks.enter(streamed)
            task.uses.append(_Use(streamed, start))

    def _task(self, number: int) -> _Task:
        if any(task.number == number for task in self._tasks):
            while self._tasks[-1].number != number:
                self._release(self._tasks.pop())  # a nested backward pass, which is done
        else:
            self._tasks.append(_Task(number))
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._finish(number))
        return self._tasks[-1]

    def _finish(self, number: int) -> None:
        if any(task.number == number for task in self._tasks):
            self._release(self._task(number))
            self._tasks.pop()
            if not self._tasks:
                self._settle()  # weights that were updated meanwhile are read where they rest from now on

    def _release(self, task: _Task) -> None:
        while task.uses:
            self.streamed_blocks.leave(task.uses.pop().streamed)

    def recover(self) -> None:
        """Forget the blocks of a backward pass that failed: none is running."""
        self._tasks.clear()


@dataclass(eq=False)
class _CallPacker:
    """Packs the tensors that are saved in a call of a streamed module, which began at ``start``."""

    _backward: BackwardStreaming
    _start: int

    def pack(self, tensor: torch.Tensor) -> Unpack | None:
        return self._backward.refer(tensor, self._start)


class _Reference:
    """A tensor in a slot, by its position in the block."""

    def __init__(
        self, backward: BackwardStreaming, streamed: StreamedBlock, index: int, start: int, tensor: torch.Tensor
    ) -> None:
        self._backward, self._streamed, self._index, self._start = backward, streamed, index, start
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset, self._flags = int(tensor.storage_offset()), (tensor.is_conj(), tensor.is_neg())
        self._version = streamed.parameters[index]._version

    def unpack(self) -> torch.Tensor:
        parameter = self._streamed.parameters[self._index]
        if parameter._version != self._version:
            raise UsageError(
                f"Cannot compute gradients through {self._streamed.block.tensors[self._index]}.",
                "The weight was changed in place after the forward pass.",
                "Call backward() before optimizer.step() or any other change of the weights.",
            )
        if self._backward.streamed_blocks.removed:  # the graph outlived the handle: the module has the values again
            placed = self._streamed.store.layout.tensors[self._index]
            flat = parameter.data.contiguous().view(-1).view(self._dtype)
            return self._seen(flat, self._offset - placed.offset // self._dtype.itemsize)
        return self._backward.bring(
            self._streamed, self._start, lambda slot: self._seen(slot.view(self._dtype), self._offset)
        )

    def _seen(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        tensor = flat.as_strided(self._size, self._stride, int(flat.storage_offset()) + offset)
        conjugate, negative = self._flags
        tensor = tensor.conj() if conjugate else tensor
        return torch._neg_view(tensor) if negative else tensor


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output, in the containers that modules return."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    parts: Sequence[Any] = ()
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (list, tuple)):
        parts = output
    elif dataclasses.is_dataclass(output):
        parts = list(vars(output).values())
    for part in parts:
        yield from _tensors(part)
