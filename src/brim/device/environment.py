"""Finds a CUDA build of PyTorch for the user's Python, or downloads one of the same version.

The user's packages are not changed. Downloads go into brim's own folder, which comes before the user's packages
in PYTHONPATH, so a program finds the build, and all other installed packages after it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from brim.device.build import build, cuda_version
from brim.device.elf import section_places
from brim.device.settings import DeviceSettings
from brim.errors import FormatError, TransferError, UnsupportedError, UsageError
from brim.measure.user_cache import build_once, cache_folder, fingerprint
from brim.processes import bound, python_command

DOWNLOAD_BYTES = 530_000_000  # the wheel of PyTorch 2.13
UNPACKED_BYTES = 1_300_000_000
TRITON_BYTES = 190_000_000  # the wheel of Triton 3.7
_GPU_CODE = ".nv_fatbin"  # the GPU's machine code: two fifths of the wheel, never read here

_LOOK = """
import importlib.util, json, sys
found = importlib.util.find_spec("torch")
packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
print(json.dumps([found and found.origin, sys.implementation.cache_tag, packages]))
"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python that has a CUDA build of PyTorch.

    Attributes:
        python: The interpreter.
        site_packages: The folder of the build.
        first: The folder that must come first in ``PYTHONPATH``; None if Python finds the build without it.
        folder: The folder for files that brim builds.
        packages: The folders of all installed packages.
        compiler: The folder of a downloaded Triton; None if none was downloaded.
    """

    python: Path
    site_packages: Path
    first: Path | None
    folder: Path
    packages: tuple[Path, ...] = ()
    compiler: Path | None = None

    def variables(self, settings: DeviceSettings, before: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return ``before`` with the variables under which ``python`` runs on the device. Builds the device if
        needed."""
        packages = (*self.packages, self.compiler) if self.compiler else self.packages
        variables = settings.environment(build(self.site_packages, self.folder, packages=packages), before)
        fetched = [str(path) for path in (self.first, self.compiler) if path]
        if fetched:
            paths = [*fetched, *filter(None, before.get("PYTHONPATH", "").split(":"))]
            variables["PYTHONPATH"] = ":".join(dict.fromkeys(paths))
        return variables

    @property
    def has_triton(self) -> bool:
        """True if Triton, which ``torch.compile`` needs, is installed or was downloaded."""
        places = (self.site_packages, *self.packages)
        return self.compiler is not None or any((place / "triton").is_dir() for place in places)


def find(python: Path | None = None, *, folder: Path | None = None) -> Environment | None:
    """Find a CUDA build of PyTorch on this machine. None if there is none.

    Args:
        python: The interpreter that will use the build. None: the running one.
        folder: The folder of brim's downloads and builds. None: ``rehearsal`` in the user's cache folder.

    Raises:
        UnsupportedError: The interpreter does not run, or has no PyTorch at all.
    """
    executable, folder = python or Path(sys.executable), folder or _folder()
    installed = _installed(executable)
    compiler = folder / installed.compiler_name
    make = partial(
        Environment,
        python=executable,
        folder=folder,
        packages=installed.packages,
        compiler=compiler if compiler.is_dir() else None,
    )
    if cuda_version(installed.torch) is None:
        fetched = folder / installed.fetched_name
        if not (fetched / "torch").is_dir():
            return None
        return make(site_packages=fetched, first=fetched)
    site = installed.torch.parent
    if not _brings_libraries(installed.torch):
        return make(site_packages=site, first=None)
    linked = build_once(
        folder / f"links-{fingerprint([installed.torch / 'version.py'])}", lambda into: _link(installed.torch, into)
    )
    return make(site_packages=site, first=linked)


