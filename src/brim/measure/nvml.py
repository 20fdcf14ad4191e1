"""The little that brim asks of NVIDIA's management library, without a dependency on its Python package."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h, as the _v3 calls fill it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE: some drivers do not tell
_ROOM = 1024  # processes on one device


def driver_version() -> str:
    """The version of the NVIDIA driver, or "" without a driver."""
    library = _nvml()
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
        return ""
    return text.value.decode()


def process_bytes(uuid: str) -> int | None:
    """Bytes of the device ``uuid`` ("GPU-...") that this process uses, context and libraries included.

    None where the driver does not tell: no NVIDIA driver, or a container that hides process ids.
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


def busy_share(uuid: str) -> float | None:
    """Of the driver's last sample period (a sixth of a second to a second), the share in which the device ``uuid``
    ran a kernel of anybody's. None where the driver does not tell."""
    library = _nvml()
    device, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory; per cent
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
        return None
    return None if library.nvmlDeviceGetUtilizationRates(device, rates) else rates[0] / 100


def _nvml() -> ctypes.CDLL | None:
    """The library, initialized, or None on a machine without it."""
    return _of_process(os.getpid())


@cache
def _of_process(process: int) -> ctypes.CDLL | None:
    """Set up once: the driver takes milliseconds for it, and a step asks twice. A fork sets up its own."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
