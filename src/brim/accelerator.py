"""The accelerators that PyTorch knows, each by torch's module for it. The one place that tells them apart.

What every backend has a word for is asked in that word: ``torch.cuda`` (CUDA, and ROCm, which takes its name),
``torch.xpu`` (Intel), ``torch.npu`` (Ascend, by torch_npu), ``torch.mps`` (Apple), or a backend that is registered as
PrivateUse1 under a name of its own. What a backend lacks is refused, by one error that names it.
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

# Where a backend has another name for it than torch.cuda.
_OTHER_NAMES = {"memory_allocated": "current_allocated_memory", "memory_reserved": "driver_allocated_memory"}


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of device. ``module`` is torch's for it (``torch.cuda``, ``torch.xpu``), ``device`` where tensors go.

    Its current device is meant wherever no ``index`` is given.
    """

    type: str
    module: Any
    device: torch.device

    @property
    def name(self) -> str:
        """What its driver calls it, or its kind where the backend does not tell."""
        told = hasattr(self.module, "get_device_name")
        return str(self.module.get_device_name()) if told else NAMES.get(self.type, self.type)

    @property
    def index(self) -> int:
        """The number of its ``device``; of the current one where that has none."""
        return int(self._ask("current_device")) if self.device.index is None else self.device.index

    def count(self) -> int:
        """How many devices of this kind there are."""
        return int(self._ask("device_count"))

    @property
    def has_streams(self) -> bool:
        """Whether copies can be put in streams of their own and be timed by events. MPS has one queue."""
        return all(hasattr(self.module, word) for word in ("Stream", "Event", "stream"))

    def memory_bytes(self) -> tuple[int, int]:
        """What the driver says is free, and all that there is."""
        if hasattr(self.module, "mem_get_info"):
            free, total = self.module.mem_get_info()
            return int(free), int(total)
        if hasattr(self.module, "recommended_max_memory"):  # MPS: of the RAM that processor and GPU share
            total = int(self.module.recommended_max_memory())
            return max(0, total - self.reserved_bytes()), total
        raise self._lacks("mem_get_info")

    def allocated_bytes(self) -> int:
        """What tensors take now."""
        return int(self._ask("memory_allocated"))

    def reserved_bytes(self) -> int:
        """What PyTorch's allocator holds for them."""
        return int(self._ask("memory_reserved"))

    def peak_bytes(self, index: int) -> tuple[int, int]:
        """The most that was allocated and reserved on a device since ``reset_peaks``."""
        return int(self._ask("max_memory_allocated", index)), int(self._ask("max_memory_reserved", index))

    def reset_peaks(self, index: int) -> None:
        self._ask("reset_peak_memory_stats", index)

    def counts_memory(self) -> bool:
        """Whether PyTorch's own allocator serves its tensors: another (RMM's) has neither statistics nor a limit."""
        return self.type != CUDA or self.module.memory.get_allocator_backend() != "pluggable"

    def memory_fraction(self) -> float:
        """How much of the device the program lets PyTorch's allocator have; 1 where nothing limits it."""
        limited = self.counts_memory() and hasattr(self.module, "get_per_process_memory_fraction")
        return float(self.module.get_per_process_memory_fraction()) if limited else 1.0

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        """Within, PyTorch's allocator takes no more of the device for its segments.

        It first gives back what no tensor needs, then says that memory ran out. Nothing where the backend has no such
        limit.
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
        """Wait until all that it was given to do is done."""
        with self.current():
            self._ask("synchronize")

    def empty_cache(self) -> None:
        """Give back what PyTorch's allocator holds and no tensor needs."""
        with self.current():
            self._ask("empty_cache")

    def current(self) -> AbstractContextManager[Any]:
        """Within, ``device`` is this thread's current one. Nothing where it has no number."""
        if self.device.index is None:
            return contextlib.nullcontext()
        return self._ask("device", self.device)  # type: ignore[no-any-return]

    def new_stream(self) -> Any:
        """A queue of work beside others. Raises UnsupportedError where the backend has one queue only (MPS)."""
        return self._ask("Stream", self.device)

    def current_stream(self) -> Any:
        return self._ask("current_stream", self.device)

    def in_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Within, what is asked of the device goes to ``stream``."""
        return self._ask("stream", stream)  # type: ignore[no-any-return]

    def new_event(self, *, timed: bool = False) -> Any:
        """A mark that a stream can record, and others and the host can wait for. ``timed``: it tells when it was."""
        if timed:
            return self._ask("Event", enable_timing=True)
        # Threads wait for copies of milliseconds: CUDA lets them spin on a core that compute may want, unless told.
        return self._ask("Event", blocking=True) if self.type == CUDA else self._ask("Event")

    def random_states(self) -> list[torch.Tensor]:
        """Of the generator of each device; of the only one where the backend has one."""
        if hasattr(self.module, "get_rng_state_all"):
            return list(self.module.get_rng_state_all())
        return [self._ask("get_rng_state")]

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """What ``random_states`` gave; of the devices that are there."""
        for index, state in enumerate(states[: self.count()]):
            self._ask("set_rng_state", state, index)

    def _ask(self, word: str, *arguments: Any, **named: Any) -> Any:
        for name in (word, _OTHER_NAMES.get(word, word)):
            if hasattr(self.module, name):
                return getattr(self.module, name)(*arguments, **named)
        raise self._lacks(word)

    def _lacks(self, word: str) -> UnsupportedError:
        return UnsupportedError(
            f"Cannot use {NAMES.get(self.type, self.type)}.",
            f"PyTorch's module for it has no {word} here.",
            "Use device cpu, or a newer build of the backend.",
        )


def available(kind: str | None = None) -> Accelerator | None:
    """The accelerator of type ``kind`` that torch sees here. ``kind`` None: CUDA, else what torch says is there."""
    import torch

    if kind in (None, CUDA) and torch.cuda.is_available():
        return Accelerator(type=CUDA, module=torch.cuda, device=torch.device(CUDA))
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == CUDA or kind not in (None, device.type):
        return None
    return Accelerator(type=device.type, module=torch.get_device_module(device), device=torch.device(device.type))


def of(device: torch.device) -> Accelerator:
    """The accelerator whose ``device`` that is."""
    import torch

    return Accelerator(type=device.type, module=torch.get_device_module(device), device=device)


def begun() -> list[Accelerator]:
    """The accelerators that this process has begun to use. Imports no torch and starts no device."""
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
    """Each device of the accelerators in ``begun``, of those that keep peaks, as MPS does not."""
    counted = [accelerator for accelerator in begun() if hasattr(accelerator.module, "max_memory_reserved")]
    return [(accelerator, index) for accelerator in counted for index in range(accelerator.count())]


def is_capturing() -> bool:
    """Whether this thread records a graph of a device's work (CUDA graphs), to be replayed without its Python."""
    asked = [
        accelerator.module for accelerator in begun() if hasattr(accelerator.module, "is_current_stream_capturing")
    ]
    return any(module.is_current_stream_capturing() for module in asked)


