"""Measure how fast a model's weights are read from their drive, several times, and cache the samples.

The speed of a shared drive varies: on a virtual machine 2.2 and 3.1 GB/s alternated every second or two. A sample
takes a fifth of a second, and a run many seconds; so each planning process adds a sample to those of the last day,
and their mean is used.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.measure.disk import RUN_CHUNK_BYTES, RUN_CONCURRENCY, file_rates
from brim.planning.seconds.measurement_cache import Remembered

_METHOD = 2  # raised when the measurement changes
_ENOUGH = 16  # samples: no more are taken until some are too old
_OLD_S = 24 * 3600.0
_AMPLE = 4  # a budget of so many times the files holds the weights in any dtype, and a usual step
_Look = tuple[float, float, float]  # when (Unix time), and bytes per second of large blocks and of small ones


def reading_from(hardware: Hardware, folder: Path, *, budget_bytes: float = 0) -> Hardware:
    """Return ``hardware`` with the read rates of the weights' files in ``folder``.

    Where ``budget_bytes`` of the compute tier are ample for them nothing is streamed, so nothing is measured.

    A machine's own rates are measured on a new file in the user's cache folder; the weights may be on another drive,
    and older files may be read slower. Measuring takes 128 MiB of RAM for a fifth of a second. Raises TransferError
    where the drive fails.
    """
    files = [path for path in folder.glob("*.safetensors") if path.is_file()] if folder.is_dir() else []
    if not files or _AMPLE * sum(path.stat().st_size for path in files) <= budget_bytes:
        return hardware
    largest = max(files, key=lambda path: path.stat().st_size)
    looks = _looks(hardware, largest)
    if len(looks) < _ENOUGH:
        rates = file_rates(largest)
        if rates is None:
            return hardware
        looks.append((time.time(), *rates))
        _memory(hardware).keep({_name(largest): [number for look in looks for number in look]})
    slow = hardware.link(DISK, RAM)
    # Small blocks are read by a single request at a time, which is slower. With one rate for both, a model cut into
    # single matrices would seem as fast as one cut into layers. Every sample reads the same bytes, so seconds per
    # byte are averaged.
    large, small = (statistics.harmonic_mean(rates) for rates in list(zip(*looks, strict=True))[1:])
    measured = replace(
        slow, bytes_per_s=large, single_bytes_per_s=small, chunk_bytes=RUN_CHUNK_BYTES, concurrency=RUN_CONCURRENCY
    )
    return replace(hardware, links=tuple(measured if link is slow else link for link in hardware.links))


def _looks(hardware: Hardware, file: Path) -> list[_Look]:
    """Return the cached samples, without old ones and those from the future (the clock was changed)."""
    numbers = _memory(hardware).get(_name(file), count=None) or []
    looks = [(at_s, large, small) for at_s, large, small in zip(*[iter(numbers)] * 3, strict=False)]
    return [look for look in looks if 0 <= time.time() - look[0] < _OLD_S and min(look) > 0]


def _memory(hardware: Hardware) -> Remembered:
    return Remembered("file-rates", (_METHOD, hardware.name))


def _name(file: Path) -> str:
    """Return a cache key that changes when the file is rewritten."""
    facts = file.stat()
    return f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}"


__all__ = ["reading_from"]
