"""Host memory on the NUMA node that a GPU hangs on: copies that cross to another node share the link between them.

Linux gives a page to the node of the thread that touches it first, as long as there is room (its
Documentation/admin-guide/mm/numa_memory_policy.rst, "local allocation").
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = Path("/sys")


@contextlib.contextmanager
def near(pci_address: str | None, system: Path = _SYSTEM) -> Iterator[None]:
    """Within, this thread runs on processors of the node of the device at ``pci_address`` (``"0000:3b:00.0"``).

    Nothing changes where that is not known, where there is one node, or where none of its processors is allowed.
    """
    before = _allowed()
    beside = set() if pci_address is None else before & processors_near(pci_address, system)
    if not beside or beside == before:
        yield
        return
    os.sched_setaffinity(0, beside)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processors_near(pci_address: str, system: Path = _SYSTEM) -> set[int]:
    """The numbers of the processors of a device's node; none where the system does not tell."""
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
        return {number for part in listed.strip().split(",") if part for number in _numbers(part)}
    except (OSError, ValueError):
        return set()


def _numbers(part: str) -> range:
    """``"4"``, or ``"0-3"``."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
