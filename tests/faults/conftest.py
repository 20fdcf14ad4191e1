"""A machine that is known, a folder for scratch files, and small models to damage or to train."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.tiny_model import save_llama
from support.trainings import quick_trainings, write_text

__all__ = ["quick_trainings"]


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose training steps take milliseconds."""
    return save_llama(tmp_path_factory.mktemp("saved") / "tiny", hidden=16, layers=2)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")
