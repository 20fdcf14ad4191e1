"""Optimizer steps in RAM beside a GPU: copies of parameters and gradients, and updates in the background.

The thread that runs a backward pass is far ahead of the GPU. If it waited for a block's gradients, stepped the block
and brought it back, the GPU would have nothing to do meanwhile; the update thread waits instead.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from brim.core.hardware import RAM
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import Buffer, Pool, round_up
from brim.memory.tiers import Memory
from brim.memory.transfer import Waitable
from brim.techniques.blocks import tensor_bytes
from brim.techniques.optimizer_offload.state_blocks import LoadedGradient, flat_bytes, shaped
from brim.techniques.optimizer_offload.trial import dense_stride


def padded_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, rounded up to the alignment of the next one."""
    return round_up(tensor_bytes(tensor), PACKED_ALIGNMENT_BYTES)


@dataclass(frozen=True)
class _Copy:
    """A pending copy, and its source, whose memory must not be reused before."""

    wait: Waitable
    source: torch.Tensor


class HostStep:
    """Parameters and gradients that are copied to RAM, to be stepped by any thread. ``mark``: compute until now."""

    def __init__(self, host_copy: HostDeviceCopy, label: str, mark: Waitable) -> None:
        self._host_copy, self._label, self._mark = host_copy, label, mark
        self._parameters: list[nn.Parameter] = []
        self._places: list[torch.Tensor] = []
        self._is_copied: list[bool] = []  # the others rest in RAM
        self._gradients: list[torch.Tensor] = []
        self._pending: list[_Copy] = []

    def add(self, parameter: nn.Parameter, place: torch.Tensor, pending: _Copy | None) -> None:
        self._parameters.append(parameter)
        self._places.append(place)
        self._is_copied.append(pending is not None)
        self._pending += [pending] if pending is not None else []

    def add_gradient(self, place: torch.Tensor, pending: _Copy | None) -> None:
        self._gradients.append(place)
        self._pending += [pending] if pending is not None else []

    def wait(self) -> None:
        while self._pending:
            self._host_copy.finish(self._pending.pop(0))

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Bind the parameters and gradients to RAM within; then copy the parameters back."""
        self.wait()
        data, before = [p.data for p in self._parameters], [p.grad for p in self._parameters]
        try:
            _swap(self._parameters, self._places, self._gradients)
            yield
        finally:
            _swap(self._parameters, data, before)
            places = [place for place, is_copied in zip(self._places, self._is_copied, strict=True) if is_copied]
            targets = [target for target, is_copied in zip(data, self._is_copied, strict=True) if is_copied]
            self._host_copy.copy_to_device(places, targets, self._mark, self._label)


class HostDeviceCopy:
    """Copies parameters and gradients to RAM for a step there, and the results back.

    ``work_bytes`` of RAM have room for both of the largest block; none is taken where RAM is the compute tier, and
    with 0 the GPU steps.
    ``gradient_bytes`` are for a gradient that is to be added to one in RAM.
    """

    def __init__(self, memory: Memory, *, work_bytes: int, gradient_bytes: int) -> None:
        self._memory = memory
        self._work: Buffer | None = None
        self._gradient: Buffer | None = None
        if memory.host is not None and work_bytes:
            self._work = memory.ram.allocate(work_bytes, "parameters and gradients for a step")
        try:
            if memory.host is not None and gradient_bytes:
                self._gradient = memory.ram.allocate(gradient_bytes, "gradients on their way")
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        for buffer in (self._work, self._gradient):
            if buffer is not None:
                buffer.free()

    @property
    def work_bytes(self) -> int:
        """The RAM for parameters and gradients of blocks that are stepped; 0 where the compute tier steps them."""
        return 0 if self._work is None else self._work.bytes

    def copy_to_ram(self, tensor: torch.Tensor, place: torch.Tensor, label: str) -> None:
        """Copy ``tensor`` of the compute tier to ``place``, a tensor in RAM of the same strides, and wait."""
        if self._memory.host is None:
            place.copy_(tensor)
        else:
            self._memory.engine.finish(self._start_copy_to_ram(tensor, place, label).wait)

    def _start_copy_to_ram(self, tensor: torch.Tensor, place: torch.Tensor, label: str) -> _Copy:
        source = tensor.detach()
        if source.stride() != place.stride():
            source = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=tensor.device)
            source.copy_(tensor)
        link, engine = (self._memory.compute.tier, RAM), self._memory.engine
        target = _target(self._memory.ram, flat_bytes(place))
        return _Copy(engine.copy(flat_bytes(source), target, label, [engine.mark()], link), source)

    def gradient_in_ram(self, tensor: torch.Tensor) -> torch.Tensor:
        """A gradient in RAM, valid until the next call."""
        if self._gradient is None:
            return tensor
        flat = self._gradient.tensor[: tensor_bytes(tensor)]
        place = shaped(flat, tensor.dtype, tensor.shape, dense_stride(tensor))
        self.copy_to_ram(tensor, place, "gradients")
        return place

    @contextlib.contextmanager
    def stepping_offloaded(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[LoadedGradient | None],
        label: str,
        resting: Collection[int] = (),
    ) -> Iterator[None]:
        """Bind the parameters that have a gradient, and their gradients, to RAM within.

        ``resting``: the numbers of parameters that are in RAM already. Without a work buffer the compute tier steps.
        """
        if self._work is None:
            with self.stepping_in_place(parameters, gradients, label):
                yield
            return
        pairs = enumerate(zip(parameters, gradients, strict=True))
        tensors = [(parameter, g, number in resting) for number, (parameter, g) in pairs if g]
        with self.start_step(tensors, 0, label).stepping():
            yield

    def start_step(
        self, tensors: Sequence[tuple[nn.Parameter, LoadedGradient, bool]], at: int, label: str
    ) -> HostStep:
        """Start to copy parameters and gradients to RAM, at offset ``at`` of the work buffer.

        The flag is set for a parameter that is in RAM already.
        """
        host_step = HostStep(self, label, self._memory.engine.mark())
        for parameter, gradient, rests in tensors:
            if rests:
                host_step.add(parameter, parameter.detach(), None)
            else:
                place, at = self._room(parameter, at)
                host_step.add(parameter, place, self._start_copy_to_ram(parameter, place, label))
            if gradient.in_record:
                host_step.add_gradient(gradient.tensor, None)
                continue
            place, at = self._room(parameter, at)
            host_step.add_gradient(place, self._start_copy_to_ram(gradient.tensor, place, label))
        return host_step

    def _room(self, like: torch.Tensor, at: int) -> tuple[torch.Tensor, int]:
        assert self._work is not None
        flat = self._work.tensor[at : at + tensor_bytes(like)]
        return shaped(flat, like.dtype, like.shape, dense_stride(like)), at + padded_bytes(like)

    def finish(self, passing: _Copy) -> None:
        self._memory.engine.finish(passing.wait)

    def copy_to_device(
        self, places: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], after: Waitable, label: str
    ) -> None:
        """Copy ``places`` to ``targets`` in the compute tier once ``after`` is done, and wait."""
        engine, link = self._memory.engine, (RAM, self._memory.compute.tier)
        waits = []
        for place, target in zip(places, targets, strict=True):
            if place.stride() != target.stride():
                target.copy_(place)
                continue
            into = _target(self._memory.compute, flat_bytes(target))
            waits.append(engine.copy(flat_bytes(place), into, label, [after], link))
        for wait in waits:
            engine.finish(wait)  # on the host, as the work buffer is about to be reused

    @contextlib.contextmanager
    def stepping_in_place(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[LoadedGradient | None], label: str
    ) -> Iterator[None]:
        """Set the gradients of the parameters within, in the compute tier."""
        in_records = [g.tensor for g in gradients if g is not None and g.in_record]
        if self._memory.host is None or not in_records:
            with _gradients_set(parameters, [g.tensor if g else None for g in gradients]):
                yield
            return
        buffer = self._memory.compute.allocate(sum(map(padded_bytes, in_records)), label)
        try:
            present: list[torch.Tensor | None] = []
            sources, targets, at = [], [], 0
            for gradient in gradients:
                if gradient is None or not gradient.in_record:
                    present.append(gradient.tensor if gradient else None)
                    continue
                source = gradient.tensor
                flat = buffer.tensor[at : at + tensor_bytes(source)]
                target = shaped(flat, source.dtype, source.shape, source.stride())
                sources.append(source)
                targets.append(target)
                present.append(target)
                at += padded_bytes(source)
            self.copy_to_device(sources, targets, self._memory.engine.mark(), label)
            with _gradients_set(parameters, present):
                yield
        finally:
            buffer.free()


def _swap(
    parameters: Sequence[nn.Parameter], data: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    for parameter, values, gradient in zip(parameters, data, gradients, strict=True):
        parameter.grad = None  # it must be on the parameter's device
        parameter.data = values
        parameter.grad = gradient


@contextlib.contextmanager
def _gradients_set(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
    before = [p.grad for p in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _target(pool: Pool, flat: torch.Tensor) -> Buffer:
    return Buffer(pool, flat, flat.numel(), -1, "")


@dataclass(frozen=True)
class _Update:
    """A running update, and its part of the work buffer."""

    begin: int
    end: int
    future: Future[None]


class BackgroundUpdates:
    """Runs updates one after another; as many wait as fit in the work buffer of ``host_copy``."""

    def __init__(self, memory: Memory, host_copy: HostDeviceCopy) -> None:
        self._host_copy = host_copy
        # A prediction has nothing to overlap, and where RAM is the compute tier the CPU is busy computing.
        self.possible = memory.host is not None and not memory.fake and host_copy.work_bytes > 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="brim-update")
        self._running: deque[_Update] = deque()

    def begin(
        self, tensors: Sequence[tuple[nn.Parameter, torch.Tensor]], label: str, update: Callable[[HostStep], None]
    ) -> None:
        """Run ``update`` with copies of these parameters and gradients, which are made when this returns.

        So gradients do not wait for their update in the compute tier, where no plan has room for them. Raises the
        error of an earlier update.
        """
        begin, end = self._room(sum(2 * padded_bytes(parameter) for parameter, _ in tensors))
        copies = [(parameter, LoadedGradient(gradient, False), False) for parameter, gradient in tensors]
        host_step = self._host_copy.start_step(copies, begin, label)
        host_step.wait()
        # From here on the values may change at any time: autograd must notice if it saved them.
        torch.autograd.graph.increment_version([p for p, _ in tensors])
        self._running.append(_Update(begin, end, self._thread.submit(update, host_step)))

    def _room(self, bytes: int) -> tuple[int, int]:
        """Wait for a free part of the work buffer, which is used as a ring."""
        while self._running:
            first, last = self._running[0].begin, self._running[-1].end
            limit = first if last <= first else self._host_copy.work_bytes
            if last + bytes <= limit:
                return last, last + bytes
            if last > first and bytes <= first:
                return 0, bytes
            self._wait_for_first()
        return 0, bytes

    def _wait_for_first(self) -> None:
        self._running[0].future.result()  # and it stays the first if this is interrupted
        self._running.popleft()

    def join(self) -> None:
        """Wait for all updates. Raises the error of the first that failed."""
        while self._running:
            try:
                self._wait_for_first()
            except Exception:
                self.give_up()
                raise

    def give_up(self) -> None:
        """Wait for all updates and ignore their errors: their step has failed."""
        while self._running:
            with contextlib.suppress(Exception):
                self._running[0].future.result()
            self._running.popleft()

    def close(self) -> None:
        self.give_up()
        self._thread.shutdown()
