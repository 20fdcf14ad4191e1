"""The device built for one PyTorch: a folder that goes into LD_LIBRARY_PATH.

It holds one library and a link to it under the name of every library of CUDA's that this PyTorch loads. Built by the
C compiler in a few seconds, once for a build of PyTorch and a state of our sources, and kept in the user's cache
folder.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from brim.catalog.cudnn import cudnn_version
from brim.core.files import identity
from brim.device import LIBRARY, SOURCES
from brim.device.elf import needed, symbols
from brim.errors import FormatError, UnsupportedError
from brim.measure.user_cache import build_once, cache_folder, fingerprint

PROCESSORS = ("x86_64", "aarch64")
_OLDEST, _NEWEST = (12, 0), (13, 99)  # the CUDA versions whose structures the sources know
_CUDNN = {12: 90_100, 13: 92_000}  # by CUDA's version, for a PyTorch that does not name its version


def build(site_packages: Path, folder: Path | None = None, *, packages: Sequence[Path] = ()) -> Path:
    """Return the library folder for the torch in ``site_packages``; build it if it is missing.

    ``folder`` is its parent, by default ``rehearsal`` in the user's cache folder. ``packages``: folders of
    installed packages, whose CUDA code may need other functions than PyTorch.
    Raises UnsupportedError if it cannot be built: on another system than Linux on x86-64 or aarch64, for a torch
    that is no CUDA build, or without a C compiler; TransferError if the cache folder is not writable.
    """
    _check_platform()
    torch = site_packages / "torch"
    version = cuda_version(torch)
    if version is None:
        raise UnsupportedError(
            f"Cannot build the device for the PyTorch in {site_packages}.",
            "It is not a CUDA build." if torch.is_dir() else "There is none.",
            "Name the site-packages of a CUDA build of PyTorch.",
        )
    if not _OLDEST <= version <= _NEWEST:
        raise UnsupportedError(
            f"Cannot build the device for the PyTorch in {site_packages}.",
            f"It is built for CUDA {version[0]}.{version[1]}.",
            "The device knows CUDA 12 and 13.",
        )
    libraries = sorted((torch / "lib").glob("*.so"))
    triton = next((place for place in (site_packages, *packages) if (place / "triton").is_dir()), site_packages)
    launchers = sorted((triton / "triton" / "backends" / "nvidia").glob("driver.*"))
    libraries += extensions(packages, libraries)
    sources = sorted(SOURCES.glob("*.[ch]"))
    number = version[0] * 1000 + version[1] * 10  # as cuda_runtime_api.h has it
    versions = {"CUDART_VERSION": number, "CUDNN_VERSION": cudnn_version(site_packages) or _CUDNN[version[0]]}
    key = fingerprint([*libraries, *launchers, *sources, SOURCES / "stubs.toml", Path(__file__)], versions)
    name = f"cuda{version[0]}.{version[1]}-{key}"
    return build_once(
        (folder or cache_folder() / "rehearsal") / name, lambda into: _compile(into, libraries, launchers, versions)
    )


def cuda_version(torch: Path) -> tuple[int, int] | None:
    """The CUDA version of the PyTorch in that folder, read from its version file; None of a build without CUDA."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def _check_platform() -> None:
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in PROCESSORS:
        raise UnsupportedError(
            "Cannot rehearse on this machine.",
            f"It runs {platform.system()} on {machine}.",
            f"Rehearse on Linux on {' or '.join(PROCESSORS)}: PyTorch's CUDA builds are made for those.",
        )


def _compile(into: Path, libraries: Sequence[Path], launchers: Sequence[Path], versions: Mapping[str, int]) -> None:
    compiler = _compiler()
    flags = ["-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden"]
    flags += [f"-D{name}={number}" for name, number in versions.items()]
    with tempfile.TemporaryDirectory(dir=into) as scratch, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        scratch_folder = Path(scratch)
        sources = sorted(SOURCES.glob("*.c"), key=lambda path: -path.stat().st_size)
        compiled = [pool.submit(_run, [*compiler, *flags, "-c", str(source)], scratch_folder) for source in sources]
        wanted = wanted_by(libraries, launchers)
        for source in compiled:
            source.result()
        objects = sorted(scratch_folder.glob("*.o"))
        defined = {symbol.name for path in objects for symbol in symbols(path) if symbol.defined}
        (scratch_folder / "stubs.c").write_text(stub_source(wanted, defined))
        _run([*compiler, *flags, "-O0", f"-I{SOURCES}", "-c", "stubs.c"], scratch_folder)
        (scratch_folder / "versions.map").write_text(version_script(wanted))
        names = [f"-Wl,--defsym={name}={function}" for name, function in second_names(wanted, defined)]
        link = ["-shared", f"-Wl,-soname,{LIBRARY}", "-Wl,--version-script=versions.map", *names, "-o", LIBRARY]
        _run([*compiler, *(path.name for path in objects), "stubs.o", *link, "-lpthread", "-ldl"], scratch_folder)
        shutil.move(scratch_folder / LIBRARY, into / LIBRARY)
    for name in wanted.libraries:
        (into / name).symlink_to(LIBRARY)


