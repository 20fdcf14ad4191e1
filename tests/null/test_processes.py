"""Children that end with their parent, and temporary folders that killed processes do not leave for good."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from brim.processes import bound, temporary_folder
from support.forked import forked

PREFIX = "brim-of-a-test-"

linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


def gone_within(pid: int, seconds: float) -> bool:
    """Whether that process, no child of this one, ends in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@linux
def test_what_a_killed_process_has_started_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"

    def parent() -> None:
        write = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(60)"
        subprocess.run(bound([sys.executable, "-S", "-c", write]), check=True)

    pid = forked(parent)
    while not (told.exists() and told.read_text().endswith(".")):
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert gone_within(int(told.read_text()[:-1]), 10)


@linux
def test_a_child_that_begins_after_its_parent_s_end_does_nothing(tmp_path: Path) -> None:
    command = bound([sys.executable, "-S", "-c", "print('here')"])
    stranger = [str(os.getpid() + 1 if part == str(os.getpid()) else part) for part in command]
    done = subprocess.run(stranger, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert subprocess.run(command, capture_output=True, text=True).stdout == "here\n"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_gone_at_the_end(temporary: Path) -> None:
    with pytest.raises(ZeroDivisionError), temporary_folder(PREFIX) as made:
        (made / "file").touch()
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_nothing_else(temporary: Path) -> None:
    def killed() -> None:
        with temporary_folder(PREFIX) as made:
            (made / "file").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(killed), 0)
    assert len(list(temporary.iterdir())) == 1
    (temporary / "another's").mkdir()
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "another's")
    with temporary_folder(PREFIX) as one, temporary_folder(PREFIX) as other:
        assert one.is_dir() and other.is_dir(), "one in use was taken for one that was left"
        assert set(temporary.iterdir()) == {
            one,
            other,
            *(temporary / name for name in ("another's", f"{PREFIX}file", f"{PREFIX}link")),
        }


def test_many_at_once_each_have_one_to_the_end(temporary: Path) -> None:
    lost: list[Path] = []

    def use() -> None:
        for _ in range(20):
            with temporary_folder(PREFIX) as made:
                (made / "file").touch()
                time.sleep(0.001)
                if not (made / "file").exists():
                    lost.append(made)

    several = [threading.Thread(target=use) for _ in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert lost == [] and list(temporary.iterdir()) == []
