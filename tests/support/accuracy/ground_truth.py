"""Where the published measurements lie: ``$BRIM_GROUND_TRUTH``, else beside the repository."""

from __future__ import annotations

import csv
import os
from pathlib import Path


def folder() -> Path:
    return Path(os.environ.get("BRIM_GROUND_TRUTH") or Path(__file__).parents[4] / "shared" / "ground_truth")


def rows(name: str) -> list[dict[str, str]]:
    """The rows of one table, by column name. Raises FileNotFoundError where the table is absent."""
    with (folder() / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
