"""Figures of a profile: the seconds that each device computed, copied and waited, and the causes of waiting."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from brim.core import Timeline

CAUSES = ("collective", "copy", "synchronization", "allocation", "data loader", "cpu", "launch", "unknown")
"""Causes of gaps between kernels, in the order in which time is given to them:

* ``collective``: only a collective (NCCL, RCCL) ran, which waits for other devices;
* ``copy``: only a copy or memset ran;
* ``synchronization``: a call that waits for the device kept the host from launching;
* ``allocation``: the host was in ``cudaMalloc``, ``cudaFree`` or the like before it launched the next kernel;
* ``data loader``: the host waited for data (``enumerate(DataLoader)``) before it launched the next kernel;
* ``cpu``: the host did something else (Python, operators, launching) before it launched the next kernel;
* ``launch``: the next kernel was launched already: it was on its way, or the device worked for another process;
* ``unknown``: the launch of the next kernel was not recorded.
"""
SIZES = {"< 4 KiB": 1 << 12, "< 64 KiB": 1 << 16, "< 1 MiB": 1 << 20, "< 16 MiB": 1 << 24, "< 256 MiB": 1 << 28}
LARGEST = ">= 256 MiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A time without a kernel. ``causes``: seconds of each; ``label``: names what it mostly waited for."""

    start_s: float
    duration_s: float
    causes: dict[str, float]
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFigures:
    """Copies of a kind. ``sizes``: their number by size. ``unified``: traffic of managed memory."""

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
    """Figures and Timeline of a device.

    ``wall_s`` runs from the first step or activity to the last. In ``busy_s`` a kernel ran (collectives do not count:
    they wait for others), ``idle_s`` is the rest, by cause in ``idle_by_cause``, the 20 longest gaps in ``gaps``.
    In ``copy_s`` a copy or memset ran, in ``overlap_s`` beside a kernel; in ``collective_s`` a collective.
    ``memory_operations_share``: seconds of copies and memsets over those of all activities, as in the summaries of
    Nsight Systems. ``unified_share_*``: managed memory's share of copies and memsets, by time, bytes and number.
    Nsight Systems records migrations of managed memory, PyTorch's profiler only the program's own copies.
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
        """Return plain values, without the timeline."""
        figures = asdict(replace(self, timeline=Timeline("", measured=True)))
        del figures["timeline"]
        return figures


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Figures of all devices in a file of the ``kind`` "pytorch" or "nsight" with ``events`` records.

    No devices: no GPU did anything. ``facts`` may have ``recorded_s``, ``page_faults_cpu``, ``schema``; ``host`` is
    the Timeline of the host's memory, empty if not recorded.
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
