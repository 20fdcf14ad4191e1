"""One pass over a model whose blocks lie in several tiers: what it is made of, and how long it takes.

Compute goes from block to block, be it on the device or, for blocks that the processor computes where they rest, in
RAM. Beside it a link (and a disk) fills the slots of a ring, as far ahead as there are free ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.planning.solver.schedule import COMPUTE, Contention, Schedule, Task, simulate, way
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT

BESIDE_BLOCKS = "outside of blocks"  # a pass's first task
CPU = "cpu"  # the lane of what the processor computes beside a GPU
STAGING = 2  # slots in RAM between disk and VRAM: one being read into, one being copied from
_PASSES = 4  # the first two fill the pipeline, the third is looked at, the last is read for beside it
# A reader takes cycles and memory bandwidth from products. In a 6.6 GB model, half of it read in each step, on two
# cores and into huge pages, they kept this share of their speed (bench/streaming.py, its row beside_reads).
_BESIDE_READS = 0.95
# Of what the bus of RAM carries, a processor's kernels reach about this much: of two channels of DDR4-3200, which are
# 51.2 GB/s (JEDEC JESD79-4), 40 are usual. The rest is there for a copy engine beside them.
_KERNEL_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """A block as the planner sees it. ``uses`` per step; 0: its rows are looked up where it rests.

    ``overhead_s`` is what streaming it costs beside the bytes: hooks and requests. ``cpu_s`` is what it takes when
    the processor beside a GPU computes it where it rests in RAM, the way of its inputs and outputs included, and
    ``cpu_bytes`` what it then holds in RAM beside its weights; 0 seconds: it cannot. ``likely`` is the share of steps
    that need the block at all: an expert is not asked in each. ``staged_bytes`` is what it takes on its way from disk
    to VRAM, as it lies in its file; 0: ``bytes``.
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
        """In a slot of RAM between disk and VRAM."""
        return self.staged_bytes or self.bytes

    @property
    def moved_bytes(self) -> float:
        """What streaming it moves in a step, on average."""
        return self.bytes * self.uses * self.likely


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be planned: blocks in execution order, and what a step needs beside them.

    ``fixed_bytes`` stays in the compute tier for good (loose parameters, buffers, slots of experts); ``step_bytes``
    is the peak of activations and temporaries, with the part of the KV cache that is in the compute tier;
    ``spent_bytes`` is what the program takes per tier beside tensors (imports, tokenizer, library workspaces), with
    the part of the KV cache that rests in RAM; ``bounce_bytes`` of RAM serve reads that cannot go straight to their
    place there (``fills_ram``: there are some whatever is chosen), and through ``passage_bytes`` of it residents come
    from disk to VRAM, one at a time. ``cpu_step_bytes`` of
    RAM are what a processor beside a GPU takes for activations while it computes a block. ``beside``: what lanes were
    measured to leave each other (None: what ``contention`` knows of the machine).
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
    beside: Contention | None = None

    def overhead_bytes(self, tier: str) -> int:
        """What a tier holds at most beside its blocks and the step: ``spent_bytes`` and a bounce buffer."""
        return self.spent_bytes.get(tier, 0) + (self.bounce_bytes if tier == RAM else 0)

    def bounce_in(self, choices: Iterable[str], compute: str) -> int:
        """The bounce buffer under ``choices``: on its way to VRAM nothing passes through it."""
        taken = compute == RAM or self.fills_ram or not {FROM_RAM, COMPUTE_RAM}.isdisjoint(choices)
        return self.bounce_bytes if taken else 0


def ways_of(choice: str, compute: str) -> list[tuple[str, str]]:
    """The links over which a block comes under ``choice``."""
    if choice in (RESIDENT, COMPUTE_RAM):
        return []
    last = [] if compute == RAM else [(RAM, compute)]
    return [(DISK, RAM), *last] if choice == FROM_DISK else last


def bus_bytes_per_s(hardware: Hardware) -> float:
    """What RAM gives to all that read it at once."""
    return hardware.tier(RAM).bytes_per_s / _KERNEL_SHARE


def contention(hardware: Hardware) -> Contention:
    """What lanes that work beside each other leave of their speeds."""
    if hardware.compute == RAM:
        return {(COMPUTE, way(DISK, RAM)): _BESIDE_READS}
    link, ram = hardware.link(RAM, hardware.compute).bytes_per_s, hardware.tier(RAM).bytes_per_s
    # Processor and copy engine read the same RAM; together they get what its bus has.
    share = min(1.0, bus_bytes_per_s(hardware) / (ram + link)) if ram and link else 1.0
    lane = way(RAM, hardware.compute)
    return {(CPU, lane): share, (lane, CPU): share}


def move_s(block: BlockCost, hardware: Hardware, source: str, target: str) -> float:
    """Seconds that bringing a block over a link takes in a step: each time, a request and the bytes."""
    return block.uses * block.likely * hardware.link(source, target).seconds(block.bytes)


