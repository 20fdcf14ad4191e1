"""Simulate a training step: build its tasks from its choices."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.planning.solver.cost_model import CPU, copy_s, update_lanes
from brim.planning.solver.schedule import COMPUTE, UPDATE, Schedule, TaskList, lane_of, simulate
from brim.planning.solver.step_profile import KEEP, Assignment, BlockProfile, StepProfile
from brim.techniques.optimizer_offload.state_blocks import UPDATE_PARTS
from brim.techniques.streaming.placement import FROM_DISK, RESIDENT

_STEPS = 4  # two fill the pipeline, the third is timed, and the last one overlaps with its end
_MICROS = 3  # micro-batches that are simulated; each further one takes as long as the third
_WINDOW = 2  # blocks whose activations are loaded ahead
_STAGING = 2  # buffers in RAM between disk and VRAM, and between disk and the update


def training_step_s(profile: StepProfile, hardware: Hardware, assignment: Assignment) -> tuple[float, Schedule]:
    """Return the seconds of a step in the steady state, and the simulated schedule."""
    micros = profile.passes(assignment.frame.micro_batch)
    shown, step_s = min(micros, _MICROS), 0.0
    step_s, schedule = _steady(profile, hardware, assignment, shown)
    if micros > shown:
        fewer, _ = _steady(profile, hardware, assignment, shown - 1)
        step_s += (micros - shown) * (step_s - fewer)
    return step_s, schedule


def contention_of(hardware: Hardware) -> dict[tuple[str, str], float]:
    """Return the share of its speed that a lane keeps while another is busy.

    Both directions of a link slow each other; those of a drive share its time. A drive slows a processor, as it
    writes to the memory that this reads.
    """
    shares = {}
    for link in hardware.links:
        if link.duplex_bytes_per_s and link.source != link.target:
            share = min(1.0, link.duplex_bytes_per_s / link.bytes_per_s)
            shares[lane_of(link.source, link.target), lane_of(link.target, link.source)] = share
        memory_bytes_per_s = hardware.tier(RAM).bytes_per_s
        if hardware.compute == RAM and DISK in (link.source, link.target) and memory_bytes_per_s:
            left = 1 - link.bytes_per_s / memory_bytes_per_s
            for lane in (COMPUTE, UPDATE):
                shares[lane, lane_of(link.source, link.target)] = max(0.5, left)
            shares[lane_of(link.source, link.target), lane_of(link.target, link.source)] = 0.5
    return shares


def _steady(profile: StepProfile, hardware: Hardware, assignment: Assignment, shown: int) -> tuple[float, Schedule]:
    """Return the seconds from the first computation of a step to that of the next.

    A step's end is no measure: its last writes overlap with the next step, and nothing slows those of the last step.
    """
    maker = _Maker(profile, hardware, assignment)
    first = []
    for _ in range(_STEPS):
        first.append(len(maker.tasks))
        maker.step(shown)
    schedule = simulate(maker.tasks, contention_of(hardware))
    starts = [next(i for i in range(index, len(maker.tasks)) if maker.tasks[i].lane == COMPUTE) for index in first]
    return schedule.begin_s[starts[-1]] - schedule.begin_s[starts[-2]], schedule


class _Maker(TaskList):
    """Append tasks in the order in which the runtime issues them."""

    def __init__(self, profile: StepProfile, hardware: Hardware, assignment: Assignment) -> None:
        super().__init__(assignment.frame.slots, _STAGING)
        self._profile, self._hardware, self._choices = profile.under(assignment.frame), hardware, assignment
        self._compute = hardware.compute
        self._away = DISK if self._compute == RAM else RAM
        frame = assignment.frame
        count = (
            max(1, frame.gpu_sixteenths * len(profile.blocks) // UPDATE_PARTS) if frame.gpu_sixteenths else _STAGING
        )
        self._buffers: deque[list[int]] = deque([[]] * count)
        self._updated: dict[str, list[int]] = {}  # tasks that the next use of a block waits for
        self._barrier: list[int] = []  # tasks that the next step waits for
        lanes = update_lanes(profile, hardware, frame)
        self._on_cpu = hardware.compute != RAM and frame.states != KEEP and not frame.gpu_sixteenths
        path = (*([DISK] * (frame.states == DISK)), RAM, *([self._compute] * bool(frame.gpu_sixteenths)))
        self._visit = list(pairwise(path))  # the links over which states come to their update
        self._update_s = lanes.get(CPU if self._on_cpu else COMPUTE, 0.0)
        self._update_lane = CPU if self._on_cpu else UPDATE if hardware.compute == RAM else COMPUTE
        self._turn: list[int] = []  # the update that a processor finishes before its next computation

    def step(self, micros: int) -> None:
        """Append a step of ``micros`` micro-batches."""
        for index in range(micros):
            copies = self._forward()
            self._backward(copies, first=index == 0, last=index == micros - 1)
        if not self._choices.frame.in_backward:  # optimizer.step() returns when all of it is done
            turn = len(self.tasks) - 1
            self._barrier = [self._update_later(block, [turn]) for block in self._profile.blocks]
        if not any(block.trained_bytes for block in self._profile.blocks):  # adapters beside the blocks
            self._barrier = [self._task("update", self._update_lane, self._profile.update_s, [len(self.tasks) - 1])]

    def _copy(self, name: str, source: str, target: str, count: int, after: list[int]) -> int:
        return self._task(name, lane_of(source, target), copy_s(self._hardware, source, target, count), after, count)

    def _forward(self) -> dict[str, int]:
        """Append a forward pass; return the copies that offload activations, by block."""
        copies = {}
        for block in self._profile.blocks:
            ready = self._load(block) + self._updated.pop(block.name, []) + self._barrier + self._turn
            done = self._task(f"{block.name} forward", COMPUTE, block.forward_s, ready)
            self._let_go(block, done)
            if count := block.moved_bytes(self._choices.activations[block.name]):
                name = f"{block.name} activations"
                copies[block.name] = self._copy(name, self._compute, self._away, count, [done])
        more = self._profile.head_s if self._choices.frame.chunked else 0.0
        self._task("outside of blocks", COMPUTE, sum(self._profile.outside_s) + more, [])
        return copies

    def _backward(self, copies: Mapping[str, int], *, first: bool, last: bool) -> None:
        window: deque[list[int]] = deque([[]] * _WINDOW)
        for block in reversed(self._profile.blocks):
            ready = self._load(block) + self._turn
            kept = self._choices.activations[block.name]
            if block.name in copies:
                name, after = f"{block.name} activations", [copies[block.name], *window.popleft()]
                ready.append(self._copy(name, self._away, self._compute, block.moved_bytes(kept), after))
            seconds = block.backward_s + block.recompute_s(kept)
            done = self._task(f"{block.name} backward", COMPUTE, seconds, ready)
            if block.name in copies:
                window.append([done])
            if last and self._choices.frame.in_backward:
                done = self._update(block, [done])
                self._let_go(block, *self._updated.get(block.name, []), done, fresh=not self._on_cpu)
                continue
            if block.trained_bytes and self._choices.frame.gradients != KEEP:
                self._send_gradients(block, done, first=first)
            self._let_go(block, done)

    def _load(self, block: BlockProfile) -> list[int]:
        """Load the block's weights unless the ring still holds them; return the tasks to wait for."""
        choice = self._choices.weights[block.name]
        if choice == RESIDENT:
            return []
        if (ready := self._ready(block.name)) is not None:
            return ready
        _, free = self._free.popleft()
        after = free + self._updated.get(block.name, [])
        name = f"{block.name} weights"
        if choice != FROM_DISK:
            return [self._copy(name, RAM, self._compute, block.bytes, after)]
        if self._compute == RAM:
            return [self._copy(name, DISK, RAM, block.bytes, after)]
        read = self._copy(name, DISK, RAM, block.bytes, self._staging.popleft())
        moved = self._copy(name, RAM, self._compute, block.bytes, [read, *after])
        self._staging.append([moved])
        return [moved]

    def _let_go(self, block: BlockProfile, *done: int, fresh: bool = True) -> None:
        """Release the block's slot; ``fresh=False``: the slot holds a stale copy of the block."""
        if self._choices.weights[block.name] != RESIDENT:
            self._free.append((block.name if fresh else "", list(done)))

    def _send_gradients(self, block: BlockProfile, done: int, *, first: bool) -> None:
        """Copy gradients to their tier, where they are added to those of earlier passes."""
        name, count = f"{block.name} gradients", block.trained_bytes
        if self._compute != RAM:
            done = self._copy(name, self._compute, RAM, count, [done])
        if self._choices.frame.gradients == DISK:
            ready = [done] if first else [done, self._copy(name, DISK, RAM, count, [done])]
            self._copy(name, RAM, DISK, count, ready)

    def _update_later(self, block: BlockProfile, after: list[int]) -> int:
        """Update a block that is not in use: a block that is updated in its slot is loaded first."""
        if self._on_cpu:
            self._free = deque(("" if name == block.name else name, done) for name, done in self._free)
        if self._on_cpu or not block.trained_bytes:
            return self._update(block, after)
        done = self._update(block, after + self._load(block))
        self._let_go(block, *self._updated.get(block.name, []), done)
        return done

    def _update(self, block: BlockProfile, after: list[int]) -> int:
        """Run the optimizer on a block; return the task that its weights wait for."""
        if not block.trained_bytes:
            return after[-1]
        frame, profile, name = self._choices.frame, self._profile, f"{block.name} update"
        share = block.trained_bytes / max(1, sum(b.trained_bytes for b in profile.blocks))
        state_bytes = int(profile.state_bytes * share)
        ready = list(after)
        came = self._buffers.popleft() if self._visit else []
        for source, target in self._visit:
            came = [self._copy(f"{name}: states", source, target, state_bytes, came)]
        ready += came
        on_cpu = self._on_cpu
        gone = frame.gradients != KEEP and not frame.in_backward
        if gone and frame.gradients == DISK:
            ready.append(self._copy(f"{name}: gradients", DISK, RAM, block.trained_bytes, list(after)))
        elif on_cpu and not gone:
            ready.append(self._copy(f"{name}: gradients", self._compute, RAM, block.trained_bytes, list(after)))
        done = self._task(name, self._update_lane, self._update_s * share, ready)
        self._turn = [done] if self._update_lane == UPDATE else []
        left = done
        for target, source in reversed(self._visit):
            left = self._copy(f"{name}: states", source, target, state_bytes, [left])
        if self._visit:
            self._buffers.append([left])
        back = self._bring_home(block, done, RAM if on_cpu else self._compute)
        self._updated[block.name] = [back]
        return done if self._choices.weights[block.name] != RESIDENT else back

    def _bring_home(self, block: BlockProfile, done: int, tier: str) -> int:
        """Copy updated weights from ``tier`` to where the block rests; return the last copy."""
        choice = self._choices.weights[block.name]
        home = self._compute if choice == RESIDENT else DISK if choice == FROM_DISK else RAM
        path = [tier, RAM, home] if RAM not in (tier, home) and tier != home else [tier, home]
        for source, target in pairwise(path):
            if source != target:
                done = self._copy(f"{block.name} home", source, target, block.trained_bytes, [done])
        return done
