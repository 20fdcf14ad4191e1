"""PyTorch's CUDA build, asked in a process of its own, tells what kernels allocate.

Nothing that happens to the process, or to what it answered before, makes another answer of it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import brim
from brim.device import kernels
from brim.device.kernels import KernelAnswers, Script, answers_for
from brim.device.settings import DeviceSettings
from brim.predict.lowering.cuda.build_answers import described

if TYPE_CHECKING:
    from conftest import OnDevice

_aten = torch.ops.aten
H100 = (9, 0)
SORTED: Script = (
    ("out", 0, 8192000), ("out", 1, 16384000), ("alloc", 2, 16384000), ("alloc", 3, 16384000), ("alloc", 4, 8192000),
    ("alloc", 5, 24974847), ("free", 5, 0), ("free", 4, 0), ("alloc", 8, 367103), ("free", 8, 0), ("free", 3, 0),
    ("free", 2, 0),
)  # fmt: skip


@pytest.fixture
def answers(on_device: OnDevice, tmp_path: Path) -> Iterator[KernelAnswers]:
    asked = KernelAnswers(on_device.environment, DeviceSettings.of("H100"), tmp_path / "kept" / "answers.jsonl")
    yield asked
    asked.close()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    described_call = described(operator, args, kwargs)
    assert described_call is not None
    return described_call


SORT = call(_aten.sort.default, empty(64, 32000))


def again(answers: KernelAnswers) -> KernelAnswers:
    """Another command with the same cache, whose process must not be needed."""
    other = KernelAnswers(answers._build, answers._settings, answers._path)
    other._ask = lambda text: pytest.fail("it was asked again")  # type: ignore[method-assign]
    return other


def test_a_kernel_is_asked_once_and_its_answer_kept(answers: KernelAnswers) -> None:
    assert answers.script(SORT) == SORTED
    assert again(answers).script(SORT) == SORTED


def test_what_belongs_to_the_stream_is_told_apart_and_is_in_every_answer(answers: KernelAnswers) -> None:
    for size in (64, 128):
        script = answers.script(call(_aten.mm.default, empty(size, size), empty(size, size)))
        assert script == (("out", 0, 4 * size * size), ("keep", 0, 32 << 20))


def test_what_pytorch_refuses_is_no_answer_and_is_not_asked_again(answers: KernelAnswers) -> None:
    refused = call(_aten.mm.default, empty(64, 63), empty(64, 64))
    assert answers.script(refused) is None
    assert again(answers).script(refused) is None


def test_a_process_that_was_killed_is_begun_anew(answers: KernelAnswers) -> None:
    assert answers.script(call(_aten.sort.default, empty(3, 5))) is not None
    assert answers._process is not None
    os.kill(answers._process.pid, signal.SIGKILL)
    assert answers.script(SORT) == SORTED


def test_a_process_begun_ahead_answers_the_first_call_and_is_not_begun_where_answers_are_stored(
    answers: KernelAnswers,
) -> None:
    answers.begin()
    ahead = answers._process
    assert ahead is not None
    assert answers.script(SORT) == SORTED
    assert answers._process is ahead
    other = again(answers)
    other.begin()
    assert other._process is None


def test_a_process_that_ends_ahead_of_the_first_call_changes_no_answer(
    answers: KernelAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_AHEAD", "raise SystemExit(1)")
    answers.begin()
    assert answers.script(SORT) == SORTED


def test_a_process_that_cannot_begin_gives_no_answer_and_nothing_is_kept(on_device: OnDevice, tmp_path: Path) -> None:
    gone = replace(on_device.environment, python=tmp_path / "python")
    asked = KernelAnswers(gone, DeviceSettings.of("H100"), tmp_path / "answers.jsonl")
    assert asked.script(SORT) is None
    assert not (tmp_path / "answers.jsonl").exists()


def test_without_a_compiler_there_is_no_answer_and_the_reason_is_kept(
    on_device: OnDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    unbuilt = replace(on_device.environment, folder=tmp_path / "builds")
    answers = KernelAnswers(unbuilt, DeviceSettings.of("H100"), tmp_path / "answers.jsonl")
    answers.begin()
    assert answers.script(SORT) is None
    assert answers.problem == "There is no C compiler: cc, gcc, clang is not on the PATH."
    assert not (tmp_path / "answers.jsonl").exists()


def _full(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to("/dev/full")


def _a_folder(path: Path) -> None:
    path.mkdir(parents=True)


def _foreign(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe not text")


def _torn(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('["' + "0" * 64 + '", {"script": [["alloc", 0, -5]]}]\n[1]\n["a", {"script": 7}]\n["b", {"scr')


@pytest.mark.parametrize("spoil", [_full, _a_folder, _foreign, _torn])
def test_a_cache_that_cannot_be_used_changes_no_answer(
    spoil: Callable[[Path], None], on_device: OnDevice, tmp_path: Path
) -> None:
    path = tmp_path / "kept" / "answers.jsonl"
    spoil(path)
    asked = KernelAnswers(on_device.environment, DeviceSettings.of("H100"), path)
    assert asked.script(SORT) == SORTED
    asked.close()


_SORTS = """
import pickle, sys, torch
from pathlib import Path
from brim.device.kernels import KernelAnswers
from brim.device.settings import DeviceSettings
from brim.predict.lowering.cuda.build_answers import described

