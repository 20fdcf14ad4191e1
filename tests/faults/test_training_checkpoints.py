"""Whatever the disk does and whenever the process dies: the newest whole checkpoint loads, bit for bit."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import ModelError, TransferError
from brim.run.checkpoint import manifest as checkpoint_manifest
from brim.run.checkpoint.manifest import MANIFEST_NAME, read_manifest, to_text
from brim.run.checkpoint.reading import latest, read, steps
from brim.run.checkpoint.record import RECORD_NAME
from brim.run.checkpoint.saver import Checkpointer, Tensors
from support.saved_steps import content, hidden, is_whole, save, save_now, tensors_of, watched
from support.tiny_model import held


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In RAM where there is such a file system: thousands of fsyncs on a disk take minutes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.fixture
def start(folder: Path) -> Path:
    root = folder / "start"
    save_now(root, 1, 10)
    save_now(root, 2, 20)
    return root


@pytest.fixture
def root(start: Path, folder: Path) -> Path:
    return Path(shutil.copytree(start, folder / "run"))


def failing(at: int, code: int, *, for_good: bool) -> Callable[[int], None]:
    def fail(number: int) -> None:
        if number == at or (for_good and number > at):
            raise OSError(code, os.strerror(code))

    return fail


def count_calls(root: Path, step: int) -> int:
    numbers: list[int] = []
    with watched(numbers.append):
        save_now(root, step, 30)
    return len(numbers)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there"])
@pytest.mark.parametrize(
    ("code", "for_good"),
    [(errno.EIO, False), (errno.ENOSPC, False), (errno.EIO, True)],
    ids=["EIO", "ENOSPC", "dead"],
)
def test_a_disk_that_fails_at_any_call_costs_no_earlier_checkpoint(
    start: Path, folder: Path, step: int, code: int, for_good: bool
) -> None:
    total = count_calls(Path(shutil.copytree(start, folder / "counted")), step)
    assert total > 40
    for number in range(total):
        root = Path(shutil.copytree(start, folder / "run"))
        failed = False
        with watched(failing(number, code, for_good=for_good)):
            try:
                save_now(root, step, 30)
            except TransferError as error:
                failed = True
                assert error.reason
        left = latest(root)
        assert is_whole(left)
        assert left.state["seed"] in ((20, 30) if failed else (30,)), number
        save_now(root, 4, 40)
        assert hidden(root) == [], number
        assert latest(root).state["seed"] == 40
        assert len(steps(root)) == 2
        shutil.rmtree(root)


def run_killer(mode: str, root: Path) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("killed_saves.py")
    done = subprocess.run([sys.executable, str(script), mode, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.thorough
def test_a_process_killed_at_any_call_leaves_a_whole_checkpoint(folder: Path) -> None:
    found = run_killer("every", folder)
    assert len(found) > 100
    for report in found:
        assert report["whole"], report
        assert report["found"]["seed"] in (20, 30), report
        assert report["hidden"] == [] and report["then"] == 4, report
    assert {report["found"]["seed"] for report in found} == {20, 30}


@pytest.mark.thorough
def test_a_process_killed_at_fifty_random_moments_never_loses_what_was_finished(folder: Path) -> None:
    found = run_killer("random", folder)
    assert len(found) == 50
    for report in found:
        assert report["whole"] and report["skipped"] == [], report
        assert report["step"] >= report["told"], report
    assert found[-1]["step"] > 10


def flipped(path: Path, at: int, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "config.json", "brim.manifest.json", MANIFEST_NAME]
)
def test_any_flipped_bit_is_noticed_and_the_one_before_is_taken(root: Path, name: str) -> None:
    path = root / "step-000002" / name
    raw = path.read_bytes()
    for number, at in enumerate(range(0, len(raw), max(1, len(raw) // 150))):
        flipped(path, at, number % 8)
        found = latest(root)
        assert found.step == 1, at
        assert len(found.skipped) == 1 and "step-000002" in found.skipped[0]
        path.write_bytes(raw)
    assert latest(root).step == 2


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(root: Path) -> None:
    flipped(root / "step-000002" / "model.safetensors", 4100, 0)
    assert latest(root).step == 1
    save_now(root, 2, 21)
    found = latest(root)
    assert found.state["seed"] == 21 and is_whole(found) and found.skipped == ()
    assert sorted(path.name for path in root.iterdir()) == [RECORD_NAME, "step-000001", "step-000002"]


def test_a_flipped_bit_in_a_weight_is_told_by_its_name(root: Path) -> None:
    path = root / "step-000002" / "model.safetensors"
    flipped(path, path.stat().st_size - 1, 0)
    with pytest.raises(ModelError, match=r"checksum of b.weight in model.safetensors does not match"):
        read(root / "step-000002")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST_NAME])
@pytest.mark.parametrize("change", ["missing", "cut", "longer", "empty"])
def test_files_that_are_missing_or_of_another_length_are_noticed(root: Path, name: str, change: str) -> None:
    path = root / "step-000002" / name
    raw = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes({"cut": raw[:-1], "longer": raw + b"\0", "empty": b""}[change])
    assert latest(root).step == 1


@pytest.mark.parametrize("name", ["../step-000001/config.json", "/etc/hostname", ".."])
def test_a_manifest_that_lists_files_elsewhere_is_refused(root: Path, name: str) -> None:
    manifest = read_manifest(root / "step-000002")
    lying = replace(manifest, files={**manifest.files, name: manifest.files["config.json"]})
    (root / "step-000002" / MANIFEST_NAME).write_text(to_text(lying))
    with pytest.raises(ModelError, match="not a file of this folder"):
        read(root / "step-000002")


@pytest.mark.parametrize(
    ("field", "said"), [("version", "version 2"), ("kind", "kind 'Plan'"), ("more", "unknown keys")]
)
def test_a_manifest_of_another_form_is_refused(root: Path, field: str, said: str) -> None:
    path = root / "step-000002" / MANIFEST_NAME
    document = json.loads(path.read_text()) | {field: {"version": 2, "kind": "Plan"}.get(field, 1)}
    del document["checksum"]
    path.write_text(json.dumps(document | {"checksum": checkpoint_manifest._digest(document)}))
    with pytest.raises(ModelError, match=said):
        read(root / "step-000002")


def test_when_none_is_whole_the_error_says_what_is_wrong_with_each(root: Path) -> None:
    for step in (1, 2):
        (root / f"step-00000{step}" / "config.json").unlink()
    with pytest.raises(ModelError) as caught:
        latest(root)
    assert "step-000001" in str(caught.value) and "step-000002" in str(caught.value)
    with pytest.raises(ModelError, match="There is none"):
        latest(root / "elsewhere")


def test_a_checkpoint_damaged_after_it_was_verified_is_noticed_while_it_is_read(root: Path) -> None:
    found = latest(root)
    path = found.folder / "model.safetensors"
    flipped(path, path.stat().st_size - 1, 0)
    with pytest.raises(ModelError, match=r"b.weight"):
        list(found.tensors("model"))


def test_what_the_disk_changed_while_it_was_written_is_noticed_before_it_counts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def corrupting(fd: int, data: Any, offset: int) -> int:
        changed = bytearray(data)
        changed[0] ^= 1
        return real(fd, changed if offset >= 4096 else data, offset)

    monkeypatch.setattr(os, "pwrite", corrupting)
    with pytest.raises(TransferError, match=r"checksum of .* does not match"):
        save_now(root, 3, 30)
    monkeypatch.undo()
    assert latest(root).state["seed"] == 20 and hidden(root) == []


def test_after_an_error_of_the_thread_the_next_save_is_as_any(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keeper = Checkpointer(root)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TransferError, match="No space left"):
        save(keeper, 3, 30)
    monkeypatch.undo()
    assert steps(root) == [1, 2] and hidden(root) == []
    save(keeper, 4, 40)
    assert steps(root) == [2, 4]


def test_tensors_that_cannot_be_given_leave_nothing(root: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(content(30).items(), 1)
        raise TransferError("Cannot read a block.", "It could not.")

    given = tensors_of(30)
    with Checkpointer(root) as keeper:
        with pytest.raises(TransferError, match="a block"):
            keeper.save(3, [Tensors(stem="model", layout=given.layout, values=broken())], state={})
        assert hidden(root) == [] and steps(root) == [1, 2]
        save(keeper, 3, 30)
    assert latest(root).state["seed"] == 30


def test_a_disk_that_fails_in_the_middle_does_not_leave_the_giver_waiting(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, itertools.count()

    def failing_later(fd: int, data: Any, offset: int) -> int:
        if next(calls) == 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing_later)
    before = held(root)
    big = {"big": torch.randn(1 << 16)}
    given = Tensors(stem="model", layout=[("big", torch.float32, (1 << 16,))], values=big.items())
    with Checkpointer(root, staging_bytes=4096) as keeper, pytest.raises(TransferError, match="Input/output"):
        keeper.save(3, [given], state={})
    assert held(root) == before
