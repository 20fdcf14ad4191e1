"""Where the states and the gradients of an optimizer's blocks rest, and the room that they pass through."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from brim.core.hardware import DISK, RAM
from brim.errors import UnsupportedError, UsageError
from brim.memory.tiers import Memory
from brim.techniques.base import HANDLE_ATTRIBUTE
from brim.techniques.optimizer_offload.backing_store import States
from brim.techniques.optimizer_offload.gradients import Gradients
from brim.techniques.optimizer_offload.parts import Here, Part
from brim.techniques.optimizer_offload.states import StateBlock
from brim.techniques.streaming.host_device_copy import HostDeviceCopy, tensor_bytes
from brim.techniques.streaming.step_context import narrowed

KEEP = "keep"
CHOICES = (KEEP, RAM, DISK)


class Streaming(Protocol):
    """What is needed of weight streaming: its blocks, and their true values for the time of an update."""

    @property
    def blocks(self) -> Sequence[tuple[str, Sequence[nn.Parameter]]]: ...

    def updating(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]: ...

    def rests_in_ram(self, parameters: Iterable[nn.Parameter]) -> bool: ...

    def updating_at_rest(self, parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[Any]: ...

    def is_updated_by(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None: ...

    def settle(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Choices:
    """``states`` and ``gradients``: ``keep``, ``ram`` or ``disk``; ``keep``: names of blocks whose states stay.

    ``brief``: the RAM that states on disk pass through is for the largest unit alone, and given back between steps.
    """

    states: str
    gradients: str
    keep: frozenset[str]
    buffer_bytes: int | None
    brief: bool


def check(optimizer: Optimizer, **choices: str) -> None:
    """Raise UsageError for what is unknown or fitted already, UnsupportedError for a step that is not PyTorch's."""
    if HANDLE_ATTRIBUTE in vars(optimizer):
        raise UsageError(
            f"Cannot fit {type(optimizer).__name__}.",
            "It is fitted already.",
            "Call .brim.remove() on it first.",
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


class Places:
    """``states`` of the blocks in ``leaving``, ``gradients`` of all, and ``host_copy`` between RAM and compute."""

    def __init__(
        self, optimizer: Optimizer, memory: Memory, blocks: Mapping[int, StateBlock], choices: Choices
    ) -> None:
        self._blocks = blocks
        here = {KEEP, memory.compute.tier}  # what is in RAM already need not be brought there
        gradients = None if choices.gradients in here else choices.gradients
        self.leaving = {
            index: block
            for index, block in blocks.items()
            if choices.states not in here and block.name not in choices.keep
        }
        leaving = self.leaving.values()
        largest = max((tensor_bytes(p) for b in blocks.values() for p in b.parameters), default=0)
        with contextlib.ExitStack() as undo:
            self.host_copy = HostDeviceCopy(
                memory, work_bytes=work_bytes(leaving), down_bytes=largest if gradients is not None else 0
            )
            undo.callback(self.host_copy.free)
            at_once = memory.host is not None  # a block crosses to RAM and back as a whole
            sizes = [size for b in leaving for size in ([b.state_bytes] if at_once else b.unit_bytes())]
            usual = max(sizes, default=0) if choices.brief else usual_buffer_bytes(sizes)
            room = choices.buffer_bytes or usual
            tier = RAM if choices.states == KEEP else choices.states
            self.states = States(
                optimizer, memory, self.leaving, tier=tier, buffer_bytes=room, at_once=at_once, brief=choices.brief
            )
            undo.callback(self.states.records.free)
            room = choices.buffer_bytes or gradient_buffer_bytes([b.bytes for b in blocks.values()])
            self.gradients = Gradients(memory, blocks, self.host_copy, tier=gradients, buffer_bytes=room)
            undo.callback(self.gradients.free)
            undo.callback(self.states.restore)
            self.states.take_all()
            self.states.records.let_go()
            undo.pop_all()
        self._records = [self.states.records, *([self.gradients.records] if self.gradients.records else [])]

    def units(self, index: int, gradients: Sequence[Here | None]) -> int:
        """In how many units a block that is leaving is updated. A sparse gradient has no parts."""
        sparse = any(gradient is not None and gradient[0].is_sparse for gradient in gradients)
        return self.states.units(index) if self.states.fit_parts(index) and not sparse else 1

    @contextlib.contextmanager
    def unit(
        self,
        optimizer: Optimizer,
        index: int,
        number: int,
        gradients: Sequence[Here | None],
        soon: Sequence[int],
        resting: Collection[int],
    ) -> Iterator[None]:
        """Within: ``optimizer`` has a unit of a block and nothing else, in RAM. ``soon``: the blocks after it.
        ``resting``: the numbers of the block's parameters that point to where they rest in RAM."""
        block, states, in_ram = self._blocks[index], self.states, self.host_copy.stepping_in_ram
        if self.units(index, gradients) < states.units(index):
            with (
                states.gathered(index),
                in_ram(block.parameters, gradients, block.name, resting),
                narrowed(optimizer, block.parameters),
            ):
                yield
            return
        parts = states.parts(index, number)
        owners = [block.parameters[part.parameter] for part in parts]
        part_gradients = [_part_of(part, gradients[part.parameter]) for part in parts]
        with states.present(
            index, number, stepping=[gradient is not None for gradient in part_gradients]
        ) as stand_ins:
            states.expect([index, *soon], number + 1)
            parts_at_rest = [place for place, part in enumerate(parts) if part.parameter in resting]
            with in_ram(stand_ins, part_gradients, block.name, parts_at_rest), narrowed(optimizer, owners, stand_ins):
                yield

    @property
    def written_bytes(self) -> int:
        """To disk, until now."""
        return sum(records.written_bytes for records in self._records)

    @property
    def disk_bytes(self) -> int:
        return sum(sum(records.sizes.values()) for records in self._records if records.tier == DISK)

    def restore(self) -> None:
        """All states and gradients in memory again. After an error it can be called again."""
        self.states.restore()
        self.gradients.restore()

    def free(self) -> None:
        self.gradients.free()
        self.states.records.free()
        self.host_copy.free()


def _part_of(part: Part, gradient: Here | None) -> Here | None:
    return None if gradient is None else (part.of(gradient[0]), gradient[1])


def work_bytes(blocks: Iterable[StateBlock]) -> int:
    """RAM for the parameters and the gradients of one block while it is stepped there."""
    return max((2 * sum(tensor_bytes(p) for p in block.parameters) for block in blocks), default=0)


def usual_buffer_bytes(sizes: Sequence[int]) -> int:
    """Room for three ordinary blocks: one is read, one worked on, one written. A very large one may need more.

    For the largest alone where three would be a good part of all there is, as in a model of a few large layers, or
    where a block is so small that reading it ahead gains nothing: room is what is wanted.
    """
    ordinary = max(sorted(sizes)[: max(1, len(sizes) * 9 // 10)], default=0)
    three = 3 * ordinary if ordinary >= _WORTH_READING_AHEAD_BYTES and _PART * ordinary <= sum(sizes) else 0
    return max([three, *sizes])


def gradient_buffer_bytes(sizes: Sequence[int]) -> int:
    """Gradients that are added up come and go many times a step: three ordinary blocks, but no more than all."""
    ordinary = sorted(sizes)[: max(1, len(sizes) * 9 // 10)]
    return max([min(3 * max(ordinary, default=0), sum(sizes)), *sizes])


_WORTH_READING_AHEAD_BYTES = 1 << 20
_PART = 12  # three blocks are a quarter of all then
