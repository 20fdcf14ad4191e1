"""The compiled part of values (``values.cpp``): built for the present PyTorch, once, in the user's cache."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

from brim.errors import UnsupportedError
from brim.measure.user_cache import build_once, cache_folder, fingerprint

_SOURCE = Path(__file__).with_name("values.cpp")
_LIBRARY = "libbrimvalues.so"
_NEW_STRINGS = (2, 7)  # wheels of PyTorch since then use the C++11 ABI of strings


def load(site_packages: Path) -> ctypes.CDLL:
    """The library for the PyTorch of this process, which is in ``site_packages``."""
    library = ctypes.CDLL(str(build(site_packages)))
    library.brim_values_replace.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
    library.brim_values_error.restype = library.brim_values_failed.restype = ctypes.c_char_p
    library.brim_values_attention.restype = ctypes.c_char_p
    library.brim_values_seed.restype = ctypes.c_ulonglong
    library.brim_values_written.argtypes = [ctypes.c_void_p]
    return library


def build(site_packages: Path) -> Path:
    """Path of the library for the PyTorch in ``site_packages``; building it the first time takes half a minute.

    Raises UnsupportedError if there is no C++ compiler, or it fails.
    """
    torch = site_packages / "torch"
    version = torch / "version.py"
    key = fingerprint([_SOURCE, version, torch / "lib" / "libtorch_cpu.so"])
    folder = build_once(cache_folder() / "rehearsal" / f"values-{key}", lambda into: _compile(into, torch))
    return folder / _LIBRARY


def is_built(site_packages: Path) -> bool:
    torch = site_packages / "torch"
    key = fingerprint([_SOURCE, torch / "version.py", torch / "lib" / "libtorch_cpu.so"])
    return (cache_folder() / "rehearsal" / f"values-{key}").is_dir()


def _compile(into: Path, torch: Path) -> None:
    match = re.search(r"__version__ = '(\d+)\.(\d+)", (torch / "version.py").read_text(encoding="utf-8"))
    version = (int(match[1]), int(match[2])) if match else _NEW_STRINGS
    problem = f"Cannot build the values of a rehearsal for the PyTorch in {torch}."
    compiler = _compiler(problem)
    command = [
        *compiler,
        *["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"],
        f"-D_GLIBCXX_USE_CXX11_ABI={int(version >= _NEW_STRINGS)}",
        *[f"-I{torch / 'include'}", str(_SOURCE), "-o", str(into / _LIBRARY)],
        *[f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"],
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    if "No space left on device" in done.stderr:
        raise OSError(28, "No space left on device")
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()[-400:]]
    raise UnsupportedError(
        problem,
        f"{compiler[0]} ended with {done.returncode}: {errors[0][:400]}",
        "This needs a C++20 compiler (set CXX to one) and PyTorch 2.10 or newer.",
    )


def _compiler(problem: str) -> list[str]:
    named = os.environ.get("CXX", "").split()
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise UnsupportedError(
        problem,
        f"There is no C++ compiler: {named[0] if named else 'c++, g++, clang++'} is not on the PATH.",
        "Install one (Debian: apt install g++; Fedora: dnf install gcc-c++), or name it in CXX.",
    )