build, path, first, last = sys.argv[1:]
answers = KernelAnswers(pickle.loads(bytes.fromhex(build)), DeviceSettings.of("H100"), Path(path))
for size in range(int(first), int(last)):
    arguments = (torch.empty(size, 5000, device="meta"),)
    assert answers.script(described(torch.ops.aten.sort.default, arguments, {})) is not None
answers.close()
"""


def test_two_commands_at_once_add_to_one_cache(on_device: OnDevice, tmp_path: Path) -> None:
    path, build = tmp_path / "answers.jsonl", pickle.dumps(on_device.environment).hex()
    commands = [
        subprocess.Popen([sys.executable, "-c", _SORTS, build, path, first, last])
        for first, last in (("1", "30"), ("20", "50"))
    ]
    assert [command.wait() for command in commands] == [0, 0]
    kept = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert len({key for key, _ in kept}) == 49


def test_another_build_of_pytorch_has_answers_of_its_own(on_device: OnDevice, tmp_path: Path) -> None:
    """A build is told by its files: one that was changed in place is another."""
    fetched = on_device.environment.site_packages / "torch"
    copy = tmp_path / "site" / "torch"
    for name in ("version.py", "lib/libtorch_cpu.so"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(fetched / name, copy / name) if name.startswith("lib") else shutil.copy(fetched / name, copy / name)
    build = replace(on_device.environment, site_packages=tmp_path / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.environment, "find", lambda folder: build)
        paths = []
        for text in ("", "# rebuilt\n"):
            (copy / "version.py").write_text((copy / "version.py").read_text() + text)
            answers_for.cache_clear()
            found = answers_for(H100)
            assert found is not None
            paths.append(found._path)
    answers_for.cache_clear()
    assert paths[0] != paths[1]


@pytest.mark.parametrize(
    ("reduce", "allocated_bytes"),
    [
        (lambda tensor: tensor.max(dim=2), 8_602_386_432),
        (lambda tensor: tensor.argmax(dim=2), 7_742_226_432),
        (lambda tensor: tensor.var(dim=2), 6_882_066_432),
        (lambda tensor: tensor.std(dim=2), 6_882_066_432),
        (lambda tensor: torch.var_mean(tensor, dim=2), 7_742_226_432),
        (lambda tensor: torch.aminmax(tensor, dim=2), 6_021_120_000),
    ],
)
def test_reductions_over_more_than_2_gib_take_a_workspace_for_each_part(
    on_device: OnDevice, reduce: Callable[[torch.Tensor], Any], allocated_bytes: int
) -> None:
    """The figures are those of `brim rehearse` with PyTorch 2.13."""

    def build() -> Callable[[], Any]:
        tensor = torch.rand(1200, 700, 3, 256, device="cuda")
        return lambda: reduce(tensor)

    made = brim.trace(build, steps=1, target="cuda", capability=(8, 9))
    assert made.not_modelled == ()
    assert brim.simulate(made, "RTX 4090").peak_bytes.allocated == allocated_bytes
