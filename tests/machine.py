"""Fixtures: cache folders in which this machine's figures are known, so that nothing measures it again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import brim

__all__ = ["cache", "probed_home"]


@pytest.fixture(scope="session")
def probed_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("probed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        brim.probe(device="cpu")
    return home


@pytest.fixture
def cache(probed_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with nothing but the machine's figures."""
    home = tmp_path / "cache"
    shutil.copytree(probed_home, home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as these tests compute: figures are kept per number of threads
    return home
