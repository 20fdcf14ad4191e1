"""The device is built for the PyTorch that is there, once, completely or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brim.device import build as building
from brim.device.build import build, cuda_version
from brim.device.elf import needed, section_places, symbols
from brim.device.settings import DeviceSettings
from brim.errors import FormatError, TransferError, UnsupportedError
from brim.rehearsal import values_library

VERSION = "__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n"
# A library as PyTorch's are: it wants CUDA's functions, one of them at a version, one that the device does not know.
USER = "int cudaGetDeviceCount(int *); int cublasBrimUnknown(int); int f(int *n) { return cudaGetDeviceCount(n); }"
USER += " int g(void) { return cublasBrimUnknown(7); }"


def _torch(site: Path, cuda: str | None = "13.0") -> Path:
    (site / "torch" / "lib").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(VERSION.format(cuda=repr(cuda)))
    return site


def _cc(folder: Path, text: str, *options: str) -> None:
    (folder / "source.c").write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "source.c", *options], cwd=folder, check=True)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return _torch(tmp_path / "site")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were filled, by something quicker than a compiler."""
    filled: list[Path] = []

    def fill(into: Path, *_: object) -> None:
        filled.append(into)
        (into / "made").touch()

    monkeypatch.setattr(building, "_compile", fill)
    return filled


