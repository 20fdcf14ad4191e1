"""Simulate a forward pass over a model whose blocks rest in several tiers.

Blocks are computed in order: on the device, or by the processor for blocks that it computes in RAM. Meanwhile a link
(and a disk) loads later blocks into the ring's free slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.planning.solver.schedule import COMPUTE, Contention, Schedule, TaskList, lane_of, simulate
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT

BESIDE_BLOCKS = "outside of blocks"  # a pass's first task
CPU = "cpu"  # the lane of the processor's computation beside a GPU
STAGING = 2  # slots in RAM between disk and VRAM: one being read into, one being copied from
_PASSES = 4  # two fill the pipeline, the third is timed, and the last one's loads overlap with it
# A reader takes cycles and memory bandwidth from matrix products. They kept this share of their speed in a 6.6 GB
# model, half of it read in each step, on two cores and into huge pages (bench/streaming.py, its row beside_reads).
_BESIDE_READS = 0.95
# A processor's kernels reach about this share of RAM's bus: 40 of the 51.2 GB/s that two channels of DDR4-3200 carry
# (JEDEC JESD79-4) are usual. The rest is left for a copy engine.
_KERNEL_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """A block's bytes and seconds for the planner. ``uses`` counts its calls per step; 0: its rows are looked up.

    ``overhead_s`` is the cost of streaming it beside the bytes: hooks and requests. ``cpu_s`` are its seconds when
    the processor beside a GPU computes it in RAM, the copies of its inputs and outputs included (0: it cannot), and
    ``cpu_bytes`` its RAM beside its weights then. ``likely`` is the share of steps that need the block: below 1 for
    an expert. ``staged_bytes`` is its size in its file, for the slot between disk and VRAM; 0: ``bytes``.
    """

    name: str
    bytes: int  # of its buffer in the compute tier
    uses: int = 1
    compute_s: float = 0.0
    overhead_s: float = 0.0
    cpu_s: float = 0.0
    cpu_bytes: int = 0
    likely: float = 1.0
    staged_bytes: int = 0

    @property
    def passing_bytes(self) -> int:
        """Bytes in a RAM slot between disk and VRAM."""
        return self.staged_bytes or self.bytes

    @property
    def moved_bytes(self) -> float:
        """Bytes that streaming it moves in a step, on average."""
        return self.bytes * self.uses * self.likely


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A planning job: blocks in execution order, and a step's other bytes and seconds.

    ``fixed_bytes`` always stay in the compute tier (loose parameters, buffers, slots of experts); ``step_bytes`` is
    the peak of activations and temporaries, with the KV cache in the compute tier; ``spent_bytes`` is the program's
    memory per tier beside tensors (imports, tokenizer, library workspaces), with the KV cache that rests in RAM.
    ``bounce_bytes`` is the RAM buffer of reads that cannot go straight to their place in RAM (``fills_ram``: some
    exist under every choice); ``passage_bytes`` is the RAM through which residents are loaded from disk to VRAM, one
    at a time; ``cpu_step_bytes`` are the activations in RAM while a processor beside a GPU computes a block.
    """

    model: str
    task: str
    blocks: Sequence[BlockCost]
    fixed_bytes: int
    step_bytes: int
    fixed_compute_s: float = 0.0
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    bounce_bytes: int = 0
    fills_ram: bool = False
    passage_bytes: int = 0
    cpu_step_bytes: int = 0

    def overhead_bytes(self, tier: str) -> int:
        """Return a tier's most bytes beside blocks and the step: ``spent_bytes`` and the bounce buffer."""
        return self.spent_bytes.get(tier, 0) + (self.bounce_bytes if tier == RAM else 0)

    def bounce_in(self, choices: Iterable[str], compute: str) -> int:
        """Return the bounce buffer's bytes under ``choices``; blocks on their way to VRAM do not use it."""
        taken = compute == RAM or self.fills_ram or not {FROM_RAM, COMPUTE_RAM}.isdisjoint(choices)
        return self.bounce_bytes if taken else 0


def ways_of(choice: str, compute: str) -> list[tuple[str, str]]:
    """Return the links, as (source, target), that load a block under ``choice``."""
    if choice in (RESIDENT, COMPUTE_RAM):
        return []
    last = [] if compute == RAM else [(RAM, compute)]
    return [(DISK, RAM), *last] if choice == FROM_DISK else last


def bus_bytes_per_s(hardware: Hardware) -> float:
    """Return RAM's bytes per second for all readers together."""
    return hardware.tier(RAM).bytes_per_s / _KERNEL_SHARE


