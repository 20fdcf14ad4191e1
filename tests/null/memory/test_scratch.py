"""Scratch files: nobody ever finds one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from brim.memory.direct_io import OpenFiles
from brim.memory.scratch import Scratch


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")
def test_a_scratch_file_has_no_name_not_even_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed between making a file and taking its name away would leave it."""
    open_file, seen = os.open, []

    def watched(path: Any, *args: Any, **kwargs: Any) -> int:
        descriptor = open_file(path, *args, **kwargs)
        seen.append(list(tmp_path.iterdir()))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    files = OpenFiles()
    scratch = Scratch(files, directory=tmp_path)
    extent = scratch.reserve(1 << 20)
    scratch.close()
    files.close()
    assert extent.bytes == 1 << 20
    assert len(seen) >= 2 and not any(seen)  # made, and opened again past the page cache
