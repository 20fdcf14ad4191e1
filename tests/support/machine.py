"""Fixtures: cache folders in which this machine's figures are known, so that nothing measures it again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

import brim

__all__ = ["cache", "probed_home", "share_conversions"]


def share_conversions(home: Path, factory: pytest.TempPathFactory) -> None:
    """Let converted GGUF files of all cache folders of a test run, its workers' too, be in one place.

    Converting a real model takes a quarter of a minute.
    """
    shared = _of_all_workers(factory) / "converted-gguf"
    shared.mkdir(exist_ok=True)
    (home / "brim").mkdir(exist_ok=True)
    (home / "brim" / "gguf").symlink_to(shared, target_is_directory=True)


def _of_all_workers(factory: pytest.TempPathFactory) -> Path:
    """A folder for this run of the tests, not for one worker of it."""
    return factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()


@pytest.fixture(scope="session")
def probed_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that has this machine's figures, which one worker measures for all: it takes seconds."""
    measured = _of_all_workers(tmp_path_factory) / "measured"
    with FileLock(f"{measured}.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(measured))
        brim.probe(device="cpu")
        home = shutil.copytree(measured, tmp_path_factory.mktemp("probed") / "home")
    share_conversions(home, tmp_path_factory)
    return home


@pytest.fixture
def cache(probed_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with nothing but the machine's figures."""
    home = tmp_path / "cache"
    shutil.copytree(probed_home, home, symlinks=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as these tests compute: figures are kept per number of threads
    return home
