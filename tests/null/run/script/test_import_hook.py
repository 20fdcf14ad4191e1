"""Being told that PyTorch has been imported, by a module that stands in for it."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from pathlib import Path

import pytest

from brim.run.script.import_hook import when_imported


def test_all_that_wait_are_told_once_the_whole_module_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import builtins\nready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    told: list[tuple[str, bool]] = []
    for name in ("first", "second"):
        when_imported("torch", lambda module, name=name: told.append((name, module.ready)))  # type: ignore[misc]
    import torch

    assert torch.ready  # type: ignore[attr-defined]
    assert sorted(told) == [("first", True), ("second", True)]


def test_questions_where_it_is_and_imports_that_fail_come_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """datasets and transformers ask whether PyTorch is installed, and import it later or never."""
    (tmp_path / "torch.py").write_text("import builtins\nif not builtins.mended: raise ImportError('damaged')\n")
    monkeypatch.setattr(builtins, "mended", False, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    told: list[str] = []
    for name in ("first", "second"):
        when_imported("torch", lambda _, name=name: told.append(name))  # type: ignore[misc]
    for _ in range(2):
        assert importlib.util.find_spec("torch") is not None
    with pytest.raises(ImportError, match="damaged"):
        importlib.import_module("torch")
    assert told == []
    monkeypatch.setattr(builtins, "mended", True)
    importlib.import_module("torch")

    assert sorted(told) == ["first", "second"] and sys.meta_path == before