def prepare(
    python: Path | None = None,
    *,
    confirm: Callable[[str], bool],
    folder: Path | None = None,
    compiler: bool = False,
) -> Environment:
    """Find a CUDA build of PyTorch as ``find`` does, or download that of the installed version.

    An interrupted download leaves no files, and starts again the next time.

    Args:
        python: The interpreter that will use the build. None: the running one.
        confirm: A function that gets a sentence on the download, and returns True to allow it.
        folder: The folder of brim's downloads and builds. None: ``rehearsal`` in the user's cache folder.
        compiler: Also download Triton, which ``torch.compile`` needs, if it is not there.

    Raises:
        UsageError: ``confirm`` returned False.
        UnsupportedError: There is no such build for this machine.
        TransferError: The disk is full.
    """
    environment = find(python, folder=folder)
    executable, folder = python or Path(sys.executable), folder or _folder()
    installed = _installed(executable)
    if environment is None:
        _allow(
            f"PyTorch's CUDA build, version {installed.release}, is needed for a rehearsal: a download of about "
            f"{DOWNLOAD_BYTES // 1_000_000} MB into {folder}, where it takes about 0.8 GB. The PyTorch that is "
            "installed stays as it is.",
            confirm,
            "Allow the download (`brim rehearse --yes` does), or install a CUDA build yourself.",
        )
        build_once(folder / installed.fetched_name, lambda into: _fetch(executable, installed, into))
        environment = find(python, folder=folder)
        assert environment, "what was fetched just now is there"
    if compiler and not environment.has_triton:
        requirement = _triton_of(environment.site_packages)
        _allow(
            f"{requirement} is needed for torch.compile: a download of about {TRITON_BYTES // 1_000_000} MB into "
            f"{folder}, where it takes about 0.7 GB.",
            confirm,
            f"Allow the download (`brim rehearse --yes` does), or install {requirement} yourself.",
        )
        build_once(folder / installed.compiler_name, lambda into: _install(executable, requirement, into))
        environment = find(python, folder=folder)
        assert environment, "it was there before"
    return environment


def _allow(what: str, confirm: Callable[[str], bool], todo: str) -> None:
    if not confirm(what):
        raise UsageError("Cannot rehearse.", what, todo)


@dataclass(frozen=True)
class _Installed:
    torch: Path
    python_tag: str
    packages: tuple[Path, ...]

    @property
    def release(self) -> str:
        """The version without its build: 2.13.0 of 2.13.0+cpu."""
        text = (self.torch / "version.py").read_text(encoding="utf-8")
        match = re.search(r"^__version__\b[^=\n]*=\s*['\"]([^'\"+]+)", text, re.MULTILINE)
        if not match:
            raise FormatError(
                f"Cannot read PyTorch's version from {self.torch / 'version.py'}.", "The file does not state it."
            )
        return match[1]

    @property
    def fetched_name(self) -> str:
        return f"torch-{self.release}-{self.python_tag}"

    @property
    def compiler_name(self) -> str:
        return f"triton-for-{self.fetched_name}"


def _folder() -> Path:
    return cache_folder() / "rehearsal"


