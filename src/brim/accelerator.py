"""A common interface over PyTorch's accelerator modules; no other module tells backends apart.

The modules are ``torch.cuda`` (CUDA and ROCm), ``torch.xpu`` (Intel), ``torch.npu`` (Ascend, by torch_npu),
``torch.mps`` (Apple), or a backend registered as PrivateUse1 under a name of its own. A function that a backend lacks
raises UnsupportedError.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brim.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

CUDA = "cuda"
NAMES = {CUDA: "CUDA", "xpu": "Intel XPU", "npu": "Ascend NPU", "mps": "Apple MPS"}

# Functions that a backend may name otherwise than torch.cuda.
_OTHER_NAMES = {"memory_allocated": "current_allocated_memory", "memory_reserved": "driver_allocated_memory"}


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A backend's module (``torch.cuda``, ``torch.xpu``) and the device that tensors are put on.

    Methods without an ``index`` use the backend's current device.
    """

    type: str
    module: Any
    device: torch.device

    @property
    def name(self) -> str:
        """The driver's name of the device, else the backend's name."""
        if hasattr(self.module, "get_device_name"):
            return str(self.module.get_device_name())
        return NAMES.get(self.type, self.type)

    @property
    def index(self) -> int:
        """The number of ``device``, else of the current device."""
        return int(self._call("current_device")) if self.device.index is None else self.device.index

    def count(self) -> int:
        """Return the number of devices of this kind."""
        return int(self._call("device_count"))

    @property
    def has_streams(self) -> bool:
        """True if the backend has streams and events. MPS has one queue."""
        return all(hasattr(self.module, word) for word in ("Stream", "Event", "stream"))

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total bytes of the current device."""
        if hasattr(self.module, "mem_get_info"):
            free, total = self.module.mem_get_info()
            if self.shares_ram():  # the driver counts the page cache as used, which the system gives back
                import psutil  # only such devices need it

                free = max(free, min(psutil.virtual_memory().available, total))
            return int(free), int(total)
        if hasattr(self.module, "recommended_max_memory"):  # MPS: part of the RAM that processor and GPU share
            total = int(self.module.recommended_max_memory())
            return max(0, total - self.reserved_bytes()), total
        raise self._lacks("mem_get_info")

    def shares_ram(self) -> bool:
        """Return whether a CUDA or ROCm device computes in the host's RAM: GB10, Jetson, APUs."""
        properties = self.module.get_device_properties(self.index) if self.type == CUDA else None
        return bool(getattr(properties, "is_integrated", False))

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors take now."""
        return int(self._call("memory_allocated"))

    def reserved_bytes(self) -> int:
        """Return the bytes of the allocator's segments."""
        return int(self._call("memory_reserved"))

    def peak_reserved_bytes(self, index: int) -> int:
        """Return the peak of reserved bytes on a device since ``reset_peaks``."""
        return int(self._call("max_memory_reserved", index))

    def reset_peaks(self, index: int) -> None:
        self._call("reset_peak_memory_stats", index)

    def counts_memory(self) -> bool:
        """True if PyTorch's own allocator serves the tensors. RMM's has neither statistics nor a limit."""
        return self.type != CUDA or self.module.memory.get_allocator_backend() != "pluggable"

    def memory_fraction(self) -> float:
        """Return the share of the device that PyTorch's allocator may take; 1 without a limit."""
        limited = self.counts_memory() and hasattr(self.module, "get_per_process_memory_fraction")
        return float(self.module.get_per_process_memory_fraction()) if limited else 1.0

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        """Limit the segments of PyTorch's allocator to ``limit_bytes`` within the block.

        At the limit the allocator releases its cache, then raises its out-of-memory error. Backends without such a
        limit ignore this.
        """
        words = ("get_per_process_memory_fraction", "set_per_process_memory_fraction")
        if not (self.counts_memory() and all(hasattr(self.module, word) for word in words)):
            yield
            return
        limit = self.module.set_per_process_memory_fraction
        with self.current():
            before = self.memory_fraction()
            limit(min(before, (limit_bytes + 0.5) / self.memory_bytes()[1]))  # the allocator rounds down
        try:
            yield
        finally:
            with self.current():
                limit(before)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        with self.current():
            self._call("synchronize")

    def empty_cache(self) -> None:
        """Release the cached memory of PyTorch's allocator."""
        with self.current():
            self._call("empty_cache")

    def current(self) -> AbstractContextManager[Any]:
        """Make ``device`` this thread's current device within the block; does nothing if it has no number."""
        if self.device.index is None:
            return contextlib.nullcontext()
        return self._call("device", self.device)  # type: ignore[no-any-return]

    def new_stream(self) -> Any:
        """Return a new stream. Raises UnsupportedError if the backend has one queue only (MPS)."""
        return self._call("Stream", self.device)

    def current_stream(self) -> Any:
        return self._call("current_stream", self.device)

    def in_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Put the device's work into ``stream`` within the block."""
        return self._call("stream", stream)  # type: ignore[no-any-return]

    def new_event(self, *, timed: bool = False) -> Any:
        """Return a new event; ``timed`` lets ``elapsed_time`` read it."""
        if timed:
            return self._call("Event", enable_timing=True)
        # By default CUDA lets a thread that waits for a copy spin on a core that compute may want.
        return self._call("Event", blocking=True) if self.type == CUDA else self._call("Event")

    def random_states(self) -> list[torch.Tensor]:
        """Return the state of each device's random generator."""
        if hasattr(self.module, "get_rng_state_all"):
            return list(self.module.get_rng_state_all())
        return [self._call("get_rng_state")]

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Restore the states that ``random_states`` returned; states of absent devices are ignored."""
        for index, state in enumerate(states[: self.count()]):
            self._call("set_rng_state", state, index)

    def _call(self, function: str, *arguments: Any, **named: Any) -> Any:
        for name in (function, _OTHER_NAMES.get(function, function)):
            if hasattr(self.module, name):
                return getattr(self.module, name)(*arguments, **named)
        raise self._lacks(function)

    def _lacks(self, function: str) -> UnsupportedError:
        return UnsupportedError(
            f"Cannot use {NAMES.get(self.type, self.type)}.",
            f"PyTorch's module for it has no {function} here.",
            "Use device cpu, or a newer build of the backend.",
        )


def available(kind: str | None = None) -> Accelerator | None:
    """Return the accelerator of type ``kind``, None if torch finds none. ``kind`` None: CUDA if present, else any."""
    import torch

    if kind in (None, CUDA) and torch.cuda.is_available():
        return Accelerator(type=CUDA, module=torch.cuda, device=torch.device(CUDA))
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == CUDA or kind not in (None, device.type):
        return None
    return Accelerator(type=device.type, module=torch.get_device_module(device), device=torch.device(device.type))


def of(device: torch.device) -> Accelerator:
    """Return the accelerator of ``device``."""
    import torch

    return Accelerator(type=device.type, module=torch.get_device_module(device), device=device)


def initialized() -> list[Accelerator]:
    """Return the accelerators that this process has initialized. Imports no torch and starts no device."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    modules: list[tuple[str, Any]] = [(kind, getattr(torch, kind, None)) for kind in kinds()]
    return [
        Accelerator(type=kind, module=module, device=torch.device(kind))
        for kind, module in modules
        if hasattr(module, "is_initialized") and module.is_initialized()
    ]


