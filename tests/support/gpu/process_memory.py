"""The bytes of a GPU that a process uses, as NVIDIA's driver counts them."""

from __future__ import annotations

import ctypes
import os

from brim.measure.nvml import _nvml


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h, for the _v3 calls."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
_ROOM = 1024  # processes on one device


def process_bytes(uuid: str) -> int | None:
    """Return the bytes of the device ``uuid`` ("GPU-...") that this process uses, context and libraries included.

    None without an NVIDIA driver, or in a container that hides process ids.
    """
    library = _nvml()
    device = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
        return None
    rows = (_ProcessInfo * _ROOM)()
    count = ctypes.c_uint(_ROOM)
    try:
        status = library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), rows)
    except AttributeError:  # a driver from before 2021
        return None
    if status:
        return None
    mine = [row.used_bytes for row in rows[: count.value] if row.pid == os.getpid()]
    return mine[0] if mine and mine[0] != _NOT_AVAILABLE else None
