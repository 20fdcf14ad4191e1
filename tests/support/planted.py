"""A folder with a file for every module that Python or brim could import: one that is imported says so."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

_TELLING = "with open({marker!r}, 'a') as file:\n    file.write(__name__ + chr(10))\nraise SystemExit('imported')\n"


def plant_modules(folder: Path) -> Path:
    """Write the files into ``folder``. The file that is returned exists once one of them has been imported."""
    marker = folder / "imported.txt"
    installed = importlib.metadata.packages_distributions()
    for name in {*sys.stdlib_module_names, *installed, "brim", "sitecustomize", "usercustomize"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(_TELLING.format(marker=str(marker)))
    return marker
