"""Measure how lanes of this machine slow each other when it computes in RAM, and cache that for a week.

Reads and writes take cycles of the cores that compute, and bandwidth of their memory. The loss depends on the machine
(a virtual one may not compute at all during a read) and on the computation.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F

from brim import threads
from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.errors import TransferError, UsageError
from brim.measure.disk import RING_BYTES, RUN_CHUNK_BYTES, UncachedFile, drop_cache, touched_ring, uncached_file
from brim.measure.probe import drive_folder, probe
from brim.planning.seconds.measurement_cache import Remembered
from brim.planning.solver.schedule import COMPUTE, UPDATE, Contention, lane_of
from brim.units import MIB

READ, WRITE = "read", "write"
_METHOD = 4  # raised when the measurement changes
# Shares change less than rates, and measuring takes seconds.
_GOOD_FOR_S = 7 * 24 * 3600.0
_MANY_ROWS = 256  # larger products are limited by arithmetic as much
_LANES = {READ: lane_of(DISK, RAM), WRITE: lane_of(RAM, DISK)}
_SIDE, _MATRICES = 2048, 8  # 128 MiB in turn: several times the last-level cache of most processors
# Many short rounds: the rate of a shared drive may change within a second, and then in all three parts of a round.
_ROUNDS, _ROUND_S = 11, 0.05
_LEAST = 0.05  # a smaller share means that the machine was busy otherwise


@dataclass(frozen=True, eq=False)
class SharesWhenAsked(Mapping[tuple[str, str], float]):
    """The contention ``by_rates``, overridden by :func:`beside_drive`.

    It is measured at the first access: a step that moves nothing has none.
    """

    hardware: Hardware
    rows: int
    by_rates: Contention
    writes: bool
    measures: bool = True

    @cached_property
    def _shares(self) -> Contention:
        measured = beside_drive(self.hardware, self.rows, writes=self.writes, measures=self.measures)
        return {**self.by_rates, **(measured or {})}

    def __getitem__(self, lanes: tuple[str, str]) -> float:
        return self._shares[lanes]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)


def beside_drive(hardware: Hardware, rows: int, *, writes: bool, measures: bool = True) -> Contention | None:
    """Return the shares of their speeds that compute and drive keep while both are busy.

    None for another machine, where the drive cannot be measured (a full disk cannot be written), and without
    ``measures`` where nothing is cached. ``rows`` are those of a matrix product: one in a token's pass, many in a
    training. ``writes`` includes the shares of updates, which are bound by memory as a product of one row is. The
    first measurement of each share takes some seconds.
    """
    if hardware.compute != RAM or (hardware.name, RAM) != ((here := probe(device="cpu")).name, here.compute):
        return None
    memory = Remembered("beside-drive", (_METHOD, hardware.name, torch.__version__, torch.get_num_threads()))
    try:
        return _shares(memory, 1 if rows < _MANY_ROWS // 16 else _MANY_ROWS, writes=writes, measures=measures)
    except (TransferError, UsageError):
        return None


def _shares(memory: Remembered, count: int, *, writes: bool, measures: bool) -> Contention | None:
    looks: dict[str, Callable[[Path], tuple[float, float]]] = {}
    lanes: dict[tuple[str, str], str] = {}
    for what in (READ, *((WRITE,) if writes else ())):
        for lane, rows in ((COMPUTE, count), *(((UPDATE, 1),) if writes else ())):
            lanes[lane, _LANES[what]] = f"{what} {rows}"
            looks[f"{what} {rows}"] = partial(beside, what, rows)
    if writes:
        lanes[_LANES[READ], _LANES[WRITE]] = "both ways"
        looks["both ways"] = both_ways
    remembered = {name: memory.get(name, count=2, within_s=_GOOD_FOR_S) for name in looks}
    if not measures and None in remembered.values():
        return None
    shares = {
        name: _measured(memory, name, looks[name]) if numbers is None else numbers
        for name, numbers in remembered.items()
    }
    contention = {}
    for (first, second), name in lanes.items():
        contention[first, second], contention[second, first] = shares[name]
    return contention


def _measured(memory: Remembered, name: str, measure: Callable[[Path], tuple[float, float]]) -> list[float]:
    shares = [*measure(drive_folder())]
    memory.keep({name: shares})
    return shares


def beside(direction: str, rows: int, directory: Path) -> tuple[float, float]:
    """Return the shares of their speeds that products of ``rows`` rows and disk transfers have while both run.

    ``direction`` is READ or WRITE; the disk is that of ``directory``. Takes a second. Raises UsageError for a
    directory that does not exist or another ``direction``, TransferError when the disk fails.
    """
    if direction not in (READ, WRITE):
        raise UsageError(f"Cannot measure the disk's direction {direction!r}.", f"Known: {READ} and {WRITE}.")
    weights = [torch.ones(_SIDE, _SIDE) for _ in range(_MATRICES)]
    x = torch.ones(rows, _SIDE)
    shares: list[tuple[float, float]] = []
    with torch.inference_mode(), uncached_file(directory) as file:
        work = _counted(lambda index: F.linear(x, weights[index % _MATRICES]))
        move = _Mover(file, direction)
        work(_ROUND_S)
        for _ in range(_ROUNDS):
            shares.append(_round(work, move))
    return _medians(shares)


def both_ways(directory: Path) -> tuple[float, float]:
    """Return the shares of their speeds that reads and writes of one drive have at once. Raises as ``beside``."""
    shares: list[tuple[float, float]] = []
    with uncached_file(directory) as file:
        movers = _Mover(file, READ), _Mover(file, WRITE)
        for _ in range(_ROUNDS):
            alone = [_moved((mover,))[0] for mover in movers]
            reads, writes = (now / then for now, then in zip(_moved(movers), alone, strict=True))
            shares.append((reads, writes))
    return _medians(shares)


def _medians(shares: Sequence[tuple[float, float]]) -> tuple[float, float]:
    first, second = (min(1.0, max(_LEAST, statistics.median(column))) for column in zip(*shares, strict=True))
    return first, second


def _moved(movers: Sequence[_Mover]) -> list[float]:
    """Return the bytes per second of each while all run."""
    for mover in movers:
        mover.begin()
    time.sleep(_ROUND_S)
    return [mover.end() for mover in movers]


def _round(work: Callable[[float], float], move: _Mover) -> tuple[float, float]:
    """Run a round: each alone, then both. It is short because rates change within seconds."""
    alone = work(_ROUND_S)
    (moved_alone,) = _moved((move,))
    move.begin()
    together = work(_ROUND_S)
    moved = move.end()
    return together / alone, moved / moved_alone


def _counted(work: Callable[[int], object]) -> Callable[[float], float]:
    """Return a function that repeats ``work`` for some seconds and returns its rate per second."""

    def run(seconds: float) -> float:
        count, began_s = 0, time.perf_counter()
        while (now_s := time.perf_counter()) - began_s < seconds or not count:
            work(count)
            count += 1
        return count / (now_s - began_s)

    return run


class _Mover:
    """Transfers chunks in a thread from ``begin`` to ``end``, which returns bytes per second."""

    def __init__(self, file: UncachedFile, direction: str) -> None:
        self._file, self._direction = file, direction
        self._ring = touched_ring()  # large as a run's slots: a small buffer would not compete for memory bandwidth
        self._stop = threading.Event()
        self._bytes, self._failure = 0, ""
        if direction == WRITE and not file.writable:
            raise UsageError(
                "Cannot measure the disk while the CPU computes.", "The directory is not writable.", "Name another."
            )

    def begin(self) -> None:
        self._stop.clear()
        self._bytes, self._began_s = 0, time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="brim-beside", daemon=True)
        threads.start(self._thread)

    def end(self) -> float:
        self._stop.set()
        self._thread.join()
        if self._failure:
            raise TransferError("Cannot measure the disk while the CPU computes.", self._failure)
        return self._bytes / (time.perf_counter() - self._began_s)

    def _run(self) -> None:
        move = os.preadv if self._direction == READ else os.pwritev
        descriptor, offset, at = self._file.descriptor, 0, 0
        try:
            while not self._stop.is_set():
                count = move(descriptor, [self._ring[at : at + RUN_CHUNK_BYTES]], offset)
                self._bytes, at = self._bytes + count, (at + RUN_CHUNK_BYTES) % RING_BYTES
                offset = (offset + count) % (self._file.size_bytes - RUN_CHUNK_BYTES + 1) // MIB * MIB
                if self._direction == READ:
                    drop_cache(self._file)
        except OSError as error:
            self._failure = f"{error}."
