"""Stubs for functions of CUDA's libraries that PyTorch or other packages import and the device does not define.

Each imports other functions. So brim reads from their libraries which symbols are undefined, in which version nodes,
from which libraries. A function that ``device/*.c`` does not define gets a stub that counts calls and returns 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from brim.device.elf import ElfFile
from brim.errors import FormatError

# Functions of CUDA's libraries, and the libraries that have them.
_FUNCTION = re.compile(
    r"_*(cuda|cu[A-Z]|cu(blas|dnn|fft|file|pti|rand|solver|sparse)|nccl|nvtx|nv(ml|rtc|shmem|JitLink|jpeg)\w)"
)
_LIBRARY = re.compile(
    r"lib(cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem|nvJit|nvjpeg|nvTools|nvidia)"
)
OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")

# Out-parameters that callers read: pattern, their positions among the arguments, bytes of each. They become 0: no
# workspace (that of cuSOLVER and cuSPARSE is unknown), no error in a factorisation. All other arguments
# of these functions are integers or pointers.
_OUT_PARAMETERS = tuple(
    (re.compile(pattern), positions, width)
    for pattern, positions, width in (
        (r"cusolverDn[SDCZ](potrf|geqrf|getrf)_bufferSize", (5,), 4),
        (r"cusolverDn[SDCZ]gesvd_bufferSize", (3,), 4),
        (r"cusolverDn[SDCZ]gesvdj_bufferSize", (12,), 4),
        (r"cusolverDn[SDCZ]gesvdjBatched_bufferSize", (11,), 4),
        (r"cusolverDn[SDCZ]gesvdaStridedBatched_bufferSize", (16,), 4),
        (r"cusolverDn[SDCZ](org|ung)qr_bufferSize", (7,), 4),
        (r"cusolverDn[SDCZ](orm|unm)qr_bufferSize", (11,), 4),
        (r"cusolverDn[SDCZ](sy|he)ev(d|j|jBatched)_bufferSize", (7,), 4),
        (r"cusolverDn[SDCZ]sytrf_bufferSize", (4,), 4),
        (r"cusolverDnXpotrf_bufferSize", (8, 9), 8),
        (r"cusolverDnXgeqrf_bufferSize", (10, 11), 8),
        (r"cusolverDnXsyev(d|Batched)_bufferSize", (11, 12), 8),
        (r"cusolverDnXgeev_bufferSize", (17, 18), 8),
        (r"cusolverDnXsytrs_bufferSize", (11, 12), 8),
        (r"cusparse(SpMM|SDDMM)_bufferSize", (10,), 8),
        (r"cusparseSpMV_bufferSize", (9,), 8),
        (r"cusparseSpSV_bufferSize", (9,), 8),
        (r"cusparseSpSM_bufferSize", (10,), 8),
        (r"cusparseXcoosort_bufferSizeExt", (6,), 8),
        (r"cusparseXcsrsort_bufferSizeExt", (6,), 8),
        (r"cusparse[SDCZ]csrgeam2_bufferSizeExt", (19,), 8),
        (r"cusparse[SDCZ]bsrsv2_bufferSize", (11,), 4),
        (r"cusparse[SDCZ]bsrsm2_bufferSize", (13,), 4),
        (r"cublas[SDCZ]geqrfBatched", (6,), 4),
        (r"cublas[SDCZ](getrs|gels)Batched", (9,), 4),
        (r"cusolverDn[SDCZ](potrf|getrf)", (7,), 4),
        (r"cusolverDn[SDCZ]geqrf", (8,), 4),
        (r"cusolverDn[SDCZ](getrs|syevd|heevd)", (9,), 4),
        (r"cusolverDn[SDCZ]gesvdj", (14,), 4),
        (r"cusolverDn[SDCZ]gesvd", (15,), 4),
        (r"cusolverDnXpotrf", (12,), 4),
        (r"cusolverDnXgeqrf", (14,), 4),
        (r"cusolverDnXsyevd", (15,), 4),
        (r"cusolverDnXgeev", (21,), 4),
    )
)
_ARGUMENTS = 22


# The same for functions on many matrices: pattern, position of the array of their ints, position of their number.
_OUT_ARRAYS = tuple(
    (re.compile(pattern), array, number)
    for pattern, array, number in (
        (r"cublas[SDCZ]getrfBatched", 5, 6),
        (r"cusolverDn[SDCZ]potrfBatched", 5, 6),
        (r"cusolverDn[SDCZ](syevj|heevj)Batched", 9, 11),
        (r"cusolverDn[SDCZ]gesvdjBatched", 13, 15),
        (r"cusolverDn[SDCZ]gesvdaStridedBatched", 18, 20),
        (r"cusolverDnXsyevBatched", 15, 16),
    )
)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Symbols that libraries import from CUDA; ``versions`` maps each to its version node ("" without one)."""

    versions: dict[str, str]
    libraries: tuple[str, ...]


def extensions(packages: Iterable[Path], libraries: Iterable[Path]) -> list[Path]:
    """The shared libraries in folders of installed packages that are linked to CUDA's, PyTorch's ``libraries`` aside.

    Libraries for another major version of CUDA than PyTorch's are left out: they are not loaded with it.
    """
    own = {_identity(path.parents[1]) for path in libraries}
    versions = {name.split(".so")[0]: name for path in libraries for name in _needed(path)}
    libraries_found = []
    for package in packages:
        for folder, folders, files in os.walk(package):
            folders[:] = [subfolder for subfolder in folders if _identity(Path(folder, subfolder)) not in own]
            for path in (Path(folder) / name for name in files if name.endswith(".so")):
                needed = _needed(path)
                if needed and all(versions.get(name.split(".so")[0], name) == name for name in needed):
                    libraries_found.append(path)
    return sorted(libraries_found)


def _identity(folder: Path) -> tuple[int, int]:
    """The device and inode of a folder, equal for all its names: faster than resolving its path."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _needed(path: Path) -> list[str]:
    """The CUDA libraries that this library is linked to; none for another kind of file or machine."""
    try:
        with ElfFile(path) as library:
            return [name for name in library.needed() if _LIBRARY.match(name)]
    except (FormatError, OSError):
        return []


def wanted_by(libraries: Iterable[Path], sources: Iterable[Path] = ()) -> Wanted:
    """Collect the imports of shared libraries and of C sources that are compiled later (Triton's launcher)."""
    versions: dict[str, str] = {}
    names = set(OPENED_BY_NAME)
    for path in libraries:
        with ElfFile(path) as library:
            names.update(name for name in library.needed() if _LIBRARY.match(name))
            for symbol in library.symbols():
                if not symbol.defined and _FUNCTION.match(symbol.name):
                    versions[symbol.name] = symbol.version or versions.get(symbol.name, "")
    for path in sources:
        for name in re.findall(r"\b(cu[A-Z]\w+)\(", path.read_text(encoding="utf-8", errors="replace")):
            versions.setdefault(name, "")
    return Wanted(versions=versions, libraries=tuple(sorted(names)))


def defined_in(objects: Iterable[Path]) -> set[str]:
    """The functions that these object files define."""
    names: set[str] = set()
    for path in objects:
        with ElfFile(path) as file:
            names.update(symbol.name for symbol in file.symbols() if symbol.defined)
    return names


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
