"""A CUDA device that does not compute, and PyTorch's CUDA build on it.

``library`` has the device's C sources; ``build`` makes a library folder of them for one PyTorch, ``environment``
finds or fetches a CUDA build of PyTorch, ``settings`` says which card the device is. A process runs on the device
where ``DeviceSettings.environment(libraries)`` was in its environment when it started; there, ``loaded()`` gives its
counters.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from brim.errors import UnsupportedError

LIBRARY = "libbrimdevice.so"
SOURCES = Path(__file__).parent / "library"


@dataclass(frozen=True)
class Device:
    """The device in this process: its counters and its controls. ``queue.c`` describes the order of work."""

    library: ctypes.CDLL

    def launches(self) -> int:
        """Kernels launched since the last reset."""
        return int(self.library.brim_device_launches())

    def host_launches(self) -> int:
        """Kernels launched outside of graphs, and graphs, since the last reset."""
        return int(self.library.brim_device_host_launches())

    def kernels(self) -> dict[str, int]:
        """Launches by kernel, under the names that the compiler gave them (c++filt reads them)."""
        name, launches, counts = ctypes.c_char_p(), ctypes.c_uint64(), dict[str, int]()
        for i in range(self.library.brim_device_kernels(ctypes.c_size_t(-1), None, None)):
            self.library.brim_device_kernels(i, ctypes.byref(name), ctypes.byref(launches))
            if launches.value and name.value:
                text = name.value.decode()
                counts[text] = counts.get(text, 0) + launches.value
        return counts

    def stubs(self) -> dict[str, int]:
        """Calls of library functions that do nothing here, such as cuBLAS's products."""
        calls = ctypes.c_uint64()
        counts: dict[str, int] = {}
        while name := self.library.brim_device_stub(len(counts), ctypes.byref(calls)):
            counts[name.decode()] = calls.value
        return counts

    def used_bytes(self, device: int = 0) -> int:
        """Bytes in use as nvidia-smi counts them: the process's memory and its context."""
        return int(self.library.brim_device_used_bytes(device))

    def peak_bytes(self, device: int = 0) -> int:
        """The most that was used since the last reset."""
        return int(self.library.brim_device_peak_bytes(device))

    def pageable_copies(self) -> int:
        """Copies so far from or to host memory that is not pinned: on a GPU, the host waits for those."""
        return int(self.library.brim_device_pageable_copies())

    def hazards(self) -> list[str]:
        """The first 64 accesses since the last reset whose order CUDA does not guarantee."""
        texts = (self.library.brim_device_hazard(i) for i in range(self.library.brim_device_hazards()))
        return [text.decode() for text in texts if text]

    def reset(self) -> None:
        """Reset counts, peaks and hazards."""
        self.library.brim_device_reset()

    def begin_kernel(self, stream: int) -> None:
        """Call this before an operator is computed on the host instead of a kernel: the work that ``stream`` (a
        cudaStream_t; 0: the current device's default stream) orders before its next kernel is done now, and no other
        work."""
        self.library.brim_device_begin_kernel(stream)

    def kernel_access(self, stream: int, address: int, size_bytes: int, *, writes: bool, name: str) -> None:
        """After ``begin_kernel``: the operator ``name`` reads or writes these bytes. Another stream's access to them
        that is not ordered before or after is a hazard."""
        self.library.brim_device_kernel_access(stream, address, size_bytes, writes, name.encode())


def loaded() -> Device:
    """The device of this process. Raises UnsupportedError if it has none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UnsupportedError(
            "This process has no rehearsal device.",
            "It was not started on one.",
            "Start it with the environment of DeviceSettings.environment().",
        ) from error
    size, text, number = ctypes.c_size_t, ctypes.c_char_p, ctypes.c_uint64
    signatures: dict[str, tuple[object, list[object]]] = {
        "launches": (number, []),
        "host_launches": (number, []),
        "kernels": (size, [size, ctypes.POINTER(text), ctypes.POINTER(number)]),
        "stub": (text, [size, ctypes.POINTER(number)]),
        "used_bytes": (size, [ctypes.c_int]),
        "peak_bytes": (size, [ctypes.c_int]),
        "pageable_copies": (number, []),
        "hazards": (size, []),
        "hazard": (text, [size]),
        "reset": (None, []),
        "begin_kernel": (None, [ctypes.c_void_p]),
        "kernel_access": (None, [ctypes.c_void_p, ctypes.c_void_p, size, ctypes.c_int, text]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"brim_device_{name}")
        function.restype, function.argtypes = result, arguments
    return Device(library)