def contention(hardware: Hardware) -> Contention:
    """Return the share of its speed that each lane keeps while another is busy."""
    if hardware.compute == RAM:
        return {(COMPUTE, lane_of(DISK, RAM)): _BESIDE_READS}
    link, ram = hardware.link(RAM, hardware.compute).bytes_per_s, hardware.tier(RAM).bytes_per_s
    # Processor and copy engine share the bus of RAM.
    share = min(1.0, bus_bytes_per_s(hardware) / (ram + link)) if ram and link else 1.0
    lane = lane_of(RAM, hardware.compute)
    return {(CPU, lane): share, (lane, CPU): share}


def move_s(block: BlockCost, hardware: Hardware, source: str, target: str) -> float:
    """Return the seconds of a block's loads over a link in a step, the latency of each included."""
    return block.uses * block.likely * hardware.link(source, target).seconds(block.bytes)


def chain_s(block: BlockCost, choice: str) -> float:
    """Return a block's seconds in the chain of computation under ``choice``."""
    if choice == COMPUTE_RAM:
        return block.cpu_s
    return block.compute_s + (block.overhead_s if choice != RESIDENT and block.uses else 0.0)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The schedule of consecutive passes.

    ``firsts`` and ``lasts`` are the first task of each pass and the last of its chain of computation.
    """

    schedule: Schedule
    firsts: Sequence[int]
    lasts: Sequence[int]
    chain: Mapping[int, int]  # a task of the chain -> the one before it

    @property
    def ends_s(self) -> list[float]:
        return [self.schedule.end_s[last] for last in self.lasts]

    def of_pass(self, number: int) -> range:
        """Return the tasks that a pass issues, without loads for it that the pass before issued."""
        ends = [*self.firsts[1:], len(self.schedule.tasks)]
        return range(self.firsts[number], ends[number])

    def waited_s(self, index: int) -> float:
        """Return the seconds that computation was idle before one of its tasks."""
        before = self.chain[index]
        return self.schedule.begin_s[index] - (self.schedule.end_s[before] if before >= 0 else 0.0)


def simulate_passes(jobs: Sequence[Job], hardware: Hardware, choices: Mapping[str, str], slots: int) -> Passes:
    """Simulate a pass for each of ``jobs``, which have the same blocks. ``choices``: block -> choice.

    The ring is empty at first; after a pass's last block it is filled for the next pass.
    """
    maker, firsts, lasts = _Maker(hardware, choices, slots), [], []
    for job in jobs:
        firsts.append(len(maker.tasks))
        maker.add_pass(job)
        lasts.append(maker.last)
    return Passes(schedule=simulate(maker.tasks, contention(hardware)), firsts=firsts, lasts=lasts, chain=maker.chain)


def pass_s(job: Job, hardware: Hardware, choices: Mapping[str, str], slots: int) -> tuple[float, Schedule]:
    """Return the seconds of a pass in the steady state, and the simulated schedule."""
    done = simulate_passes([job] * _PASSES, hardware, choices, slots)
    return done.ends_s[-2] - done.ends_s[-3], done.schedule


class _Maker(TaskList):
    """Append tasks in the order in which the runtime issues them."""

    def __init__(self, hardware: Hardware, choices: Mapping[str, str], slots: int) -> None:
        super().__init__(slots, STAGING)
        self.last = -1  # of the chain of computation
        self.chain: dict[int, int] = {}
        self._hardware, self._choices = hardware, choices

    def add_pass(self, job: Job) -> None:
        self._compute(BESIDE_BLOCKS, COMPUTE, job.fixed_compute_s, [])
        for block in job.blocks:
            if not block.uses:
                continue
            choice = self._choices[block.name]
            ready = self._load(block, choice)
            lane = CPU if choice == COMPUTE_RAM else COMPUTE
            self._compute(block.name, lane, chain_s(block, choice), ready)
            if ways_of(choice, self._hardware.compute):
                self._free.append((block.name, [self.last]))

    def _compute(self, name: str, lane: str, seconds: float, ready: Sequence[int]) -> None:
        after = [*ready, *([self.last] if self.last >= 0 else [])]
        before, self.last = self.last, self._task(name, lane, seconds, after)
        self.chain[self.last] = before

    def _load(self, block: BlockCost, choice: str) -> list[int]:
        ways = ways_of(choice, self._hardware.compute)
        if not ways:
            return []
        if (ready := self._ready(block.name)) is not None:
            return ready
        _, free = self._free.popleft()
        if len(ways) == 1:
            return [self._copy(block, *ways[0], free)]
        read = self._copy(block, *ways[0], self._staging.popleft())
        moved = self._copy(block, *ways[1], [read, *free])
        self._staging.append([moved])
        return [moved]

    def _copy(self, block: BlockCost, source: str, target: str, after: Sequence[int]) -> int:
        seconds = move_s(block, self._hardware, source, target)
        return self._task(block.name, lane_of(source, target), seconds, after, block.bytes)
