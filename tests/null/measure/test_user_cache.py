"""What is made once is kept, and where nothing can be kept it is made for one process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from brim.errors import TransferError
from brim.measure import user_cache
from brim.measure.user_cache import build_once, cache_folder


def _fill(folder: Path) -> None:
    (folder / "made").write_text("once")


def test_it_is_made_once_and_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        build_once(cache_folder() / "kind" / "name", lambda folder: 1 // 0)
    assert list((tmp_path / "brim" / "kind").iterdir()) == []
    folder = build_once(cache_folder() / "kind" / "name", _fill)
    assert build_once(cache_folder() / "kind" / "name", pytest.fail) == folder == tmp_path / "brim" / "kind" / "name"


def test_without_a_cache_it_is_made_in_a_folder_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(user_cache, "_own_folders", {})
    with pytest.warns(UserWarning, match="next run measures and computes again") as told:
        folder = build_once(cache_folder() / "kind" / "name", _fill)
        build_once(cache_folder() / "kind" / "other", _fill)
    assert len(told) == 1 and folder.is_relative_to(tmp_path)
    assert build_once(cache_folder() / "kind" / "name", pytest.fail) == folder
    user_cache._remove(os.getpid(), user_cache.own_folder())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_while_it_is_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(user_cache, "_own_folders", {})

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(TransferError, match="XDG_CACHE_HOME"):
        build_once(cache_folder() / "kind" / "name", full)


def test_a_cache_disk_that_is_full_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other disk here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(other))
    monkeypatch.setattr(user_cache, "_own_folders", {})

    def fill(folder: Path) -> None:
        if folder.is_relative_to(tmp_path):
            raise TransferError("Cannot write it.", "No space left on device.")
        _fill(folder)

    with pytest.warns(UserWarning, match="No space left on device"):
        folder = build_once(cache_folder() / "kind" / "name", fill)
    assert [path.name for path in folder.iterdir()] == ["made"] and list((tmp_path / "brim" / "kind").iterdir()) == []
    user_cache._remove(os.getpid(), user_cache.own_folder())
    assert not folder.exists()


def test_of_two_at_once_one_makes_it(tmp_path: Path) -> None:
    def slowly(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.2)
        _fill(folder)

    made: list[Path] = []
    makers = [threading.Thread(target=build_once, args=(tmp_path / "name", slowly)) for _ in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(made) == 1 and [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_lock_that_goes_while_it_is_looked_at_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever held the lock removes its file, and the next one makes another: between any two looks at it too."""
    found = Path.stat
    looks: list[Path] = []

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == ".name.lock":
            looks.append(path)
            if len(looks) <= 2:
                path.unlink()
            if len(looks) == 1:
                path.touch()  # another process holds the lock that stands here now, and is done before the next look
        return found(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    build_once(tmp_path / "name", _fill)
    assert len(looks) == 3 and [path.name for path in tmp_path.iterdir()] == ["name"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".name.partial-abc").mkdir()
    (tmp_path / ".name.lock").touch()
    build_once(tmp_path / "name", _fill)
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX's")
def test_what_is_no_file_of_its_own_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    assert user_cache.load_text(tmp_path / "file") is not None
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "zeros", "folder"):
        assert user_cache.load_text(tmp_path / name) is None, name
    user_cache.store_text(tmp_path / "link", "[]")  # in its place: what it leads to stays
    assert (tmp_path / "file").read_text() == "{}" and (tmp_path / "link").read_text() == "[]"
    user_cache.store_text(tmp_path / "pipe", "[]")
    assert user_cache.load_text(tmp_path / "pipe") == "[]"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX's")
def test_a_folder_in_which_a_pipe_lies_is_made_again(tmp_path: Path) -> None:
    folder = user_cache.build_once(tmp_path / "made", lambda into: (into / "a").touch())
    (folder / "a").unlink()
    os.mkfifo(folder / "a")
    user_cache.build_once(tmp_path / "made", lambda into: (into / "a").touch())
    assert (folder / "a").is_file()
