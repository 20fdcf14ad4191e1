"""What of a rehearsal needs no device."""

from __future__ import annotations

import functools
import pickle
import sys
from pathlib import Path

import pytest

from brim.errors import UsageError
from brim.rehearsal.rehearse import _program_of


def step(width: int = 1) -> None:
    """A step of a module that another process finds."""


def test_a_step_of_a_notebook_wants_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told at once: pickle takes such a function by its name, which in the other process is another program's."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    found = _program_of(functools.partial(step, 2), tmp_path, 3)
    assert str(tmp_path / "step.pickle") in found.read_text(encoding="utf-8")
    assert pickle.loads((tmp_path / "step.pickle").read_bytes()).args == (2,)
    monkeypatch.setattr(sys.modules["__main__"], "step", step, raising=False)
    monkeypatch.setattr(step, "__module__", "__main__")
    with pytest.raises(UsageError, match="install cloudpickle"):
        _program_of(functools.partial(step, 2), tmp_path, 3)


def test_what_cannot_be_pickled_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match="cannot be pickled"):
        _program_of(lambda: None, tmp_path, 3)