def _installed(python: Path) -> _Installed:
    try:
        done = subprocess.run(
            python_command("-c", _LOOK, interpreter=python), capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise _does_not_run(python, str(error)) from error
    try:
        origin, tag, packages = json.loads(done.stdout)
    except ValueError as error:
        raise _does_not_run(python, next(iter(done.stderr.splitlines()), str(error))) from error
    if not origin:
        raise UnsupportedError(
            f"Cannot rehearse with {python}.", "It has no PyTorch.", "Install any build of PyTorch there."
        )
    return _Installed(Path(origin).parent, tag, tuple(map(Path, packages)))


def _does_not_run(python: Path, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot rehearse with {python}.",
        f"It does not run: {reason.rstrip('.'):.300}.",
        "Name an interpreter of Python 3.11 or newer.",
    )


# ---- an installed build ----


def _brings_libraries(torch: Path) -> bool:
    """Return True if CUDA's libraries are in or beside this build, where it searches before LD_LIBRARY_PATH."""
    beside = torch.parent / "nvidia"
    within = [path for path in (torch / "lib").glob("libcud*.so*") if path.name.startswith(("libcudart", "libcudnn"))]
    return beside.is_dir() or bool(within)


def _link(torch: Path, into: Path) -> None:
    """Create a folder of links to that build, so that the build finds no CUDA libraries beside itself."""
    libraries = into / "torch" / "lib"
    libraries.mkdir(parents=True)
    for entry in torch.iterdir():
        if entry.name != "lib":
            (into / "torch" / entry.name).symlink_to(entry)
    for entry in (torch / "lib").iterdir():
        if not re.match(r"lib(cu[a-z]|nv|nccl)", entry.name):
            (libraries / entry.name).symlink_to(entry)


# ---- a downloaded build ----


def _fetch(python: Path, installed: _Installed, into: Path) -> None:
    free_bytes = shutil.disk_usage(into).free
    needed_bytes = DOWNLOAD_BYTES + 2 * UNPACKED_BYTES  # unpacked in the same folder, then moved
    if free_bytes < needed_bytes:
        raise TransferError(
            f"Cannot unpack PyTorch {installed.release} in {into.parent}.",
            f"{free_bytes / 1e9:.1f} GB are free there, and {needed_bytes / 1e9:.1f} GB needed.",
            "Free some disk space, or set XDG_CACHE_HOME to a folder with room.",
        )
    # "===" compares texts: "==2.13.0" would also accept an index's 2.13.0+cpu.
    _install(python, f"torch==={installed.release}", into)
    if cuda_version(into / "torch") is None:
        raise UnsupportedError(
            f"Cannot fetch a CUDA build of PyTorch {installed.release}.",
            "pip found a build without CUDA.",
            "Let pip's index-url offer CUDA builds, or install one and run brim with that Python.",
        )
    slim(into / "torch" / "lib")


def _install(python: Path, requirement: str, into: Path) -> None:
    options = ["--disable-pip-version-check", "--no-input", "--quiet"]
    pip = python_command("-m", "pip", "install", *options, interpreter=python)
    if subprocess.run(python_command("-m", "pip", "--version", interpreter=python), capture_output=True).returncode:
        uv = shutil.which("uv")
        if not uv:
            raise UnsupportedError(
                f"Cannot fetch {requirement}.",
                f"{python} has no pip, and uv is not on the PATH.",
                f"Run `{python} -m ensurepip`, or install uv.",
            )
        pip = [uv, "pip", "install", "--quiet", f"--python={python}"]
    scratch = into / ".scratch"  # on this disk, whose free space was checked; deleted with the folder
    scratch.mkdir(exist_ok=True)
    command = bound([*pip, "--no-deps", "--target", str(into), requirement])
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True)
    shutil.rmtree(scratch, ignore_errors=True)
    if done.returncode == 0:
        return
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise UnsupportedError(
        f"Cannot fetch {requirement} with pip.",
        done.stderr.strip()[-800:] or f"pip ended with {done.returncode}.",
        "Try again when the network works; nothing was installed.",
    )


def _triton_of(site_packages: Path) -> str:
    """The requirement of this PyTorch for Triton, in pip's form."""
    for metadata in site_packages.glob("torch-*.dist-info/METADATA"):
        match = re.search(r"^Requires-Dist: (triton[^\s;]*)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match[1]
    raise UnsupportedError(
        "Cannot fetch Triton, which torch.compile needs.",
        f"The PyTorch in {site_packages} does not name the version of Triton that it needs.",
        "Install the version that PyTorch's release notes name.",
    )


def slim(libraries: Path) -> int:
    """Free the disk space of the GPU's machine code in the libraries of that folder; return the bytes.

    The files keep their size and read as zeros there. On filesystems that cannot do this, nothing happens.
    """
    freed = 0
    for path in sorted(libraries.glob("*.so")):
        holes = section_places(path, _GPU_CODE)
        if holes and not _punch(path, holes):
            break
        freed += sum(size for _, size in holes)
    return freed


def _punch(path: Path, holes: list[tuple[int, int]]) -> bool:
    import ctypes

    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file:
        for offset, size in holes:
            arguments = (file.fileno(), keep_size | punch_hole, ctypes.c_int64(offset), ctypes.c_int64(size))
            if libc.fallocate64(*arguments) if hasattr(libc, "fallocate64") else libc.fallocate(*arguments):
                return False
    return True
