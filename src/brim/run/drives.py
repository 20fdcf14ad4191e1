"""How fast a model's weights come from the drive that they lie on: measured for each file once a day."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.measure.disk import file_rate
from brim.run.remembered import Remembered

_METHOD = 1  # raised when what is measured, or how, changes
# A drive fills up, wears, and has others who read from it; and one look at it may have been in a bad moment.
_GOOD_FOR_S = 24 * 3600.0


def reading_from(hardware: Hardware, folder: Path) -> Hardware:
    """``hardware`` as a run sees it that reads its weights out of ``folder``.

    A machine is measured by a file that was written for it, in the user's cache folder; the weights may lie on
    another drive, and what has rested there for long may come slower. Measuring takes 128 MiB of RAM for half a
    second, once a day. Raises TransferError where the drive fails.
    """
    files = [path for path in folder.glob("*.safetensors") if path.is_file()] if folder.is_dir() else []
    if not files:
        return hardware
    largest = max(files, key=lambda path: path.stat().st_size)
    known = _memory(hardware).get(_name(largest), within_s=_GOOD_FOR_S)
    rate = known[0] if known else file_rate(largest)
    if rate is None:
        return hardware
    if not known:
        remember(hardware, largest, rate)
    slow = hardware.link(DISK, RAM)
    made = replace(slow, bytes_per_s=rate, single_bytes_per_s=min(slow.single_bytes_per_s, rate))
    return replace(hardware, links=tuple(made if link is slow else link for link in hardware.links))


def remember(hardware: Hardware, file: Path, bytes_per_s: float) -> None:
    """Let ``file`` be known to come so fast."""
    _memory(hardware).keep({_name(file): [bytes_per_s]})


def _memory(hardware: Hardware) -> Remembered:
    return Remembered("file-rates", (_METHOD, hardware.name))


def _name(file: Path) -> str:
    """Another one where the file is written anew."""
    facts = file.stat()
    return f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}"


__all__ = ["reading_from", "remember"]
