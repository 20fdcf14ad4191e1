"""Emulate ``torch.cuda`` and ``torch.accelerator`` of a machine with one GPU, for programs that run or are traced
without one."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import DefaultDeviceType

from brim.core.trace import EMPTY_CACHE, FIRST_GRAPH_POOL
from brim.predict import failures
from brim.predict.dispatch import RecordingMode

_VRAM_BYTES = 1 << 40
_SILENT = (
    "set_device", "synchronize", "ipc_collect", "init", "_lazy_init", "manual_seed", "manual_seed_all", "seed",
    "seed_all", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_accumulated_memory_stats", "set_rng_state", "set_rng_state_all", "set_per_process_memory_fraction",
    "set_stream",
)  # fmt: skip
_TYPED = {
    "FloatTensor": torch.FloatTensor, "DoubleTensor": torch.DoubleTensor, "HalfTensor": torch.HalfTensor,
    "BFloat16Tensor": torch.BFloat16Tensor, "LongTensor": torch.LongTensor, "IntTensor": torch.IntTensor,
    "ByteTensor": torch.ByteTensor, "BoolTensor": torch.BoolTensor,
}  # fmt: skip


@contextmanager
def in_place(cuda: Mapping[str, Any]) -> Iterator[None]:
    """While open, ``torch.cuda`` has the entries of ``cuda``, by name, and ``torch.accelerator`` answers alike.

    PyTorch uses ``torch.accelerator`` inside of optimizers and data loaders. A CUDA build's accelerator is CUDA, GPU
    or not, so it would call a missing driver there.
    """
    with contextlib.ExitStack() as stack:
        accelerator = _accelerator(cuda)
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for module in (torch.cuda.random, torch.cuda.memory):  # some programs use these modules' names
            for name in cuda.keys() & set(module.__all__):
                stack.enter_context(mock.patch.object(module, name, cuda[name]))
        for module in (torch.accelerator, getattr(torch.accelerator, "random", torch.accelerator)):
            for name in accelerator.keys() & vars(module).keys():  # PyTorch 2.11 has fewer of them than 2.14
                stack.enter_context(mock.patch.object(module, name, accelerator[name]))
        # Checkpointing reads the accelerator once per process and caches it.
        stack.enter_context(mock.patch.object(DefaultDeviceType, "_default_device_type", None))
        yield


def _accelerator(cuda: Mapping[str, Any]) -> dict[str, Any]:
    """Return replacements for functions of ``torch.accelerator``, by name."""
    alike = (
        "is_available", "device_count", "current_stream", "set_stream", "synchronize", "empty_cache", "memory_stats",
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "reset_accumulated_memory_stats", "reset_peak_memory_stats", "get_rng_state", "get_rng_state_all",
        "initial_seed",
    )  # fmt: skip
    return {
        **{name: _calling(cuda[name]) for name in alike},
        **{name: _calling(cuda["set_device"]) for name in ("set_device_index", "set_device_idx")},
        **{name: _calling(cuda["current_device"]) for name in ("current_device_index", "current_device_idx")},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_index": cuda["device"],
        "empty_host_cache": _nothing,
        "get_memory_info": cuda["mem_get_info"],
        "Graph": NoGraph,
    }


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a distinct function that does the same: Dynamo has a rule for every function object of PyTorch."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def torch_cuda(recording: RecordingMode, capability: tuple[int, int]) -> dict[str, Any]:
    """Return replacements for functions of ``torch.cuda``, by name."""
    return {
        **dict.fromkeys(_SILENT, _nothing),
        **_memory(recording),
        **_device(recording, capability),
        **{name: _typed(legacy) for name, legacy in _TYPED.items()},
        **streams(),
        **_graphs(recording),
        "make_graphed_callables": NoGraph,
        "device_of": Device,
    }


def streams() -> dict[str, Any]:
    """Streams, events and the current device of a single device, without effect."""
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *args: Stream(),
        "default_stream": lambda *args: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": Device,
    }


def _memory(recording: RecordingMode) -> dict[str, Any]:
    def used(*args: Any, **kwargs: Any) -> int:
        return sum(life.bytes for life in recording.lives() if life.on_device)

    def stats(*args: Any, **kwargs: Any) -> dict[str, int]:
        return defaultdict(int, {"allocated_bytes.all.current": used(), "allocated_bytes.all.peak": used()})

    numbers = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
               "memory_cached", "max_memory_cached")  # fmt: skip
    return {
        **dict.fromkeys(numbers, used),
        "memory_stats": stats,
        "memory_summary": lambda *args, **kwargs: f"{used():,} bytes allocated",
        "mem_get_info": lambda *args: (_VRAM_BYTES, _VRAM_BYTES),
        "empty_cache": lambda: recording.note_op(EMPTY_CACHE),
    }


def _graphs(recording: RecordingMode) -> dict[str, Any]:
    """CUDA graphs: a capture is traced as it runs. Its memory is allocated on a stream of its own, which stands for
    the graph's pool: it serves nothing else and is kept. Replaying allocates nothing."""
    recorder, numbers = recording.recorder, itertools.count(FIRST_GRAPH_POOL)
    before: list[Callable[[], int]] = []  # the stream that is current outside of the capture

    def new_pool() -> tuple[int, int]:
        return 0, next(numbers)

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._pool: tuple[int, int] | None = None

        def capture_begin(self, pool: tuple[int, int] | None = None, *others: Any, **options: Any) -> None:
            self._pool = pool or new_pool()
            number = self._pool[1]
            before.append(recorder.stream)
            recorder.stream = lambda: number

        def capture_end(self) -> None:
            recorder.stream = before.pop()

        def pool(self) -> tuple[int, int] | None:
            return self._pool

        instantiate = replay = reset = enable_debug_mode = debug_dump = _nothing

    @contextmanager
    def graph(
        cuda_graph: CUDAGraph,
        pool: tuple[int, int] | None = None,
        *others: Any,
        **options: Any,
    ) -> Iterator[None]:
        recording.note_op(EMPTY_CACHE)
        cuda_graph.capture_begin(pool)
        try:
            yield
        finally:
            cuda_graph.capture_end()

    return {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": new_pool,
        "is_current_stream_capturing": lambda: bool(before),
    }


