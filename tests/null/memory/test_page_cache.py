"""Weights come out of the page cache where it has them, and past it from the drive where it has not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brim.memory.direct_io import DirectReader, OpenFiles, drop_cached, in_page_cache
from brim.memory.layout import ReadRun
from brim.memory.pool import HostSource

SIZE = (40 << 20) + 12345  # not of full pages


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    with path.open("wb") as opened:
        opened.write(os.urandom(1 << 20) * 41)
        opened.truncate(SIZE)
        os.fsync(opened.fileno())
        drop_cached(opened.fileno())
        if in_page_cache(opened.fileno(), 0, SIZE):
            pytest.skip("files are kept in RAM here")
    return path


def cached(path: Path) -> list[bool]:
    with path.open("rb") as opened:
        return [in_page_cache(opened.fileno(), at, min(1 << 20, SIZE - at)) for at in range(0, SIZE, 1 << 20)]


def read(path: Path, *, uses_page_cache: bool = True) -> bytes:
    files, target = OpenFiles(), HostSource().make(SIZE + 4096)
    files.uses_page_cache = uses_page_cache
    try:
        run = ReadRun(path=str(path), offset=0, bytes=SIZE, at=0, direct=True)
        DirectReader(lambda count: pytest.fail("it is aligned"), files).read(run, target, lambda: False)
        return bytes(target[:SIZE].numpy())
    finally:
        files.close()


def test_a_read_leaves_the_page_cache_as_it_was(file: Path) -> None:
    assert not any(cached(file))
    content = read(file)
    assert not any(cached(file))
    assert file.read_bytes() == content
    assert all(cached(file))
    assert read(file) == content
    assert all(cached(file))


@pytest.mark.parametrize("uses", [True, False])
def test_it_is_read_through_the_cache_only_where_that_has_it(
    file: Path, uses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = file.read_bytes()
    with file.open("rb") as opened:
        drop_cached(opened.fileno(), 16 << 20, 8 << 20)
    buffered, preadv = [], os.preadv

    def listening(descriptor: int, windows: list[object], offset: int) -> int:
        flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
        buffered.append((offset >> 20, not int(flags, 8) & os.O_DIRECT))
        return preadv(descriptor, windows, offset)

    monkeypatch.setattr(os, "preadv", listening)
    assert read(file, uses_page_cache=uses) == content
    assert buffered == [(0, uses), (16, False), (32, uses)]


def test_a_file_that_has_become_shorter_is_not_in_the_cache(file: Path) -> None:
    file.read_bytes()
    with file.open("rb") as opened:
        assert in_page_cache(opened.fileno(), 0, SIZE)
        assert not in_page_cache(opened.fileno(), 0, SIZE + 8192)
