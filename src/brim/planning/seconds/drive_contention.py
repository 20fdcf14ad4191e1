"""Measure how lanes of this machine slow each other when it computes in RAM, and cache that for a week."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.errors import TransferError, UsageError
from brim.measure.contention import READ, WRITE, beside, both_ways
from brim.measure.probe import drive_folder, probe
from brim.planning.seconds.measurement_cache import Remembered
from brim.planning.solver.schedule import COMPUTE, UPDATE, Contention, lane_of

_METHOD = 4  # raised when the measurement changes
# Shares change less than rates, and measuring takes seconds.
_GOOD_FOR_S = 7 * 24 * 3600.0
_MANY_ROWS = 256  # larger products are limited by arithmetic as much
_LANES = {READ: lane_of(DISK, RAM), WRITE: lane_of(RAM, DISK)}


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
