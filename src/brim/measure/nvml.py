"""Two calls of NVIDIA's management library, without its Python package."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or "" without a driver."""
    library = _nvml()
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
        return ""
    return text.value.decode()


def busy_share(uuid: str) -> float | None:
    """Return the share of the driver's last sample period (1/6 to 1 s) in which any process ran a kernel on ``uuid``.

    None if the driver does not report it.
    """
    library = _nvml()
    device, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory; per cent
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
        return None
    return None if library.nvmlDeviceGetUtilizationRates(device, rates) else rates[0] / 100


def _nvml() -> ctypes.CDLL | None:
    """Return the initialized library, or None on a machine without it."""
    return _of_process(os.getpid())


@cache
def _of_process(process: int) -> ctypes.CDLL | None:
    """Initialize once per process, as it takes milliseconds and a step needs it twice."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
