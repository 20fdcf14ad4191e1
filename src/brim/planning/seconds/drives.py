"""Measure how fast a model's weights are read from their drive, and cache that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.measure.disk import RUN_CHUNK_BYTES, RUN_CONCURRENCY, file_rates
from brim.planning.seconds.measurement_cache import Remembered

_METHOD = 3  # raised when the measurement changes
_GOOD_FOR_S = 24 * 3600.0


def reading_from(hardware: Hardware, folder: Path) -> Hardware:
    """Return ``hardware`` with the read rates of the weights' files in ``folder``, measured once a day.

    A machine's own rates are measured on a new file in the user's cache folder; the weights may be on another drive,
    and older files may be read slower. Measuring takes 128 MiB of RAM for a fifth of a second. Raises TransferError
    where the drive fails.
    """
    files = [path for path in folder.glob("*.safetensors") if path.is_file()] if folder.is_dir() else []
    if not files:
        return hardware
    largest = max(files, key=lambda path: path.stat().st_size)
    memory, name = Remembered("file-rates", (_METHOD, hardware.name)), _name(largest)
    rates = memory.get(name, count=2, within_s=_GOOD_FOR_S)
    if rates is None:
        rates = [*(file_rates(largest) or ())]
        if not rates:
            return hardware
        memory.keep({name: rates})
    slow = hardware.link(DISK, RAM)
    # Small blocks are read by a single request at a time, which is slower. With one rate for both, a model cut into
    # single matrices would seem as fast as one cut into layers.
    measured = replace(
        slow,
        bytes_per_s=rates[0],
        single_bytes_per_s=rates[1],
        chunk_bytes=RUN_CHUNK_BYTES,
        concurrency=RUN_CONCURRENCY,
    )
    return replace(hardware, links=tuple(measured if link is slow else link for link in hardware.links))


def _name(file: Path) -> str:
    """Return a cache key that changes when the file is rewritten."""
    facts = file.stat()
    return f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}"
