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
from collections.abc import Mapping, Sequence
from pathlib import Path

from brim.catalog.cudnn import cudnn_version
from brim.device import LIBRARY, SOURCES, stubs
from brim.errors import UnsupportedError
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
    libraries += stubs.extensions(packages, libraries)
    sources = sorted(SOURCES.glob("*.[ch]"))
    number = version[0] * 1000 + version[1] * 10  # as cuda_runtime_api.h has it
    versions = {"CUDART_VERSION": number, "CUDNN_VERSION": cudnn_version(site_packages) or _CUDNN[version[0]]}
    key = fingerprint([*libraries, *launchers, *sources, Path(stubs.__file__), Path(__file__)], versions)
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
    symbols = stubs.wanted_by(libraries, launchers)
    flags = ["-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden"]
    flags += [f"-D{name}={number}" for name, number in versions.items()]
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        scratch_folder = Path(scratch)
        sources = sorted(SOURCES.glob("*.c"))
        _run([*compiler, *flags, "-c", *map(str, sources)], scratch_folder)
        objects = sorted(scratch_folder.glob("*.o"))
        defined = stubs.defined_in(objects)
        (scratch_folder / "stubs.c").write_text(stubs.stub_source(symbols, defined))
        _run([*compiler, *flags, f"-I{SOURCES}", "-c", "stubs.c"], scratch_folder)
        (scratch_folder / "versions.map").write_text(stubs.version_script(symbols))
        names = [f"-Wl,--defsym={name}={function}" for name, function in stubs.second_names(symbols, defined)]
        link = ["-shared", f"-Wl,-soname,{LIBRARY}", "-Wl,--version-script=versions.map", *names, "-o", LIBRARY]
        _run([*compiler, *(path.name for path in objects), "stubs.o", *link, "-lpthread", "-ldl"], scratch_folder)
        shutil.move(scratch_folder / LIBRARY, into / LIBRARY)
    for name in symbols.libraries:
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
