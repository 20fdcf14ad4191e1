"""Between the compute tier and RAM, tensor by tensor, where these are not the same."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from brim.core.hardware import RAM
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import Buffer, Pool, round_up
from brim.memory.tiers import Memory
from brim.memory.transfer import Waitable
from brim.techniques.optimizer_offload.states import flat_bytes, shaped
from brim.techniques.optimizer_offload.trial import dense_stride


def tensor_bytes(tensor: torch.Tensor) -> int:
    return round_up(tensor.numel() * tensor.element_size(), PACKED_ALIGNMENT_BYTES)


@dataclass(frozen=True)
class _Passing:
    """A copy under way, and what it reads: that memory must be nobody else's until it is done."""

    wait: Waitable
    source: torch.Tensor


class Carried:
    """Parameters and gradients on their way to RAM, to be stepped by any thread. ``mark``: compute until now."""

    def __init__(self, host_copy: HostDeviceCopy, label: str, mark: Waitable) -> None:
        self._host_copy, self._label, self._mark = host_copy, label, mark
        self._parameters: list[nn.Parameter] = []
        self._places: list[torch.Tensor] = []
        self._brought: list[bool] = []  # whether what is in a place goes back
        self._gradients: list[torch.Tensor] = []
        self._passing: list[_Passing] = []

    def add(self, parameter: nn.Parameter, place: torch.Tensor, passing: _Passing | None) -> None:
        self._parameters.append(parameter)
        self._places.append(place)
        self._brought.append(passing is not None)
        self._passing += [passing] if passing is not None else []

    def add_gradient(self, place: torch.Tensor, passing: _Passing | None) -> None:
        self._gradients.append(place)
        self._passing += [passing] if passing is not None else []

    def arrive(self) -> None:
        """Wait until all of it is in RAM. What was copied is not needed any more."""
        while self._passing:
            self._host_copy.finish(self._passing.pop(0))

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Within, the parameters are in RAM with their gradients; then they go back, and are there."""
        self.arrive()
        data, before = [p.data for p in self._parameters], [p.grad for p in self._parameters]
        try:
            _swap(self._parameters, self._places, self._gradients)
            yield
        finally:
            _swap(self._parameters, data, before)
            places = [place for place, brought in zip(self._places, self._brought, strict=True) if brought]
            targets = [target for target, brought in zip(data, self._brought, strict=True) if brought]
            self._host_copy.up(places, targets, self._mark, self._label)


class HostDeviceCopy:
    """Brings parameters and gradients to RAM for a step there, and what the step made of them back.

    ``work_bytes`` of RAM hold both for the largest block; nothing where RAM is the compute tier. ``down_bytes`` is
    the room for a tensor on its way down that is to be added to what is in RAM already.
    """

    def __init__(self, memory: Memory, *, work_bytes: int, down_bytes: int) -> None:
        self._memory = memory
        self._work: Buffer | None = None
        self._passage: Buffer | None = None
        if memory.host is not None and work_bytes:
            self._work = memory.ram.allocate(work_bytes, "parameters and gradients for a step")
        try:
            if memory.host is not None and down_bytes:
                self._passage = memory.ram.allocate(down_bytes, "gradients on their way")
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        for buffer in (self._work, self._passage):
            if buffer is not None:
                buffer.free()

    @property
    def work_bytes(self) -> int:
        """The room for parameters and gradients of blocks that are stepped; 0 where RAM is the compute tier."""
        return 0 if self._work is None else self._work.bytes

    def down(self, tensor: torch.Tensor, place: torch.Tensor, label: str) -> None:
        """``tensor`` of the compute tier into ``place``, a tensor in RAM of the same strides. Waits."""
        if self._memory.host is None:
            place.copy_(tensor)
        else:
            self._memory.engine.finish(self._start_down(tensor, place, label).wait)

    def _start_down(self, tensor: torch.Tensor, place: torch.Tensor, label: str) -> _Passing:
        source = tensor.detach()
        if source.stride() != place.stride():
            source = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=tensor.device)
            source.copy_(tensor)
        way, engine = (self._memory.compute.tier, RAM), self._memory.engine
        target = _target(self._memory.ram, flat_bytes(place))
        return _Passing(engine.copy(flat_bytes(source), target, label, [engine.mark()], way), source)

    def in_ram(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """A gradient where the CPU can read it, until the next call."""
        if self._passage is None:
            return tensor
        flat = self._passage.tensor[: tensor.numel() * tensor.element_size()]
        place = shaped(flat, tensor.dtype, tensor.shape, dense_stride(tensor))
        self.down(tensor, place, label)
        return place

    @contextlib.contextmanager
    def stepping_in_ram(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[tuple[torch.Tensor, bool] | None],
        label: str,
        resting: Collection[int] = (),
    ) -> Iterator[None]:
        """Within, ``parameters`` with a gradient are in RAM, with it; a flag says of a gradient that it is there.

        ``resting``: the numbers of those that point to where they rest in RAM. Where RAM is the compute tier only the
        gradients are set.
        """
        if self._work is None:
            with _gradients_set(parameters, [g[0] if g else None for g in gradients]):
                yield
            return
        pairs = enumerate(zip(parameters, gradients, strict=True))
        tensors = [(parameter, *g, number in resting) for number, (parameter, g) in pairs if g]
        with self.carry(tensors, 0, label).stepping():
            yield

    def carry(self, tensors: Sequence[tuple[nn.Parameter, torch.Tensor, bool, bool]], at: int, label: str) -> Carried:
        """Begin to bring parameters and their gradients to ``at`` in the room for them.

        Flags: the gradient is in RAM, the parameter points to where it rests in RAM.
        """
        carried = Carried(self, label, self._memory.engine.mark())
        for parameter, gradient, in_ram, rests in tensors:
            if rests:
                carried.add(parameter, parameter.detach(), None)
            else:
                place, at = self._room(parameter, at)
                carried.add(parameter, place, self._start_down(parameter, place, label))
            if in_ram:
                carried.add_gradient(gradient, None)
                continue
            place, at = self._room(parameter, at)
            carried.add_gradient(place, self._start_down(gradient, place, label))
        return carried

    def _room(self, like: torch.Tensor, at: int) -> tuple[torch.Tensor, int]:
        assert self._work is not None
        flat = self._work.tensor[at : at + like.numel() * like.element_size()]
        return shaped(flat, like.dtype, like.shape, dense_stride(like)), at + tensor_bytes(like)

    def finish(self, passing: _Passing) -> None:
        self._memory.engine.finish(passing.wait)

    def up(
        self, places: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], after: Waitable, label: str
    ) -> None:
        """Into tensors of the compute tier, in place, once ``after`` is done. Waits: kernels see the new values."""
        engine, way = self._memory.engine, (RAM, self._memory.compute.tier)
        waits = []
        for place, target in zip(places, targets, strict=True):
            if place.stride() != target.stride():
                target.copy_(place)
                continue
            into = _target(self._memory.compute, flat_bytes(target))
            waits.append(engine.copy(flat_bytes(place), into, label, [after], way))
        for wait in waits:
            engine.finish(wait)  # by the host, as the room is about to be used again

    @contextlib.contextmanager
    def stepping_in_place(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[tuple[torch.Tensor, bool] | None], label: str
    ) -> Iterator[None]:
        """Within, each parameter has its gradient in the compute tier, wherever that was."""
        away = [g[0] for g in gradients if g is not None and g[1]]
        if self._memory.host is None or not away:
            with _gradients_set(parameters, [g[0] if g else None for g in gradients]):
                yield
            return
        buffer = self._memory.compute.allocate(sum(tensor_bytes(g) for g in away), label)
        try:
            present: list[torch.Tensor | None] = []
            sources, targets, at = [], [], 0
            for gradient in gradients:
                if gradient is None or not gradient[1]:
                    present.append(gradient[0] if gradient else None)
                    continue
                source = gradient[0]
                flat = buffer.tensor[at : at + source.numel() * source.element_size()]
                target = shaped(flat, source.dtype, source.shape, source.stride())
                sources.append(source)
                targets.append(target)
                present.append(target)
                at += tensor_bytes(source)
            self.up(sources, targets, self._memory.engine.mark(), label)
            with _gradients_set(parameters, present):
                yield
        finally:
            buffer.free()


def _swap(
    parameters: Sequence[nn.Parameter], data: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    for parameter, values, gradient in zip(parameters, data, gradients, strict=True):
        parameter.grad = None  # it must be where the parameter is
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
    """Memory that is somebody's already, as the target of a move."""
    return Buffer(pool, flat, flat.numel(), -1, "")
