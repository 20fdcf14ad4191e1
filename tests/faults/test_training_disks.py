"""Disks that fail or are full during a whole training: one error, the last checkpoint is whole, and resuming from it
ends where a training without faults does."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from brim.errors import TransferError
from brim.run.checkpoint.reading import latest, steps
from brim.run.train import report as training_report
from brim.run.train.loop import Training, train
from brim.run.train.report import METRICS_FILE
from support.failing import Calls, full
from support.tiny_model import held
from support.trainings import course, request, same_weights

STEPS = 3
OPTIONS: dict[str, Any] = {"steps": STEPS, "save_every": 1, "offload_optimizer": "disk", "clip_norm": 1.0}


def is_scratch(fd: int, *_: object) -> bool:
    """Whether the call is about the scratch file, which has the optimizer's states."""
    opened = str(Path(f"/proc/self/fd/{fd}").readlink())
    return "/#" in opened and opened.endswith(" (deleted)")  # it never had a name


def run(model: Path, data: Path, output: Path, **more: Any) -> Training:
    return train(request(model, data, output, **OPTIONS, **more))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "code", "only_states"),
    [
        ("pwrite", errno.ENOSPC, True),
        pytest.param("pwrite", errno.EIO, True, marks=pytest.mark.slow),  # as the one before, with another number
        ("preadv", errno.EIO, True),
        ("pwrite", errno.ENOSPC, False),
        ("fsync", errno.EIO, False),
    ],
)
def test_a_call_that_fails_costs_no_checkpoint_and_the_training_can_go_on(
    name: str, code: int, only_states: bool, tiny: Path, text: Path, tmp_path: Path, scratch: Path,
    quick_trainings: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole, before = run(tiny, text, tmp_path / "whole"), held(scratch)
    calls = Calls(monkeypatch, name, code, is_scratch if only_states else None)
    run(tiny, text, tmp_path / "counted")
    total, failed = calls.count, 0
    assert total >= 6
    # Here every write of states; each call on a checkpoint's files and each read of states are tested where they are.
    for n in range(1, total + 1, 1 if only_states and name == "pwrite" else 1 + total // 9):
        output = tmp_path / f"run-{n}"
        calls.fail(n)
        try:
            found = run(tiny, text, output)
        except TransferError as error:
            failed += 1
            assert os.strerror(code) in str(error)
            del error
        else:
            assert found.losses == whole.losses
        calls.fail(0)
        assert held(scratch) == before
        assert [path for path in output.rglob(".*") if path.name.endswith(".partial")] == []
        if steps(output):
            assert len(course(output)) - 1 <= latest(output).step <= STEPS
        run(tiny, text, output, resume=True)
        assert course(output) == course(tmp_path / "whole"), n
        assert same_weights(output, tmp_path / "whole"), n
    assert failed or name == "preadv"  # what was read ahead is read again


@pytest.mark.thorough
def test_a_disk_that_fills_up_ends_the_training_and_room_lets_it_go_on(
    tiny: Path, text: Path, tmp_path: Path, scratch: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny, text, tmp_path / "whole")

    def on_step(report: Any) -> None:
        if report.step == 2:
            monkeypatch.setattr(os, "pwrite", full)

    with pytest.raises(TransferError, match="No space left"):
        train(request(tiny, text, tmp_path / "run", **OPTIONS), on_step=on_step)
    monkeypatch.undo()
    assert latest(tmp_path / "run").step == 1
    run(tiny, text, tmp_path / "run", resume=True)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_course_that_cannot_be_written_is_one_error(
    tiny: Path, text: Path, tmp_path: Path, scratch: Path, quick_trainings: None
) -> None:
    output = tmp_path / "output"
    (output / METRICS_FILE).mkdir(parents=True)
    before = held(scratch)
    with pytest.raises(TransferError, match=METRICS_FILE) as raised:
        run(tiny, text, output)
    assert held(scratch) == before  # while the error, with all that its frames hold, is still there
    del raised


def test_a_training_that_needs_no_disk_needs_no_scratch_folder(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", str(tmp_path / "there is none"))
    found = train(request(tiny, text, tmp_path / "output", steps=2))
    assert len(found.losses) == 2
    assert found.measured_bytes["disk"] == found.promised_bytes["disk"] == 0
    assert found.timeline.facts["held_bytes.disk"] == 0


@pytest.mark.parametrize("bad", [1, 3])  # as the file begins, and at the first step
def test_a_disk_that_refuses_what_is_only_shown_does_not_end_a_training(
    bad: int, tiny: Path, text: Path, tmp_path: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, writes = threading.active_count(), itertools.count(1)
    monkeypatch.setattr(training_report._Board, "_write", lambda *_: full() if next(writes) >= bad else None)
    with pytest.warns(UserWarning, match="Reports to TensorBoard end here; the training continues: No space") as told:
        found = train(request(tiny, text, tmp_path / "output", steps=2, report_to=["tensorboard"]))
    assert len(found.losses) == len(course(tmp_path / "output")) == 2
    assert len(told) == 1
    assert threading.active_count() == before