def _compiler() -> list[str]:
    named = os.environ.get("CC", "").split()
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise UnsupportedError(
        "Cannot compile the rehearsal device.",
        f"There is no C compiler: {named[0] if named else 'cc, gcc, clang'} is not on the PATH.",
        "Install one (Debian: apt install gcc; Fedora: dnf install gcc), or name it in CC.",
    )


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    if "No space left on device" in done.stderr:
        raise OSError(28, "No space left on device")
    raise UnsupportedError(
        "Cannot compile the rehearsal device.",
        f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-800:]}",
        "Set CC to a C11 compiler that can link for this machine.",
    )


# A function that is imported and that ``library/*.c`` does not define gets a stub, which counts calls and returns 0.
# PyTorch's builds import other functions, so brim reads undefined symbols and their version nodes from the libraries.

# Functions of CUDA's libraries, and the libraries that have them.
_FUNCTION = re.compile(
    r"_*(cuda|cu[A-Z]|cu(blas|dnn|fft|file|pti|rand|solver|sparse)|nccl|nvtx|nv(ml|rtc|shmem|JitLink|jpeg)\w)"
)
_LIBRARY = re.compile(
    r"lib(cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem|nvJit|nvjpeg|nvTools|nvidia)"
)
OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")

_TABLE = tomllib.loads((SOURCES / "stubs.toml").read_text())
_OUT_PARAMETERS = tuple(
    (re.compile(pattern), positions, int(width))
    for width, functions in _TABLE["parameters"].items()
    for pattern, positions in functions.items()
)
_OUT_ARRAYS = tuple((re.compile(pattern), *positions) for pattern, positions in _TABLE["arrays"].items())
_ARGUMENTS = 22


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Symbols that libraries import from CUDA; ``versions`` maps each to its version node ("" without one)."""

    versions: dict[str, str]
    libraries: tuple[str, ...]


def extensions(packages: Iterable[Path], libraries: Iterable[Path]) -> list[Path]:
    """The shared libraries in folders of installed packages that are linked to CUDA's, PyTorch's ``libraries`` aside.

    Libraries for another major version of CUDA than PyTorch's are left out: they are not loaded with it.
    """
    own = {identity(path.parents[1]) for path in libraries}
    versions = {name.split(".so")[0]: name for path in libraries for name in _needed(path)}
    libraries_found = []
    for package in packages:
        for folder, folders, files in os.walk(package):
            folders[:] = [subfolder for subfolder in folders if identity(Path(folder, subfolder)) not in own]
            for path in (Path(folder) / name for name in files if name.endswith(".so")):
                needed = _needed(path)
                if needed and all(versions.get(name.split(".so")[0], name) == name for name in needed):
                    libraries_found.append(path)
    return sorted(libraries_found)


def _needed(path: Path) -> list[str]:
    """The CUDA libraries that this library is linked to; none for another kind of file or machine."""
    try:
        return [name for name in needed(path) if _LIBRARY.match(name)]
    except (FormatError, OSError):
        return []


def wanted_by(libraries: Iterable[Path], sources: Iterable[Path]) -> Wanted:
    """Collect the imports of shared libraries and of C sources that are compiled later (Triton's launcher)."""
    versions: dict[str, str] = {}
    names = set(OPENED_BY_NAME)
    for path in libraries:
        names.update(name for name in needed(path) if _LIBRARY.match(name))
        for symbol in symbols(path):
            if not symbol.defined and _FUNCTION.match(symbol.name):
                versions[symbol.name] = symbol.version or versions.get(symbol.name, "")
    for path in sources:
        for name in re.findall(r"\b(cu[A-Z]\w+)\(", path.read_text(encoding="utf-8", errors="replace")):
            versions.setdefault(name, "")
    return Wanted(versions=versions, libraries=tuple(sorted(names)))


def stub_source(wanted: Wanted, defined: Collection[str]) -> str:
    """C code for every function that is imported and not defined."""
    missing = sorted(set(wanted.versions) - set(defined))
    return "\n".join(('#include "device.h"', "#include <string.h>", *map(_stub, missing), ""))


def version_script(wanted: Wanted) -> str:
    """The linker's version script: each symbol in the version node that its users need."""
    nodes: dict[str, list[str]] = {}
    for name, version in sorted(wanted.versions.items()):
        if version:
            nodes.setdefault(version, []).append(name)
    return "".join(f"{node} {{ global: {'; '.join(names)}; }};\n" for node, names in sorted(nodes.items()))


def second_names(wanted: Wanted, defined: Collection[str]) -> Iterator[tuple[str, str]]:
    """(name, function) for the driver's functions ``name_v2`` that are also looked for under their first name."""
    for function in sorted(defined):
        name = function.removesuffix("_v2")
        if re.match(r"cu[A-Z]", name) and name != function and name not in defined and name not in wanted.versions:
            yield name, function


def _stub(name: str) -> str:
    head = f'static Counter counter = {{"{name}", 0, 0}}; count(&counter);'
    parameters = ", ".join(f"uintptr_t a{i} UNUSED" for i in range(_ARGUMENTS))
    cleared = [
        *(f"if (a{at}) memset((void *)a{at}, 0, {width});"
          for pattern, positions, width in _OUT_PARAMETERS if pattern.fullmatch(name) for at in positions),
        *(f"if (a{array}) memset((void *)a{array}, 0, 4 * (size_t)(int)a{number});"
          for pattern, array, number in _OUT_ARRAYS if pattern.fullmatch(name)),
    ]  # fmt: skip
    if cleared:
        return f"API int {name}({parameters}) {{ {head} {' '.join(cleared)} return 0; }}"
    return f"API int {name}(void) {{ {head} return 0; }}"
