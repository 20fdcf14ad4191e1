"""Being told that PyTorch has been imported, by a module that stands in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from brim.run.launch_torch import when_imported


def test_all_that_wait_are_told_once_the_whole_module_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import builtins\nready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    told: list[tuple[str, bool]] = []
    for name in ("first", "second"):
        when_imported(lambda name=name: told.append((name, sys.modules["torch"].ready)))  # type: ignore[misc]
    import torch

    assert torch.ready  # type: ignore[attr-defined]
    assert sorted(told) == [("first", True), ("second", True)]
