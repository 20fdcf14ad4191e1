"""Emulate ``torch.cuda`` and ``torch.accelerator`` of a machine with one GPU, for programs that run or are traced
without one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import DefaultDeviceType

from brim.catalog.gpus import read_facts
from brim.core.trace import EMPTY_CACHE, FIRST_GRAPH_POOL
from brim.model_inputs import tensors_in
from brim.predict import failures
from brim.predict.dispatch import RecordingMode

_VRAM_BYTES = 1 << 40
_FUNCTIONS = read_facts("operators.json")["functions"]
_AUTOCAST = read_facts("operators.json")["autocast"]
_TRILINEAR = torch.ops.aten._trilinear.default
_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional


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
        if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # bitsandbytes looks it up where there is a GPU
            stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", int, create=True))
        # Checkpointing reads the accelerator once per process and caches it.
        stack.enter_context(mock.patch.object(DefaultDeviceType, "_default_device_type", None))
        yield


def _accelerator(cuda: Mapping[str, Any]) -> dict[str, Any]:
    """Return replacements for functions of ``torch.accelerator``, by name."""
    return {
        **{name: _calling(cuda[name]) for name in _FUNCTIONS["of_accelerators"]},
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
        **dict.fromkeys(_FUNCTIONS["silent"], _nothing),
        **_memory(recording),
        **_device(recording, capability),
        **{name: _typed(getattr(torch, name)) for name in _FUNCTIONS["typed"]},
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
        cuda_graph: CUDAGraph, pool: tuple[int, int] | None = None, *others: Any, **options: Any
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


@contextmanager
def cuda_lists(cache: AutocastCache) -> Iterator[None]:
    """Replace the CPU's autocast kernels by CUDA's (aten/src/ATen/autocast_mode.h) for the duration.

    Fake tensors lie on the CPU, so PyTorch would consult the CPU's lists.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden is the purpose
            _fall_through(library)
            _install(library, cache)
        with mock.patch.object(torch, "clear_autocast_cache", cache.clear):
            yield
    finally:
        library._destroy()


def _install(library: torch.library.Library, cache: AutocastCache) -> None:
    casts = {
        "lower_precision": cache.lower, "float32": _to_fp32, "float32_output": _with_dtype, "widest": _widest,
    }  # fmt: skip
    for kind, make in casts.items():
        for name in _AUTOCAST[kind]:
            op = _overload(name)
            library.impl(op, make(op), "AutocastCPU", allow_override=True)
    # The backward pass of ``bilinear`` calls it, and autocast casts its products.
    library.impl(_TRILINEAR, functools.partial(_TRILINEAR._op_dk, _COMPOSITE), "AutocastCPU", allow_override=True)


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    operator: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def _fall_through(library: torch.library.Library) -> None:
    """Operations that only the CPU's lists name run as they are."""
    listed = {_overload(name).name() for names in _AUTOCAST.values() for name in names}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
        if name.startswith("aten::") and name not in listed:
            library.impl(
                name.removeprefix("aten::"), torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True
            )


def _eligible(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if _eligible(value) else value
    if isinstance(value, (tuple, list)):  # from the last to the first, as the C++ compiler evaluates arguments
        return type(value)(reversed([_each(item, change) for item in reversed(value)]))
    return value


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return function(*args, **kwargs)

    return kernel


class AutocastCache:
    """Lower-precision copies of leaf weights, kept until the outermost autocast region ends."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        self._copies.clear()

    def lower_if_enabled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.lower(function) if torch.is_autocast_enabled("cpu") else function

    def lower(self, op: Callable[..., Any]) -> Callable[..., Any]:
        @_without_autocast
        def kernel(*args: Any, **kwargs: Any) -> Any:
            named = {name: _each(value, self._cast) for name, value in reversed(kwargs.items())}
            return op(*_each(list(args), self._cast), **named)

        return kernel

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        if tensor.dtype == dtype:
            return tensor
        cached = (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )
        if not cached:
            return tensor.to(dtype)
        copy_there = self._copies.get(id(tensor))
        if copy_there is not None and copy_there[0]() is tensor:
            return copy_there[1]
        with torch.enable_grad():  # a later forward pass may need the copy's gradient
            copy = tensor.to(dtype)
        self._copies[id(tensor)] = (weakref.ref(tensor), copy)
        return copy


def _to_fp32(op: OpOverload) -> Callable[..., Any]:
    @_without_autocast
    def kernel(*args: Any, **kwargs: Any) -> Any:
        changed = _each(list(args), lambda t: t.float())
        return op(*changed, **{name: _each(value, lambda t: t.float()) for name, value in kwargs.items()})

    return kernel


def _with_dtype(op: OpOverload) -> Callable[..., Any]:
    """``fp32_set_opt_dtype``: the result is float32, and nothing is cast for that beforehand."""
    halves = _FROM_HALF.get(op)

    @_without_autocast
    def kernel(*args: Any, **kwargs: Any) -> Any:
        chosen = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
        if chosen is not None or not _eligible(args[0]):
            return op(*args, **kwargs)
        if halves is not None and args[0].dtype == torch.float16:
            return halves(args[0], args[1] if len(args) > 1 else kwargs["dim"], True)
        return op(*args, **(kwargs | {"dtype": torch.float32}))

    return kernel


# Of float16 these write float32 at once on CUDA (SoftMax.cpp); of bfloat16 they take a copy in float32.
_FROM_HALF = {
    torch.ops.aten.softmax.int: torch.ops.aten._softmax.default,
    torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax.default,
}


def _widest(op: OpOverload) -> Callable[..., Any]:
    @_without_autocast
    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_wide = any(leaf.dtype == torch.float32 for leaf in tensors_in(args))
        return op(*(_each(list(args), lambda t: t.float()) if is_wide else args), **kwargs)

    return kernel


AUTOCAST_STATE = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")


def autocast_of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of ``AUTOCAST_STATE`` take CUDA for the CPU. Older signatures without a device mean CUDA."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not args or isinstance(args[0], bool):
            args = ("cpu", *args)
        return function("cpu" if args[0] == "cuda" else args[0], *args[1:])

    return call
