"""Between the compute tier and RAM, tensor by tensor, where these are not the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from brim.core.hardware import RAM
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import Buffer, round_up
from brim.memory.tiers import Memory
from brim.memory.transfer import Waitable
from brim.techniques.optimizer_states import flat_bytes, shaped
from brim.techniques.optimizer_trial import dense_stride


def tensor_bytes(tensor: torch.Tensor) -> int:
    return round_up(tensor.numel() * tensor.element_size(), PACKED_ALIGNMENT_BYTES)


class Crossing:
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

    def down(self, tensor: torch.Tensor, place: torch.Tensor, label: str) -> None:
        """``tensor`` of the compute tier into ``place``, a tensor in RAM of the same strides. Waits."""
        if self._memory.host is None:
            place.copy_(tensor)
        else:
            self._memory.engine.finish(self._start_down(tensor, place, label))

    def _start_down(self, tensor: torch.Tensor, place: torch.Tensor, label: str) -> Waitable:
        source = tensor.detach()
        if source.stride() != place.stride():
            source = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=tensor.device)
            source.copy_(tensor)
        way, engine = (self._memory.compute.tier, RAM), self._memory.engine
        target = _target(self._memory.ram, flat_bytes(place))
        return engine.copy(flat_bytes(source), target, label, [engine.mark()], way)

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
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[tuple[torch.Tensor, bool] | None], label: str
    ) -> Iterator[None]:
        """Within, ``parameters`` with a gradient are in RAM, with it; a flag says of a gradient that it is there.

        Where RAM is the compute tier only the gradients are set.
        """
        if self._work is None:
            with _gradients_set(parameters, [g[0] if g else None for g in gradients]):
                yield
            return
        moved = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        places, present, waits, at = [], [], [], 0
        for parameter, (gradient, in_ram) in moved:
            place, at = self._room(parameter, at)
            waits.append(self._start_down(parameter, place, label))
            places.append(place)
            if not in_ram:
                room, at = self._room(parameter, at)
                waits.append(self._start_down(gradient, room, label))
                gradient = room
            present.append(gradient)
        for wait in waits:
            self._memory.engine.finish(wait)
        held = [p.data for p, _ in moved]
        grads = [p.grad for p, _ in moved]
        try:
            for (parameter, _), place, gradient in zip(moved, places, present, strict=True):
                parameter.grad = None
                parameter.data = place
                parameter.grad = gradient
            yield
        finally:
            for (parameter, _), data, before in zip(moved, held, grads, strict=True):
                parameter.grad = None
                parameter.data = data
                parameter.grad = before
            self._up(places, held, label)

    def _room(self, like: torch.Tensor, at: int) -> tuple[torch.Tensor, int]:
        assert self._work is not None
        flat = self._work.tensor[at : at + like.numel() * like.element_size()]
        return shaped(flat, like.dtype, like.shape, dense_stride(like)), at + tensor_bytes(like)

    def _up(self, places: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], label: str) -> None:
        """Into tensors of the compute tier, in place; later kernels see the new values."""
        engine, way = self._memory.engine, (RAM, self._memory.compute.tier)
        waits = []
        for place, target in zip(places, targets, strict=True):
            if place.stride() != target.stride():
                target.copy_(place)
                continue
            into = _target(self._memory.compute, flat_bytes(target))
            waits.append(engine.copy(flat_bytes(place), into, label, [engine.mark()], way))
        for wait in waits:
            wait.wait()
            engine.finish(wait)  # the room is about to be used again

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
            set_, at, pairs = [], 0, []
            for gradient in gradients:
                if gradient is None or not gradient[1]:
                    set_.append(gradient[0] if gradient else None)
                    continue
                found = gradient[0]
                flat = buffer.tensor[at : at + found.numel() * found.element_size()]
                set_.append(shaped(flat, found.dtype, found.shape, found.stride()))
                pairs.append((found, set_[-1]))
                at += tensor_bytes(found)
            self._up([a for a, _ in pairs], [b for _, b in pairs], label)
            with _gradients_set(parameters, set_):
                yield
        finally:
            buffer.free()


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


def _target(pool: object, flat: torch.Tensor) -> Buffer:
    """Memory that is somebody's already, as the target of a move."""
    return Buffer(pool, flat, flat.numel(), -1, "")  # type: ignore[arg-type]
