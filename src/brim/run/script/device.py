"""``--device cpu``: a program that names CUDA runs on a machine without it, and CUDA means the CPU.

Every function that takes a device is redirected by PyTorch's own override mechanism (``TorchFunctionMode``). The
functions of ``torch.cuda`` and ``torch.accelerator`` answer for a machine with one GPU whose memory is the CPU's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
from torch import nn
from torch._guards import CompileContext
from torch.overrides import TorchFunctionMode
from torch.utils.data._utils import pin_memory as pinning

from brim.predict.torch_cuda import AUTOCAST_STATE, Device, autocast_of_cpu, in_place, streams
from brim.run.script.moves import leave

_CPU = torch.device("cpu")
_SILENT = (
    "set_device", "synchronize", "ipc_collect", "init", "_lazy_init", "empty_cache", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction", "set_stream",
)  # fmt: skip
_NUMBERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_SEEDS = ("manual_seed", "manual_seed_all")


class PretendedDevice:
    """Makes CUDA mean the CPU, from ``begin`` to ``end``, in the thread that calls them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        self._stack.enter_context(in_place(_torch_cuda()))
        # While Dynamo compiles a part of the program, it would look up streams by PyTorch's own class.
        self._stack.enter_context(
            mock.patch.object(torch.accelerator, "is_available", lambda: CompileContext.try_get() is None)
        )
        for name in AUTOCAST_STATE:
            self._stack.enter_context(mock.patch.object(torch, name, autocast_of_cpu(getattr(torch, name))))
        self._stack.enter_context(mock.patch.object(torch, "load", _loading(torch.load)))
        # A data loader pins memory in its own thread, where the mode is not in force.
        self._stack.enter_context(mock.patch.object(pinning, "pin_memory", lambda data, device=None: data))
        # With a GPU, ``DataParallel`` sends each call's inputs there; without one it calls the wrapped module.
        parallel = sys.modules[nn.DataParallel.__module__]  # the package has a function of the same name
        self._stack.enter_context(mock.patch.object(parallel, "_get_available_device_type", lambda: None))
        mode = _CudaIsCpu()
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._stack.callback(leave, mode)

    def end(self) -> None:
        """Undo ``begin``. A second call does nothing."""
        self._stack.close()


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return False
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(value) for value in args)
            if len(args) > 1 and isinstance(args[1], int):  # the index of a GPU
                args = (args[0], _CPU, *args[2:])
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs["device"] = _CPU if isinstance(device, int) else _on_cpu(device)
        return func(*args, **kwargs)


def is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


def _on_cpu(value: Any) -> Any:
    return _CPU if is_cuda(value) else value


def _torch_cuda() -> dict[str, Any]:
    """The replacements for attributes of ``torch.cuda``, by name."""
    properties = SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=psutil.virtual_memory().total, multi_processor_count=1
    )

    def memory_info(*_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    return {
        # torch.manual_seed seeds the CPU.
        **{name: _answering(None) for name in (*_SILENT, *_SEEDS, "set_rng_state", "set_rng_state_all")},
        **{name: _answering(0) for name in (*_NUMBERS, "current_device")},
        **{name: _answering(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        "is_current_stream_capturing": _answering(False),  # streaming asks whether a CUDA graph is being captured
        "device_count": lambda: 1,
        "get_device_capability": lambda *args: (0, 0),
        "get_device_name": lambda *args: "CPU",
        "get_device_properties": lambda *args: properties,
        "mem_get_info": memory_info,
        "memory_stats": lambda *args: {},
        "memory_summary": lambda *args, **kwargs: "",
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": torch.initial_seed,
        **streams(),
        "device_of": type("device_of", (Device,), {}),
    }


def _answering(value: Any) -> Callable[..., Any]:
    """A new function that returns ``value``. One object per name: Dynamo has a rule for every function of PyTorch."""
    return lambda *args, **kwargs: value


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def call(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(file, _on_cpu(map_location) if not callable(map_location) else map_location, *args, **kwargs)

    return call
