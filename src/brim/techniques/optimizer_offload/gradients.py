"""Gradients that leave when a backward pass has made all of a block, and come back for its update.

What autograd does is left to autograd: before it adds to a gradient that is away, ``p.grad`` is emptied, so it makes
the new gradient alone; that is then added to the one in the record, as autograd would have added it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from brim.core.hardware import DISK
from brim.errors import UnsupportedError
from brim.memory.tiers import Memory
from brim.techniques.offloaded_tensor import OffloadedTensor, offloaded_tensor
from brim.techniques.optimizer_offload.states import StateBlock, flat_bytes, lay_out
from brim.techniques.optimizer_offload.trial import Kept, dense_stride
from brim.techniques.records import Records
from brim.techniques.streaming.host_device_copy import HostDeviceCopy

_TODO = 'Leave gradients where they are (gradients="keep"), or use them one tensor at a time.'
_Here = tuple[torch.Tensor, bool]  # a gradient, and whether it is in a record


class Gradients:
    """The gradients of ``blocks`` (by number), in records of ``tier``; None: they stay where autograd puts them."""

    def __init__(
        self,
        memory: Memory,
        blocks: Mapping[int, StateBlock],
        host_copy: HostDeviceCopy,
        *,
        tier: str | None,
        buffer_bytes: int,
    ) -> None:
        self._blocks, self._host_copy = blocks, host_copy
        self._adding: set[tuple[int, int]] = set()  # p.grad is to be added to what is in the record
        self._zeroed: set[tuple[int, int]] = set()
        self._factors: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._generations: dict[tuple[int, int], int] = {}  # of what is in the record: how many came before it
        self._hooks: list[RemovableHandle] = []
        self.records: Records | None = None
        if tier is None:
            return
        laid = {index: lay_out([[_as_kept(p)] for p in block.parameters]) for index, block in blocks.items()}
        self._fields = {index: fields for index, (fields, _) in laid.items()}
        sizes = {index: bytes for index, (_, bytes) in laid.items()}
        self.records = Records(memory, sizes, tier=tier, buffer_bytes=buffer_bytes, label="gradients")
        for index, block in blocks.items():
            for number, parameter in enumerate(block.parameters):
                self._hooks.append(parameter.register_hook(_weakly(self._before, index, number)))

    def _before(self, index: int, number: int, gradient: torch.Tensor | None) -> None:
        """Autograd is about to give the parameter a gradient."""
        parameter = self._blocks[index].parameters[number]
        if gradient is None:
            return
        if type(parameter.grad) is OffloadedTensor:
            parameter.grad = None
            self._adding.add((index, number))
        elif parameter.grad is None:
            self._adding.discard((index, number))  # zeroed since: what is in the record is of the past

    def store(self, index: int) -> None:
        """Let the block's gradients go, as far as they are here. Sparse ones stay."""
        block = self._blocks[index]
        if self.records is None or not any(_is_here(p) for p in block.parameters):
            return
        stored = any(type(p.grad) is OffloadedTensor for p in block.parameters) or any(
            key[0] == index for key in self._adding
        )
        flat = self.records.enter(index, empty=not stored)
        try:
            for number, parameter in enumerate(block.parameters):
                gradient = parameter.grad
                if gradient is None or not _is_here(parameter):
                    continue
                view = self._fields[index][number].view(flat)
                if (index, number) in self._adding:
                    self._total(index, number, view, gradient, settle=True)
                    self._adding.discard((index, number))
                else:
                    self._host_copy.down(gradient, view, "gradients")
                    self._end_generation(index, number)
                parameter.grad = self._offloaded(index, number)
        finally:
            self.records.leave(index)

    def are_plain(self, index: int) -> bool:
        """Whether all gradients of the block are where autograd put them, and are to be used as they are."""
        return not any(
            type(p.grad) is OffloadedTensor
            or (index, number) in self._adding
            or (p.grad is not None and p.grad.is_sparse)
            for number, p in enumerate(self._blocks[index].parameters)
        )

    @contextlib.contextmanager
    def present(self, index: int, *, dropping: bool = False) -> Iterator[list[_Here | None]]:
        """Within: the gradients of a block, each where it is; None: it has none. ``dropping``: for the last time."""
        block = self._blocks[index]
        if self.records is not None and self.records.tier != DISK and any(key[0] == index for key in self._adding):
            self.store(index)  # added once and for all
        away_ = [
            type(p.grad) is OffloadedTensor or (index, n) in self._adding for n, p in enumerate(block.parameters)
        ]
        away_ = [there and p.grad is not None for there, p in zip(away_, block.parameters, strict=True)]
        if self.records is None or not any(away_):
            yield [None if p.grad is None else (p.grad, False) for p in block.parameters]
            if dropping:
                self.drop(index)
            return
        changed = False
        flat = self.records.enter(index)
        try:
            if self.records.tier == DISK:
                self.records.secure(index)  # what is changed here is forgotten, and read again
            gradients: list[_Here | None] = []
            for number, parameter in enumerate(block.parameters):
                if not away_[number]:
                    gradients.append(None if parameter.grad is None else (parameter.grad, False))
                    continue
                view = self._fields[index][number].view(flat)
                added = None if type(parameter.grad) is OffloadedTensor else parameter.grad
                changed |= self._total(index, number, view, added, settle=self.records.tier != DISK)
                gradients.append((view, True))
            yield gradients
        finally:
            self.records.leave(index, changed=False)
            if changed and self.records.tier == DISK:
                self.records.forget(index)  # the record itself, and what is to be done to it, are as they were
        if dropping:
            self.drop(index)

    def _total(
        self, index: int, number: int, view: torch.Tensor, added: torch.Tensor | None, *, settle: bool
    ) -> bool:
        """Make ``view`` the gradient that autograd would have now; ``settle``: for good. Whether it changed."""
        key = index, number
        changed = key in self._zeroed or key in self._factors or added is not None
        if key in self._zeroed:
            view.zero_()
        for factor in self._factors.get(key, ()):
            view.mul_(factor)
        if added is not None:
            view.add_(self._host_copy.in_ram(added, "gradients"))
        if settle:
            self._forget_changes(index, number)
        return changed

    def _forget_changes(self, index: int, number: int) -> None:
        self._zeroed.discard((index, number))
        self._factors.pop((index, number), None)

    def drop(self, index: int) -> None:
        """The block's gradients were used and are not needed any more."""
        for number, parameter in enumerate(self._blocks[index].parameters):
            parameter.grad = None
            self._adding.discard((index, number))
            self._end_generation(index, number)

    def _end_generation(self, index: int, number: int) -> None:
        """What was in the record is gone, for code that holds the tensor that stood for it as well."""
        self._forget_changes(index, number)
        self._generations[index, number] = self.generation(index, number) + 1

    def device(self, index: int, number: int) -> torch.device:
        """Where a gradient is for code that uses it: with its parameter."""
        return self._blocks[index].parameters[number].device

    def generation(self, index: int, number: int) -> int:
        """Of the gradient that is away: it changes when another takes its place."""
        return self._generations.get((index, number), 0)

    def scale(self, index: int, number: int, factor: torch.Tensor) -> None:
        """Multiply a gradient that is away, when it comes."""
        self._factors.setdefault((index, number), []).append(factor)

    def zero(self, index: int, number: int) -> None:
        """Set a gradient that is away to zero, when it comes."""
        self._factors.pop((index, number), None)
        self._zeroed.add((index, number))

    def _offloaded(self, index: int, number: int) -> OffloadedTensor:
        block, field = self._blocks[index], self._fields[index][number]
        parameter = block.parameters[number]
        # A trace pretends that it is on a GPU; autograd compares where it truly is.
        device = getattr(parameter, "fake_device", parameter.device)
        what = f"The gradient of {block.names[number]}"
        keeper = _Keeper(weakref.ref(self), index, number, self.generation(index, number), what)
        return offloaded_tensor(
            field.shape, field.stride, field.dtype, device, what=what, todo=_TODO, on_zero=keeper.zero, keeper=keeper
        )  # fmt: skip

    def value(self, index: int, number: int) -> torch.Tensor:
        """A gradient that is away, in memory of its own."""
        assert self.records is not None
        field, gradient = self._fields[index][number], self._blocks[index].parameters[number].grad
        gradient_copy = field.view_alone(self.records.get(index, field.offset, field.bytes))
        self._total(index, number, gradient_copy, gradient if (index, number) in self._adding else None, settle=False)
        return gradient_copy

    def replace(self, index: int, number: int, value: torch.Tensor) -> None:
        """Have other values in the place of those of a gradient that is away."""
        assert self.records is not None
        self.records.put(index, self._fields[index][number].offset, flat_bytes(value))
        self._forget_changes(index, number)
        if (index, number) in self._adding:  # it is among the values
            self._adding.discard((index, number))
            self._blocks[index].parameters[number].grad = self._offloaded(index, number)

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch what is away of these blocks' gradients."""
        if self.records is not None:
            blocks = self._blocks
            self.records.expect(
                [i for i in indices if any(type(p.grad) is OffloadedTensor for p in blocks[i].parameters)]
            )

    def restore(self) -> None:
        """Give all parameters their gradients back in memory. After an error it can be called again."""
        for index, block in self._blocks.items():
            if not any(type(p.grad) is OffloadedTensor for p in block.parameters):
                continue
            with self.present(index) as present:
                values = [None if here is None else here[0].clone() for here in present]
            for parameter, value in zip(block.parameters, values, strict=True):
                if type(parameter.grad) is OffloadedTensor and value is not None:
                    parameter.grad = value.to(parameter.device)

    def free(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.records is not None:
            for index, block in self._blocks.items():
                for number in range(len(block.parameters)):
                    self._end_generation(index, number)
            self.records.free()


class _Keeper:
    """A gradient that is away, by its place. What tensors hold in C++ is out of the garbage collector's sight."""

    def __init__(
        self, gradients: weakref.ref[Gradients], index: int, number: int, generation: int, what: str
    ) -> None:
        self._reference, self._index, self._number = gradients, index, number
        self._generation, self._what = generation, what

    @property
    def _gradients(self) -> Gradients:
        gradients = self._reference()
        if gradients is None or gradients.generation(self._index, self._number) != self._generation:
            raise UnsupportedError(
                f"{self._what} cannot be used.",
                "It was offloaded, and is gone: a newer gradient has replaced it, or it was used and freed.",
                "Clone gradients that you need after zero_grad() or the step.",
            )
        return gradients

    def zero(self) -> None:
        self._gradients.zero(self._index, self._number)

    def value(self) -> torch.Tensor:
        value = self._gradients.value(self._index, self._number)
        return value.to(self._gradients.device(self._index, self._number))

    def scale(self, factor: torch.Tensor) -> None:
        self._gradients.scale(self._index, self._number, factor.to("cpu", copy=True))

    def replace(self, value: torch.Tensor) -> None:
        self._gradients.replace(self._index, self._number, value.to("cpu"))


class Arrivals:
    """Tells when a backward pass has made the last gradient of a block, and when the pass is over.

    ``complete(block, task)`` and ``over(task, blocks)`` are called on autograd's own thread; ``task`` is its number
    of the pass, ``blocks`` are those that stayed incomplete.
    """

    def __init__(
        self,
        blocks: Mapping[int, StateBlock],
        complete: Callable[[int, int], None],
        over: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._blocks, self._complete, self._over = blocks, complete, over
        self._come: dict[int, dict[int, set[int]]] = {}  # by pass: block -> parameters
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_weakly(self._arrive, index, number))
            for index, block in blocks.items()
            for number, parameter in enumerate(block.parameters)
        ]

    def _arrive(self, index: int, number: int, parameter: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._come:
            self._come[task] = {}
            if task != -1:
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        come = self._come[task].setdefault(index, set())
        come.add(number)
        if len(come) == len(self._blocks[index].parameters):
            del self._come[task][index]
            self._complete(index, task)

    def _end(self, task: int) -> None:
        self._over(task, list(self._come.pop(task, {})))

    def reset(self) -> None:
        """No pass is under way: what is still open ended with an exception."""
        self._come.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _weakly(method: Callable[..., None], *args: int) -> Callable[..., None]:
    """``method`` for a hook on a tensor: what tensors hold in C++ is out of the garbage collector's sight."""
    reference = weakref.WeakMethod(method)

    def call(*more: torch.Tensor) -> None:
        bound_method = reference()
        if bound_method is not None:
            bound_method(*args, *more)

    return call


def _as_kept(parameter: torch.Tensor) -> Kept:
    shape, stride = tuple(parameter.shape), dense_stride(parameter)
    return Kept(key="grad", dtype=parameter.dtype, shape=shape, stride=stride)


def _is_here(parameter: torch.Tensor) -> bool:
    """Whether there is a gradient in memory, of the plain kind that a record has room for."""
    gradient = parameter.grad
    if gradient is None or type(gradient) is OffloadedTensor:
        return False
    return gradient.layout is torch.strided and gradient.dtype == parameter.dtype
