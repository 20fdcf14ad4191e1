"""A device that plays Intel's XPU in a build of PyTorch that has none, compiled from ``device.cpp``."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "xpu"


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++")


def compile_into(folder: Path) -> Path:
    """The device's library; half a minute of a core. Raises CalledProcessError with what the compiler said."""
    library, torch_folder = folder / "simulated_accelerator.so", Path(torch.__file__).parent
    include = torch_folder / "include"
    command = [
        *(str(compiler()), "-std=c++20", "-O0", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=simulated_accelerator"),
        *(f"-I{one}" for one in (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))),
        *(str(Path(__file__).with_name("device.cpp")), "-o", str(library), f"-L{torch_folder / 'lib'}"),
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def register(library: Path) -> ModuleType:
    """Give this process the device, as ``torch.xpu``. It stays for good: use a process of its own."""
    loader = ExtensionFileLoader("simulated_accelerator", str(library))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    native = module_from_spec(spec)
    loader.exec_module(native)
    vars(torch.xpu).update(_words(native))
    return torch.xpu


class _Current:
    """There is one device: ``torch.xpu.device(...)`` changes nothing."""

    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *ended: object) -> None:
        pass


def _words(native: ModuleType) -> dict[str, Any]:
    device = torch.device(NAME, 0)
    generator, limits = torch.Generator(), [1.0]
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device": _Current,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda index=0: "a simulated accelerator",
        "synchronize": lambda index=None: None,
        "empty_cache": lambda: None,
        "Stream": lambda on=device: torch.Stream(device),
        "Event": lambda enable_timing=False: torch.Event(device, enable_timing=enable_timing),
        "current_stream": lambda on=device: torch.accelerator.current_stream(),
        "stream": lambda one: one,  # torch.Stream is a context of its own
        "mem_get_info": lambda index=0: (native.total_bytes() - native.used_bytes(), native.total_bytes()),
        "memory_allocated": lambda index=0: native.used_bytes(),
        "memory_reserved": lambda index=0: native.used_bytes(),
        "max_memory_allocated": lambda index=0: native.peak_bytes(),
        "max_memory_reserved": lambda index=0: native.peak_bytes(),
        "reset_peak_memory_stats": lambda index=0: native.reset_peak(),
        "set_total_bytes": native.set_total_bytes,
        "get_per_process_memory_fraction": lambda index=0: limits[-1],
        "set_per_process_memory_fraction": lambda fraction, index=0: limits.append(fraction),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state_all": lambda: [generator.get_state()],
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda index=0: generator.get_state(),
        "set_rng_state": lambda state, index=0: generator.set_state(state),
        "manual_seed_all": generator.manual_seed,
    }