def random_states() -> dict[str, list[torch.Tensor]]:
    """Of the generators of the accelerators in ``begun``, by kind."""
    return {accelerator.type: accelerator.random_states() for accelerator in begun()}


def set_random_states(states: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Go on where ``random_states`` was taken, of the accelerators that are here."""
    for kind, generator_states in states.items():
        accelerator = available(kind)
        if accelerator is not None and generator_states:
            accelerator.set_random_states(generator_states)


def kinds() -> tuple[str, ...]:
    """The types of accelerators that this build of torch has a word for."""
    import torch

    own = torch._C._get_privateuse1_backend_name()
    return tuple(NAMES) if own in ("privateuseone", *NAMES) else (*NAMES, own)


def pci_address(device: torch.device) -> str | None:
    """Where a CUDA device hangs on the bus, as Linux writes it (``"0000:3b:00.0"``); None: not known."""
    import torch

    if device.type != CUDA:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # an older PyTorch's
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def page_lock(address: int, bytes: int) -> int:
    """Lock pages of RAM for the current CUDA device (``cudaHostRegister``). Gives 0, or CUDA's error."""
    import torch

    error = int(torch.cuda.cudart().cudaHostRegister(address, bytes, 0))
    if error:
        # Or the next kernel, whosever it is, would be said to have failed.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=CUDA)
    return error


def page_unlock(address: int) -> None:
    """Undo ``page_lock``. Code that copies from there or to it must have ended."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)
