"""Gradients that are offloaded when all of a block are complete, and loaded for its update.

Before autograd adds to an offloaded gradient, ``p.grad`` is set to None, so that it makes the new gradient alone,
which is then added to the one in the record, as autograd would have added it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils.hooks import RemovableHandle

from brim.core.hardware import DISK
from brim.errors import UnsupportedError
from brim.memory.tiers import Memory
from brim.techniques.offloaded_tensor import OffloadedTensor, offloaded_tensor
from brim.techniques.optimizer_offload.host_device_copy import HostDeviceCopy
from brim.techniques.optimizer_offload.state_blocks import LoadedGradient, StateBlock, flat_bytes, lay_out
from brim.techniques.optimizer_offload.trial import StateTensor
from brim.techniques.records import Records

_TODO = 'Leave gradients where they are (gradients="keep"), or use them one tensor at a time.'


class Gradients:
    """The gradients of ``blocks`` (by number), in records of ``tier``; None: they stay where autograd put them."""

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
        self._adding: set[tuple[int, int]] = set()  # p.grad is to be added to the record
        self._zeroed: set[tuple[int, int]] = set()
        self._factors: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._generations: dict[tuple[int, int], int] = {}  # how many gradients the record had before
        self._hooks: list[RemovableHandle] = []
        self.records: Records | None = None
        if tier is None:
            return
        laid = {
            index: lay_out([[StateTensor.of("grad", p)] for p in block.parameters]) for index, block in blocks.items()
        }
        self._fields = {index: fields for index, (fields, _) in laid.items()}
        sizes = {index: bytes for index, (_, bytes) in laid.items()}
        self.records = Records(memory, sizes, tier=tier, buffer_bytes=buffer_bytes, label="gradients")
        for index, block in blocks.items():
            for number, parameter in enumerate(block.parameters):
                self._hooks.append(parameter.register_hook(_weakly(self._before, index, number)))

    def _before(self, index: int, number: int, gradient: torch.Tensor | None) -> None:
        """Prepare for a gradient of the parameter, which autograd is about to set."""
        parameter = self._blocks[index].parameters[number]
        if gradient is None:
            return
        if type(parameter.grad) is OffloadedTensor:
            parameter.grad = None
            self._adding.add((index, number))
        elif parameter.grad is None:
            self._adding.discard((index, number))  # zeroed since: the record is outdated

    def store(self, index: int) -> None:
        """Offload the block's gradients that are in memory, except sparse ones."""
        block = self._blocks[index]
        if self.records is None or not any(_is_in_memory(p) for p in block.parameters):
            return
        stored = any(type(p.grad) is OffloadedTensor for p in block.parameters) or any(
            key[0] == index for key in self._adding
        )
        flat = self.records.enter(index, empty=not stored)
        try:
            for number, parameter in enumerate(block.parameters):
                gradient = parameter.grad
                if gradient is None or not _is_in_memory(parameter):
                    continue
                view = self._fields[index][number].view(flat)
                if (index, number) in self._adding:
                    self._sum_into(view, index, number, gradient, permanent=True)
                    self._adding.discard((index, number))
                else:
                    self._host_copy.copy_to_ram(gradient, view, "gradients")
                    self._end_generation(index, number)
                parameter.grad = self._offloaded(index, number)
        finally:
            self.records.leave(index)

    def are_plain(self, index: int) -> bool:
        """Return whether all gradients of the block are dense, and where autograd put them."""
        return not any(
            type(p.grad) is OffloadedTensor
            or (index, number) in self._adding
            or (p.grad is not None and p.grad.is_sparse)
            for number, p in enumerate(self._blocks[index].parameters)
        )

    @contextlib.contextmanager
    def present(self, index: int, *, dropping: bool = False) -> Iterator[list[LoadedGradient | None]]:
        """Load the gradients of a block within (None where there is none); with ``dropping`` drop them at the end."""
        block = self._blocks[index]
        if self.records is not None and self.records.tier != DISK and any(key[0] == index for key in self._adding):
            self.store(index)  # add them to the records now
        in_record = [
            p.grad is not None and (type(p.grad) is OffloadedTensor or (index, n) in self._adding)
            for n, p in enumerate(block.parameters)
        ]
        if self.records is None or not any(in_record):
            yield [None if p.grad is None else LoadedGradient(p.grad, False) for p in block.parameters]
            if dropping:
                self.drop(index)
            return
        changed = False
        flat = self.records.enter(index)
        try:
            if self.records.tier == DISK:
                self.records.secure(index)  # changes in the buffer are dropped, and the record read again
            gradients: list[LoadedGradient | None] = []
            for number, parameter in enumerate(block.parameters):
                if not in_record[number]:
                    gradients.append(None if parameter.grad is None else LoadedGradient(parameter.grad, False))
                    continue
                view = self._fields[index][number].view(flat)
                added = None if type(parameter.grad) is OffloadedTensor else parameter.grad
                changed |= self._sum_into(view, index, number, added, permanent=self.records.tier != DISK)
                gradients.append(LoadedGradient(view, True))
            yield gradients
        finally:
            self.records.leave(index, changed=False)
            if changed and self.records.tier == DISK:
                self.records.forget(index)  # the record on disk and its pending changes are unchanged
        if dropping:
            self.drop(index)

    def _sum_into(
        self, view: torch.Tensor, index: int, number: int, added: torch.Tensor | None, *, permanent: bool
    ) -> bool:
        """Apply the pending changes and ``added`` to ``view``, and forget them if ``permanent``. Returns whether it
        changed."""
        key = index, number
        changed = key in self._zeroed or key in self._factors or added is not None
        if key in self._zeroed:
            view.zero_()
        for factor in self._factors.get(key, ()):
            view.mul_(factor)
        if added is not None:
            view.add_(self._host_copy.gradient_in_ram(added))
        if permanent:
            self._forget_changes(index, number)
        return changed

    def _forget_changes(self, index: int, number: int) -> None:
        self._zeroed.discard((index, number))
        self._factors.pop((index, number), None)

    def drop(self, index: int) -> None:
        for number, parameter in enumerate(self._blocks[index].parameters):
            parameter.grad = None
            self._adding.discard((index, number))
            self._end_generation(index, number)

    def _end_generation(self, index: int, number: int) -> None:
        """Invalidate the record's gradient, also for code that has an ``OffloadedTensor`` of it."""
        self._forget_changes(index, number)
        self._generations[index, number] = self.generation(index, number) + 1

    def device(self, index: int, number: int) -> torch.device:
        return self._blocks[index].parameters[number].device

    def generation(self, index: int, number: int) -> int:
        """A number of the offloaded gradient that changes when another gradient replaces it."""
        return self._generations.get((index, number), 0)

    def scale(self, index: int, number: int, factor: torch.Tensor) -> None:
        """Multiply an offloaded gradient when it is loaded."""
        self._factors.setdefault((index, number), []).append(factor)

    def zero(self, index: int, number: int) -> None:
        """Set an offloaded gradient to zero when it is loaded."""
        self._factors.pop((index, number), None)
        self._zeroed.add((index, number))

    def _offloaded(self, index: int, number: int) -> OffloadedTensor:
        block, like = self._blocks[index], self._fields[index][number].like
        parameter = block.parameters[number]
        # A trace reports a GPU as the device; autograd compares the real one.
        device = getattr(parameter, "fake_device", parameter.device)
        what = f"The gradient of {block.names[number]}"
        own = _GradientBacking(weakref.ref(self), index, number, self.generation(index, number), what)
        return offloaded_tensor(
            like.shape, like.stride(), like.dtype, device, what=what, todo=_TODO, on_zero=own.zero, backing=own
        )  # fmt: skip

    def value(self, index: int, number: int) -> torch.Tensor:
        assert self.records is not None
        field, gradient = self._fields[index][number], self._blocks[index].parameters[number].grad
        gradient_copy = field.over(partial(self.records.get, index))
        added = gradient if (index, number) in self._adding else None
        self._sum_into(gradient_copy, index, number, added, permanent=False)
        return gradient_copy

    def replace(self, index: int, number: int, value: torch.Tensor) -> None:
        assert self.records is not None
        self.records.put(index, self._fields[index][number].offset, flat_bytes(value))
        self._forget_changes(index, number)
        if (index, number) in self._adding:  # ``value`` contains it
            self._adding.discard((index, number))
            self._blocks[index].parameters[number].grad = self._offloaded(index, number)

    def expect(self, indices: Sequence[int]) -> None:
        if self.records is not None:
            blocks = self._blocks
            self.records.expect(
                [i for i in indices if any(type(p.grad) is OffloadedTensor for p in blocks[i].parameters)]
            )

    def restore(self) -> None:
        """Give all parameters their gradients back in memory. It can be called again after an error."""
        for index, block in self._blocks.items():
            if not any(type(p.grad) is OffloadedTensor for p in block.parameters):
                continue
            with self.present(index) as present:
                values = [None if loaded is None else loaded.tensor.clone() for loaded in present]
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