def chain_s(block: BlockCost, choice: str) -> float:
    """Seconds of a block in the chain of computation under ``choice``."""
    if choice == COMPUTE_RAM:
        return block.cpu_s
    return block.compute_s + (block.overhead_s if choice != RESIDENT and block.uses else 0.0)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes one after the other, and the schedule of all that they do.

    ``firsts`` and ``lasts``: the first task of each, and the last one of its chain of computation.
    """

    schedule: Schedule
    firsts: Sequence[int]
    lasts: Sequence[int]
    chain: Mapping[int, int]  # a task of the chain -> the one before it

    @property
    def ends_s(self) -> list[float]:
        return [self.schedule.end_s[last] for last in self.lasts]

    def of_pass(self, number: int) -> range:
        """The tasks that were asked for in a pass; loads for the next one are not among them."""
        ends = [*self.firsts[1:], len(self.schedule.tasks)]
        return range(self.firsts[number], ends[number])

    def waited_s(self, index: int) -> float:
        """How long computation stood still before a task of it."""
        before = self.chain[index]
        return self.schedule.begin_s[index] - (self.schedule.end_s[before] if before >= 0 else 0.0)


def simulate_passes(
    jobs: Sequence[Job], hardware: Hardware, choices: Mapping[str, str], slots: int, beside: Contention | None = None
) -> Passes:
    """A pass for each of ``jobs``, which have the same blocks. ``choices``: block -> where it is.

    The last block of a pass is followed by loads for the first of the next. Nothing is in the ring when the first
    begins.
    """
    maker, firsts, lasts = _Maker(hardware, choices, slots), [], []
    for job in jobs:
        firsts.append(len(maker.tasks))
        maker.one(job)
        lasts.append(maker.last)
    beside = jobs[0].beside if beside is None and jobs else beside
    schedule = simulate(maker.tasks, contention(hardware) if beside is None else beside)
    return Passes(schedule=schedule, firsts=firsts, lasts=lasts, chain=maker.chain)


def pass_s(
    job: Job, hardware: Hardware, choices: Mapping[str, str], slots: int, beside: Contention | None = None
) -> tuple[float, Schedule]:
    """Seconds of a pass in the steady state, and the schedule of the passes that they were taken from."""
    done = simulate_passes([job] * _PASSES, hardware, choices, slots, beside)
    return done.ends_s[-2] - done.ends_s[-3], done.schedule


class _Maker:
    """Writes tasks in the order in which the runtime asks for them."""

    def __init__(self, hardware: Hardware, choices: Mapping[str, str], slots: int) -> None:
        self.tasks: list[Task] = []
        self.last = -1  # of the chain of computation
        self.chain: dict[int, int] = {}
        self._hardware, self._choices = hardware, choices
        # What each free slot of the ring holds still, and who let it go.
        self._free: deque[tuple[str, list[int]]] = deque([("", [])] * slots)
        self._staging: deque[list[int]] = deque([[]] * STAGING)

    def one(self, job: Job) -> None:
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

    def _task(self, name: str, lane: str, seconds: float, after: Sequence[int], bytes: int = 0) -> int:
        self.tasks.append(Task(name=name, lane=lane, seconds=seconds, after=tuple(after), bytes=bytes))
        return len(self.tasks) - 1

    def _compute(self, name: str, lane: str, seconds: float, ready: Sequence[int]) -> None:
        after = [*ready, *([self.last] if self.last >= 0 else [])]
        before, self.last = self.last, self._task(name, lane, seconds, after)
        self.chain[self.last] = before

    def _load(self, block: BlockCost, choice: str) -> list[int]:
        ways = ways_of(choice, self._hardware.compute)
        if not ways:
            return []
        kept_slot = next((slot for slot in self._free if slot[0] == block.name), None)
        if kept_slot is not None:  # as many slots as blocks: nothing took its place
            self._free.remove(kept_slot)
            return list(kept_slot[1])
        _, free = self._free.popleft()
        if len(ways) == 1:
            return [self._copy(block, *ways[0], free)]
        read = self._copy(block, *ways[0], self._staging.popleft())
        moved = self._copy(block, *ways[1], [read, *free])
        self._staging.append([moved])
        return [moved]

    def _copy(self, block: BlockCost, source: str, target: str, after: Sequence[int]) -> int:
        seconds = move_s(block, self._hardware, source, target)
        return self._task(block.name, way(source, target), seconds, after, block.bytes)


__all__ = [
    "BESIDE_BLOCKS",
    "CPU",
    "STAGING",
    "BlockCost",
    "Job",
    "Passes",
    "chain_s",
    "contention",
    "move_s",
    "pass_s",
]
__all__ += ["FROM_DISK", "FROM_RAM", "simulate_passes", "ways_of"]