@pytest.mark.thorough
def test_functions_that_other_packages_want_are_there(site: Path, tmp_path: Path) -> None:
    """Those of packages for this CUDA; what a library for another one wants is nobody's affair here."""
    packages = tmp_path / "packages"
    for version in (12, 13):
        folder, cudart = packages / f"cuda{version}", tmp_path / f"libcudart.so.{version}"
        folder.mkdir(parents=True)
        (tmp_path / "map").write_text(f"libcudart.so.{version} {{ global: cuda*; }};")
        both = "int cudaGetDeviceCount(int *n) { return *n = -1; } int cudaBrimPrefetch(void) { return 1; }"
        _cc(tmp_path, both, "-Wl,--version-script=map", f"-Wl,-soname,{cudart.name}", "-o", cudart.name)
        text = "int cudaBrimPrefetch(void); int f(void) { return cudaBrimPrefetch(); }"
        _cc(tmp_path, text, str(cudart), "-o", str(folder / "extension.so"))
    (packages / "damaged.so").write_bytes(b"\x7fELF")
    _cc(tmp_path, USER, str(tmp_path / "libcudart.so.13"), "-o", str(site / "torch" / "lib" / "libtorch_cuda.so"))

    made = build(site, tmp_path / "cache", packages=[packages, site])
    assert not (made / "libcudart.so.12").exists()
    ask = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).f())"
    environment = DeviceSettings.of("T4").environment(made, dict(os.environ))
    command = [sys.executable, "-S", "-c", ask, str(packages / "cuda13" / "extension.so")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"] and done.stderr == ""


@pytest.mark.thorough
def test_symbols_are_bound_to_the_versions_that_pytorch_wants(site: Path, tmp_path: Path) -> None:
    libraries = site / "torch" / "lib"
    (tmp_path / "map").write_text("libcudart.so.13 { global: cudaGetDeviceCount; };")
    _cc(
        tmp_path, "int cudaGetDeviceCount(int *n) { return *n = -1; }", "-Wl,--version-script=map",
        "-Wl,-soname,libcudart.so.13", "-o", "libcudart.so.13",
    )  # fmt: skip
    _cc(tmp_path, USER, str(tmp_path / "libcudart.so.13"), "-o", str(libraries / "libtorch_cuda.so"))
    imports = [symbol for symbol in symbols(libraries / "libtorch_cuda.so") if not symbol.defined]
    wanted = {symbol.name: symbol.version for symbol in imports}
    assert wanted["cudaGetDeviceCount"] == "libcudart.so.13" and wanted["cublasBrimUnknown"] == ""

    made = build(site, tmp_path / "cache")
    assert {path.name for path in made.iterdir()} >= {"libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"}
    ask = "import ctypes, sys; n = ctypes.c_int(); t = ctypes.CDLL(sys.argv[1])\n"
    ask += "print(t.f(ctypes.byref(n)), n.value, t.g())"
    preload = {"LD_PRELOAD": str(made / "libbrimdevice.so")}  # where the unversioned function is found
    environment = DeviceSettings.of("T4", gpus=3).environment(made, dict(os.environ)) | preload
    command = [sys.executable, "-S", "-c", ask, str(libraries / "libtorch_cuda.so")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "3", "0"] and done.stderr == ""
    without = {key: value for key, value in environment.items() if key != "BRIM_REHEARSAL_DEVICE"}
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["100", "0"], "without settings there is no device"
    wrong = {**environment, "BRIM_REHEARSAL_DEVICE": "count=1;colour=1"}
    done = subprocess.run(command, env=wrong, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown key: colour" in done.stderr


def test_it_is_built_once_and_anew_when_pytorch_changes(site: Path, tmp_path: Path, compiled: list[Path]) -> None:
    library = site / "torch" / "lib" / "libtorch_cuda.so"
    library.write_bytes(b"one")
    first = build(site, tmp_path / "cache")
    assert build(site, tmp_path / "cache") == first and len(compiled) == 1
    library.write_bytes(b"another")
    assert build(site, tmp_path / "cache") != first and len(compiled) == 2


def test_so_are_its_values(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[Path] = []
    monkeypatch.setattr(values_library, "_compile", lambda into, torch: filled.append(into))
    library = site / "torch" / "lib" / "libtorch_cpu.so"
    for text in ("one", "another"):
        library.write_text(text)
        assert not values_library.is_built(site)
        assert values_library.build(site) == values_library.build(site) and values_library.is_built(site)
    assert len(filled) == 2


def test_an_interrupted_build_leaves_nothing(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(site, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def _compiler(folder: Path, text: str) -> str:
    script = folder / "cc"
    script.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    script.chmod(0o755)
    return str(script)


def test_a_compiler_that_fails_is_quoted(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", _compiler(tmp_path, "internal compiler error"))
    with pytest.raises(UnsupportedError, match="internal compiler error"):
        build(site, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_told(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", _compiler(tmp_path, "cannot write: No space left on device"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TransferError, match="No space left on device"):
        build(site, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler_is_told(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="no C compiler"):
        build(site, tmp_path / "cache")


@pytest.mark.parametrize(("system", "machine"), [("linux", "riscv64"), ("darwin", "aarch64"), ("win32", "x86_64")])
def test_other_machines_are_refused(site: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(UnsupportedError, match=machine):
        build(site)


@pytest.mark.parametrize(
    ("cuda", "found"), [(None, "not a CUDA build"), ("11.8", "CUDA 11.8"), ("14.0", "CUDA 14.0")]
)
def test_other_builds_are_refused(tmp_path: Path, cuda: str | None, found: str) -> None:
    with pytest.raises(UnsupportedError, match=found):
        build(_torch(tmp_path, cuda))
    with pytest.raises(UnsupportedError, match="There is none"):
        build(tmp_path / "nowhere")


def test_the_cuda_version_is_read_without_importing(tmp_path: Path) -> None:
    assert cuda_version(_torch(tmp_path) / "torch") == (13, 0)


@pytest.mark.parametrize("read", [needed, symbols, lambda path: section_places(path, ".data")])
@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(80), b"\x7fELF\x02\x01" + b"\xff" * 80, b"MZ" * 100])
def test_a_damaged_library_is_told(tmp_path: Path, content: bytes, read: Callable[[Path], object]) -> None:
    library = tmp_path / "libtorch_cuda.so"
    library.write_bytes(content)
    with pytest.raises(FormatError, match="shared library"):
        read(library)