class _GradientBacking:
    """Access to an offloaded gradient. It refers to ``Gradients`` weakly: the garbage collector does not see what
    tensors hold in C++."""

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
                "It was offloaded and no longer exists: a newer gradient has replaced it, or it was used and freed.",
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
    """Reports when a backward pass has made the last gradient of a block, and the end of the pass.

    ``complete(block, task)`` and ``over(task, blocks)`` are called on autograd's thread; ``task`` is its number of
    the pass, ``blocks`` are those that stayed incomplete.
    """

    def __init__(
        self,
        blocks: Mapping[int, StateBlock],
        complete: Callable[[int, int], None],
        over: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._blocks, self._complete, self._over = blocks, complete, over
        self._arrived: dict[int, dict[int, set[int]]] = {}  # by pass: block -> parameters
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_weakly(self._arrive, index, number))
            for index, block in blocks.items()
            for number, parameter in enumerate(block.parameters)
        ]

    def _arrive(self, index: int, number: int, parameter: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._arrived:
            self._arrived[task] = {}
            if task != -1:
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        arrived = self._arrived[task].setdefault(index, set())
        arrived.add(number)
        if len(arrived) == len(self._blocks[index].parameters):
            del self._arrived[task][index]
            self._complete(index, task)

    def _end(self, task: int) -> None:
        self._over(task, list(self._arrived.pop(task, {})))

    def reset(self) -> None:
        """Forget the passes that ended with an exception: none is running."""
        self._arrived.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _weakly(method: Callable[..., None], *args: int) -> Callable[..., None]:
    """A weak reference to ``method`` as a hook on a tensor: the garbage collector does not see what tensors hold."""
    reference = weakref.WeakMethod(method)

    def call(*more: torch.Tensor) -> None:
        bound_method = reference()
        if bound_method is not None:
            bound_method(*args, *more)

    return call


def _is_in_memory(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a dense gradient of its dtype in memory."""
    gradient = parameter.grad
    if gradient is None or type(gradient) is OffloadedTensor:
        return False
    return gradient.layout is torch.strided and gradient.dtype == parameter.dtype


@torch.no_grad()
def clip(
    parameters: Sequence[nn.Parameter],
    blocks: Mapping[int, StateBlock],
    gradients: Gradients,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` does; offloaded gradients are scaled when they come back.

    The order of all sums is PyTorch's (torch/nn/utils/clip_grad.py): a norm per gradient, those of one device and
    dtype together in the order of the parameters, then the norm of the norms. Returns the norm before clipping.
    """
    if not any(type(p.grad) is OffloadedTensor for p in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norms: dict[int, torch.Tensor] = {}
    parameter_ids = {id(p) for p in parameters}
    order = [i for i, block in blocks.items() if any(id(p) in parameter_ids for p in block.parameters)]
    for position, index in enumerate(order):
        with gradients.present(index) as present:
            gradients.expect(order[position + 1 : position + 3])
            for parameter, loaded in zip(blocks[index].parameters, present, strict=True):
                if loaded is not None and id(parameter) in parameter_ids:
                    norms[id(parameter)] = _norm(loaded.tensor, norm_type, foreach)
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in norms:
            norms[id(parameter)] = _norm(parameter.grad, norm_type, foreach)
    total = _total_norm([p for p in parameters if p.grad is not None], norms, norm_type)
    if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
        # PyTorch's option, with its type of error.
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is not finite: nothing was clipped."
        )
    in_memory = [p for p in parameters if p.grad is not None and type(p.grad) is not OffloadedTensor]
    torch.nn.utils.clip_grads_with_norm_(in_memory, max_norm, total, foreach)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for index in order:
        for number, parameter in enumerate(blocks[index].parameters):
            if type(parameter.grad) is OffloadedTensor and id(parameter) in parameter_ids:
                gradients.scale(index, number, factor.to("cpu"))
    return total


def _norm(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    if foreach is False or gradient.is_sparse:
        alone: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
        return alone
    return torch._foreach_norm([gradient], norm_type)[0]


def _total_norm(
    parameters: Sequence[nn.Parameter], norms: Mapping[int, torch.Tensor], norm_type: float
) -> torch.Tensor:
    marks = [torch.empty(0, dtype=p.dtype, device=p.device) for p in parameters]
    grouped = _group_tensors_by_device_and_dtype([marks], with_indices=True)  # type: ignore[list-item]
    order = [index for _, indices in grouped.values() for index in indices]
    device = parameters[0].device
    ordered = [norms[id(parameters[index])].to(device) for index in order]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    return norm