def in_use() -> list[tuple[Accelerator, int]]:
    """Return each device of the initialized accelerators that count peaks (MPS does not)."""
    counted = [accelerator for accelerator in initialized() if hasattr(accelerator.module, "max_memory_reserved")]
    return [(accelerator, index) for accelerator in counted for index in range(accelerator.count())]


def is_capturing() -> bool:
    """True if this thread's current stream captures a CUDA graph."""
    return any(
        accelerator.module.is_current_stream_capturing()
        for accelerator in initialized()
        if hasattr(accelerator.module, "is_current_stream_capturing")
    )


def random_states() -> dict[str, list[torch.Tensor]]:
    """Return the states of the initialized accelerators' random generators, by kind."""
    return {accelerator.type: accelerator.random_states() for accelerator in initialized()}


def set_random_states(states: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Restore the states that ``random_states`` returned, of the accelerators present."""
    for kind, generator_states in states.items():
        accelerator = available(kind)
        if accelerator is not None and generator_states:
            accelerator.set_random_states(generator_states)


def kinds() -> tuple[str, ...]:
    """Return the types of accelerators that this build of torch names."""
    import torch

    own = torch._C._get_privateuse1_backend_name()
    return tuple(NAMES) if own in ("privateuseone", *NAMES) else (*NAMES, own)


def pci_address(device: torch.device) -> str | None:
    """Return a CUDA device's PCI address as Linux writes it (``"0000:3b:00.0"``); None if unknown."""
    import torch

    if device.type != CUDA:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # an older PyTorch
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def page_lock(address: int, bytes: int) -> int:
    """Lock pages of RAM for the current CUDA device (``cudaHostRegister``). Return 0 or CUDA's error."""
    import torch

    error = int(torch.cuda.cudart().cudaHostRegister(address, bytes, 0))
    if error:
        # Clears the error, which PyTorch would otherwise raise at the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=CUDA)
    return error


def page_unlock(address: int) -> None:
    """Undo ``page_lock``. Copies from and to these pages must have ended."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)
