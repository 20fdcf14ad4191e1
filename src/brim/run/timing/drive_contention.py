"""What lanes of this machine take from each other when it computes in RAM: measured, and remembered for a week."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.errors import TransferError, UsageError
from brim.measure.contention import READ, WRITE, beside, both_ways
from brim.measure.probe import drive_folder, probe
from brim.planner.schedule import COMPUTE, UPDATE, Contention, way
from brim.run.timing.measurement_cache import Remembered

_METHOD = 4  # raised when what is measured, or how, changes
# Shares change less than the rates that they are of, and looking takes seconds.
_GOOD_FOR_S = 7 * 24 * 3600.0
_MANY_ROWS = 256  # a product of more is limited by arithmetic as much
_LANES = {READ: way(DISK, RAM), WRITE: way(RAM, DISK)}


def beside_drive(hardware: Hardware, rows: int, *, writes: bool) -> Contention | None:
    """The shares of their speeds that computing and the drive keep beside each other.

    None for another machine, and where the drive cannot be measured now, as a disk that is full cannot be written.
    ``rows`` are those of a product: one in a token's pass, many in a training. With ``writes``, those of updates too,
    which wait for memory as a product of one row does. The first time it takes some seconds for each.
    """
    if hardware.compute != RAM or (hardware.name, RAM) != ((here := probe(device="cpu")).name, here.compute):
        return None
    memory = Remembered("beside-drive", (_METHOD, hardware.name, torch.__version__, torch.get_num_threads()))
    try:
        return _shares(memory, 1 if rows < _MANY_ROWS // 16 else _MANY_ROWS, writes=writes)
    except (TransferError, UsageError):
        return None


def _shares(memory: Remembered, count: int, *, writes: bool) -> Contention:
    found: dict[tuple[str, str], float] = {}
    for what in (READ, *((WRITE,) if writes else ())):
        shares = _known(memory, f"{what} {count}", partial(beside, what, count))
        found[COMPUTE, _LANES[what]], found[_LANES[what], COMPUTE] = shares
        if writes:
            shares = _known(memory, f"{what} 1", partial(beside, what, 1))
            found[UPDATE, _LANES[what]], found[_LANES[what], UPDATE] = shares
    if writes:
        shares = _known(memory, "both ways", both_ways)
        found[_LANES[READ], _LANES[WRITE]], found[_LANES[WRITE], _LANES[READ]] = shares
    return found


def _known(memory: Remembered, name: str, measure: Callable[[Path], tuple[float, float]]) -> tuple[float, float]:
    known = memory.get(name, within_s=_GOOD_FOR_S)
    if known is None:
        known = list(measure(drive_folder()))
        memory.keep({name: known})
    return known[0], known[1]
