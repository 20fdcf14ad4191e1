"""What a profile says, as plain figures: how long each device computed, waited and copied, and for what."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from brim.core import Timeline

CAUSES = ("collective", "copy", "synchronization", "allocation", "data loader", "cpu", "launch", "unknown")
"""Why nothing computed, in the order in which time is given to them:

* ``collective``: only a collective (NCCL, RCCL) ran, which waits for other devices;
* ``copy``: only a copy or memset ran;
* ``synchronization``: the host was kept from launching by a call that waits for the device;
* ``allocation``: it was in ``cudaMalloc``, ``cudaFree`` or the like, before it launched what came next;
* ``data loader``: it waited for data (``enumerate(DataLoader)``) before it launched what came next;
* ``cpu``: it did something else (Python, operators, launching) before it launched what came next;
* ``launch``: what came next was launched already: the device was on its way to it, or was another process's;
* ``unknown``: who launched what came next was not recorded.
"""
SIZES = {"< 4 KiB": 1 << 12, "< 64 KiB": 1 << 16, "< 1 MiB": 1 << 20, "< 16 MiB": 1 << 24, "< 256 MiB": 1 << 28}
LARGEST = ">= 256 MiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A time in which nothing computed. ``causes``: seconds of each; ``label``: what was waited for, mostly."""

    start_s: float
    duration_s: float
    causes: dict[str, float]
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFigures:
    """Copies of one kind. ``sizes``: how many of each size. ``unified``: traffic of managed memory."""

    kind: str
    unified: bool
    count: int
    bytes: int
    seconds: float
    sizes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFigures:
    name: str
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One device.

    ``wall_s`` runs from the first step or activity to the last; ``busy_s`` something computed (collectives are not
    counted: they wait for others); ``idle_s`` the rest, by cause in ``idle_by_cause``, the 20 longest in ``gaps``.
    ``copy_s`` a copy or memset ran, ``overlap_s`` while something computed; ``collective_s`` a collective ran.
    ``memory_operations_share``: seconds of copies and memsets over the seconds of all that the device did, as the
    summaries of Nsight Systems count. ``unified_share_*``: managed memory's part of the copies and memsets, by their
    time, bytes and number. Nsight Systems records migrations of managed memory; PyTorch's profiler only the copies
    that a program asks for.
    """

    device: int
    name: str
    wall_s: float
    busy_s: float
    idle_s: float
    copy_s: float
    overlap_s: float
    collective_s: float
    idle_by_cause: dict[str, float]
    gaps: tuple[Gap, ...]
    copies: tuple[CopyFigures, ...]
    kernels: tuple[KernelFigures, ...]
    memory_operations_share: float
    unified_share_time: float
    unified_share_bytes: float
    unified_share_count: float
    migrations: dict[str, Migration]
    page_faults: int
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the timeline."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "timeline"]
        return {name: _plain(getattr(self, name)) for name in names}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """``kind`` is "pytorch" or "nsight"; ``events`` how many records the file holds; no device: nothing ran on one.

    ``facts`` may have ``recorded_s``, ``page_faults_cpu``, ``schema``; ``host`` is what memory did on the host where
    the profiler recorded it, empty otherwise.
    """

    source: str
    kind: str
    devices: tuple[DeviceProfile, ...]
    host: Timeline
    facts: dict[str, float | str]
    events: int

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "source": self.source,
            "events": self.events,
            "facts": dict(self.facts),
            "devices": [device.to_json() for device in self.devices],
        }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
