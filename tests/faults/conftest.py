"""A probed machine, a folder for scratch files, and small models to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import brim
from tiny_model import save_llama


@pytest.fixture(scope="session")
def probed_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which this machine's figures are known."""
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
    return home


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("BRIM_SCRATCH", str(folder))
    return folder


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def llama(saved_llama: Path, tmp_path: Path) -> Path:
    """A small model to damage: one file."""
    return shutil.copytree(saved_llama, tmp_path / "llama")
