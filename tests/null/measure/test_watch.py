"""``brim.watch`` without a GPU: what memory did is written when it runs out, whole or not, and no error is hidden."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import brim
from brim.core import EventKind, Timeline
from brim.errors import UsageError
from brim.measure import watch as watching
from brim.recordings import snapshot
from brim.report.explain import summary
from brim.units import MIB

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there CUDA's recorder is used: tests/gpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.brim"


def test_running_out_of_memory_writes_what_memory_did_and_the_error_goes_on(path):
    error = MemoryError("no more")
    with pytest.raises(MemoryError) as caught, brim.watch(path):
        raise error
    assert caught.value is error
    assert f"brim explain {path}" in caught.value.__notes__[0]
    found = Timeline.read(path)
    assert found.measured
    assert found.out_of_memory is not None
    assert found.facts["peak_rss_bytes"] == found.peak_bytes("ram") > 0


def test_pytorchs_own_error_for_want_of_ram_counts(path):
    with pytest.raises(RuntimeError, match="allocate memory"), brim.watch(path):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert Timeline.read(path).out_of_memory is not None


def test_other_errors_write_nothing(path):
    with pytest.raises(RuntimeError, match="shape") as caught, brim.watch(path):
        raise RuntimeError("shape")
    assert not path.exists()
    assert not hasattr(caught.value, "__notes__")


def test_growth_is_seen_and_kept_at_the_end_when_asked(path):
    with brim.watch(path, on_exit=True, interval_s=0.001):
        held = bytearray(64 * MIB)
        held[::4096] = b"x" * len(held[::4096])
        time.sleep(0.05)
    found = Timeline.read(path)
    first = next(iter(found)).bytes
    assert found.peak_bytes("ram") - first >= 56 * MIB
    assert found.out_of_memory is None
    assert len(held) == 64 * MIB


def test_without_being_asked_a_good_end_writes_nothing(path):
    with brim.watch(path) as watch:
        pass
    assert watch.written == 0
    assert not path.exists()


def test_it_is_a_decorator_for_as_many_calls_as_one_likes(path):
    @brim.watch(path, on_exit=True)
    def work(number: int) -> int:
        """Docs."""
        return number + 1

    assert (work(1), work(2), work.__doc__) == (2, 3, "Docs.")
    assert path.exists()


def test_a_nested_watch_is_refused_and_the_outer_one_goes_on(path):
    with brim.watch(path, on_exit=True), pytest.raises(UsageError, match="Another watch"), brim.watch(path):
        pass
    assert path.exists()
    with brim.watch(path):
        pass


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_entries": 0}, "above 0"),
        ({"interval_s": 0}, "above 0"),
        ({"stacks": "c"}, "stacks"),
        ({"devices": [0]}, "no CUDA"),
    ],
)
def test_impossible_requests_are_refused(path, options, told):
    with pytest.raises(UsageError, match=told), brim.watch(path, **options):
        pass
    with brim.watch(path):
        pass  # a refused one leaves nothing open


def test_a_folder_that_is_not_there_is_refused_before_the_run(tmp_path):
    with pytest.raises(UsageError, match="no folder"), brim.watch(tmp_path / "gone" / "run.brim"):
        pass


def test_a_file_that_cannot_be_written_does_not_hide_the_error(path):
    path.mkdir()
    (path / "in the way").touch()
    with pytest.raises(MemoryError) as caught, brim.watch(path):
        raise MemoryError
    assert "could not write" in caught.value.__notes__[0]
    with pytest.raises(UsageError, match="could not be written"), brim.watch(path, on_exit=True):
        pass
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_file_whole(path):
    path.write_text("before")
    with pytest.raises(OSError, match="disk full"), watching.replacing(path) as made:
        made.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "before"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_samples_are_bounded_and_the_peak_stays():
    recorder = watching.RamRecorder(64, 1e-4)
    recorder._samples = [(float(at), 1000 + (at == 37)) for at in range(64)]
    recorder._sample()
    assert len(recorder._samples) <= 33
    assert (37.0, 1001) in recorder._samples


def test_what_was_resident_at_the_peak_adds_up():
    recorder = watching.RamRecorder(64, 1.0)
    recorder._samples = [(at, size * MIB) for at, size in ((0.0, 500), (1.0, 564), (2.0, 564), (3.0, 566), (4.0, 90))]
    made = recorder.timeline("end")
    found = summary(made)
    assert [(one.name, one.bytes, one.count) for one in found.by_label] == [("resident memory", 566 * MIB, 1)]
    assert found.allocated_bytes == made.facts["peak_rss_bytes"] == 566 * MIB
    assert sum(one.bytes if one.kind is EventKind.ALLOC else -one.bytes for one in made) == 90 * MIB


def test_the_thread_ends_with_the_block(path):
    with brim.watch(path):
        assert any(thread.name == "brim-watch" for thread in threading.enumerate())
    assert not any(thread.name == "brim-watch" for thread in threading.enumerate())


def test_what_the_cuda_recorder_writes_is_read_by_the_snapshot_reader(path, monkeypatch):
    frames = [{"filename": "train.py", "line": 3, "name": "step"}]
    event = {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "time_us": 1, "frames": frames}
    recorded = {"segments": [], "device_traces": [[event]], "allocator_settings": {}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: recorded)
    watching.CudaRecorder("", 1, None, "python").write(path, why="")
    assert snapshot.read(path).stacks == (("step at train.py:3",),)


class Failing(watching.RamRecorder):
    """Tells of a failed allocation at once, as PyTorch's observer does."""

    def start(self, on_out_of_memory):
        super().start(on_out_of_memory)
        on_out_of_memory()


@pytest.mark.parametrize("on_exit", [False, True])
def test_a_good_end_leaves_the_recording_of_a_failure_that_was_survived(path, monkeypatch, on_exit):
    monkeypatch.setattr(watching, "RamRecorder", Failing)
    with brim.watch(path, on_exit=on_exit) as watch:
        pass  # the program caught the error and went on
    assert watch.written == 1
    assert Timeline.read(path).out_of_memory is not None
