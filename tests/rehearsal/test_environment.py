"""A CUDA build of PyTorch is found where there is one, and fetched with consent where not, all of it or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brim.device import environment
from brim.device.environment import find, prepare, slim
from brim.errors import TransferError, UnsupportedError, UsageError

VERSION = "__version__ = '2.13.0{local}'\ncuda: Optional[str] = {cuda}\n"

# An interpreter: what it says of its torch, and what its pip does with the folder named after --target.
PYTHON = """#!/bin/sh
[ "$1" = -P ] && shift
case "$1 $2 $3" in
  "-c "*) echo '{look}' ;;
  "-m pip --version") echo pip ;;
  "-m pip install")
    echo "$@" >> {log}
    while [ "$1" != --target ]; do shift; done
    {pip} ;;
esac
"""
INSTALLS = """mkdir -p "$2/torch/lib" && printf "cuda: Optional[str] = '13.0'\\n" > "$2/torch/version.py" """


def _torch(site: Path, *, cuda: str | None, local: str = "") -> Path:
    (site / "torch" / "lib").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(VERSION.format(local=local, cuda=repr(cuda)))
    return site / "torch"


class Interpreter:
    """A Python of the user's, with a pip that needs no network."""

    def __init__(self, folder: Path, torch: Path | None) -> None:
        self.folder, self.python, self._log = folder, folder / "python", folder / "log"
        self._look = json.dumps([torch and str(torch / "__init__.py"), "cpython-311", []])

    def with_pip(self, pip: str) -> Path:
        self.python.write_text(PYTHON.format(look=self._look, log=self._log, pip=pip))
        self.python.chmod(0o755)
        return self.python

    def installs(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def cpu(tmp_path: Path) -> Interpreter:
    return Interpreter(tmp_path, _torch(tmp_path / "site", cuda=None, local="+cpu"))


def test_a_build_of_the_same_version_is_fetched_once_and_put_first(cpu: Interpreter, tmp_path: Path) -> None:
    asked: list[str] = []
    python, folder = cpu.with_pip(INSTALLS), tmp_path / "cache"
    assert find(python, folder=folder) is None
    made = prepare(python, confirm=lambda text: not asked.append(text), folder=folder)
    assert "530 MB" in asked[0] and "2.13.0" in asked[0]
    assert made.first == made.site_packages == folder / "torch-2.13.0-cpython-311"
    assert "--no-deps" in cpu.installs()[0] and cpu.installs()[0].endswith("torch===2.13.0")
    assert prepare(python, confirm=pytest.fail, folder=folder) == made == find(python, folder=folder)


WITH_TRITON = (
    INSTALLS
    + """; case "$3" in
  triton*) rm -r "$2/torch"; mkdir -p "$2/triton/backends/nvidia" ;;
  *) mkdir "$2/torch-2.13.0.dist-info"
     echo 'Requires-Dist: triton==3.7.1; platform_system == "Linux"' > "$2/torch-2.13.0.dist-info/METADATA" ;;
esac"""
)


def test_triton_is_fetched_when_it_is_asked_for_in_the_version_that_pytorch_names(
    cpu: Interpreter, tmp_path: Path
) -> None:
    python, folder = cpu.with_pip(WITH_TRITON), tmp_path / "cache"
    assert not prepare(python, confirm=lambda _: True, folder=folder).has_triton
    with pytest.raises(UsageError, match=r"triton==3\.7\.1 is needed for torch\.compile: a download of about 190 MB"):
        prepare(python, confirm=lambda _: False, folder=folder, compiler=True)
    made = prepare(python, confirm=lambda _: True, folder=folder, compiler=True)
    assert made.has_triton and made.compiler == folder / "triton-for-torch-2.13.0-cpython-311"
    assert len(cpu.installs()) == 2 and cpu.installs()[1].endswith("triton==3.7.1")
    assert prepare(python, confirm=pytest.fail, folder=folder, compiler=True) == made == find(python, folder=folder)


def test_when_pytorch_is_another_version_its_build_is_fetched_beside(cpu: Interpreter, tmp_path: Path) -> None:
    python, folder = cpu.with_pip(INSTALLS), tmp_path / "cache"
    prepare(python, confirm=lambda _: True, folder=folder)
    version = tmp_path / "site" / "torch" / "version.py"
    version.write_text(version.read_text().replace("2.13.0", "2.14.1"))
    assert find(python, folder=folder) is None
    made = prepare(python, confirm=lambda _: True, folder=folder)
    assert made.first == folder / "torch-2.14.1-cpython-311" and cpu.installs()[1].endswith("torch===2.14.1")
    assert len(list(folder.iterdir())) == 2


def test_nothing_is_fetched_without_consent(cpu: Interpreter, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="530 MB"):
        prepare(cpu.with_pip(INSTALLS), confirm=lambda _: False, folder=tmp_path / "cache")
    assert cpu.installs() == [] and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("pip", "error", "said"),
    [
        ('mkdir -p "$2/torch"; echo "Connection broken" >&2; exit 1', UnsupportedError, "Connection broken"),
        ('echo "No space left on device" >&2; exit 1', TransferError, "No space left"),
        ('mkdir -p "$2/torch"; touch "$2/torch/version.py"', UnsupportedError, "without CUDA"),
    ],
    ids=["the network goes", "the disk is full", "only CPU builds are offered"],
)
def test_what_fails_leaves_nothing_and_may_be_done_again(
    cpu: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: str, error: type[Exception], said: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(error, match=said):
        prepare(cpu.with_pip(pip), confirm=lambda _: True, folder=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert prepare(cpu.with_pip(INSTALLS), confirm=lambda _: True, folder=tmp_path / "cache").first


def test_an_interrupted_download_leaves_nothing(
    cpu: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(cpu.with_pip(INSTALLS), confirm=lambda _: True, folder=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_too_small_a_disk_is_told_before_the_download(
    cpu: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "UNPACKED_BYTES", 1 << 60)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TransferError, match="GB are free"):
        prepare(cpu.with_pip(INSTALLS), confirm=lambda _: True, folder=tmp_path / "cache")
    assert cpu.installs() == []


def test_the_users_own_cuda_build_is_used(tmp_path: Path) -> None:
    torch = _torch(tmp_path / "site", cuda="13.0")
    python = Interpreter(tmp_path, torch).with_pip("exit 1")
    found = find(python, folder=tmp_path / "cache")
    assert found and (found.first, found.site_packages) == (None, torch.parent)


def test_one_with_cudas_libraries_beside_it_is_seen_through_links(tmp_path: Path) -> None:
    """Its libraries look for CUDA's beside themselves before they look in LD_LIBRARY_PATH."""
    torch = _torch(tmp_path / "site", cuda="13.0")
    (torch.parent / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    for name in ("lib/libtorch_cuda.so", "lib/libcudart.so.13", "__init__.py"):
        (torch / name).touch()
    found = find(Interpreter(tmp_path, torch).with_pip("exit 1"), folder=tmp_path / "cache")
    assert found and found.first and found.site_packages == torch.parent
    assert (found.first / "torch" / "__init__.py").resolve() == torch / "__init__.py"
    assert [path.name for path in (found.first / "torch" / "lib").iterdir()] == ["libtorch_cuda.so"]
    assert not (found.first / "nvidia").exists()


def test_a_python_without_pytorch_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no PyTorch"):
        find(Interpreter(tmp_path, None).with_pip("exit 1"))
    with pytest.raises(UnsupportedError, match="does not run"):
        find(tmp_path / "nowhere")


def test_the_code_of_gpus_takes_no_disk(tmp_path: Path) -> None:
    text = '__attribute__((section(".nv_fatbin"))) char code[1 << 22] = {1}; char kept[4] = "kept";'
    (tmp_path / "source.c").write_text(text)
    library = tmp_path / "libtorch_cuda.so"
    subprocess.run(["cc", "-shared", "-fPIC", "source.c", "-o", library], cwd=tmp_path, check=True)
    before = library.stat()
    if not slim(tmp_path):
        pytest.skip("this filesystem cannot punch holes")
    after = library.stat()
    assert after.st_size == before.st_size and after.st_blocks < before.st_blocks - (1 << 12)
    ask = f"import ctypes; t = ctypes.CDLL({str(library)!r}); kept = ctypes.c_char.in_dll(t, 'kept')\n"
    ask += "print(ctypes.string_at(ctypes.addressof(kept), 4), ctypes.c_char.in_dll(t, 'code').value)"
    done = subprocess.run([sys.executable, "-S", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["b'kept'", r"b'\x00'"]
