"""A machine that is known, a folder for scratch files, and small models to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from machine import cache, probed_home
from tiny_model import save_llama

__all__ = ["cache", "llama", "probed_home", "saved_llama", "scratch"]


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