def _device(recording: RecordingMode, capability: tuple[int, int]) -> dict[str, Any]:
    major, minor = capability
    properties = SimpleNamespace(
        name="GPU", major=major, minor=minor, total_memory=_VRAM_BYTES, multi_processor_count=128
    )

    def rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        with recording.factories(False):
            return torch.empty(16, dtype=torch.uint8)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *args, **kwargs: major >= 8,
        "get_device_capability": lambda *args: capability,
        "get_device_name": lambda *args: "GPU",
        "get_device_properties": lambda *args: properties,
        "get_rng_state": rng_state,
        "get_rng_state_all": lambda: [rng_state()],
        "initial_seed": lambda: 0,
    }


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _typed(legacy: Any) -> type:
    """``torch.cuda.FloatTensor`` and similar types, whose calls create tensors."""

    def make(kind: type, *args: Any) -> torch.Tensor:
        tensor: torch.Tensor = legacy(*args)
        return tensor.cuda()

    return type(legacy.__name__, (), {"__new__": make})


class NoGraph:
    """Compares addresses of tensors, which a trace does not have."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoGraph:
        raise failures.not_traced(
            "A graphed callable", "Trace the original function, without make_graphed_callables."
        )


_Generator = torch.Generator


class _Generators(type(_Generator)):  # type: ignore[misc]
    """PyTorch's own generators are instances too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Generator)


class Generator(_Generator, metaclass=_Generators):
    """A GPU's generator, which draws numbers like a CPU's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        generator: Generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        generator._named_device = torch.device(device)
        return generator

    _named_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0) if self._named_device.type == "cuda" else self._named_device


class Device:
    """``with torch.cuda.device(0)``: there is only this device."""

    def __init__(self, device: Any = 0) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class Stream:
    """A stream without effect: a trace has no order in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: object = None) -> Event:
        return Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0
