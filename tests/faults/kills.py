"""What programs that are killed, interrupted or given failing calls came to, kept as rows of measurements/kills.json.

A program beside this one keeps its row where its last argument is ``--write``; docs/reliability.md tells them.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parents[2] / "measurements" / "kills.json"


def asked() -> bool:
    """Whether ``--write`` was the last argument, which is taken away."""
    return sys.argv[-1:] == ["--write"] and bool(sys.argv.pop())


def keep(command: str, **counts: Any) -> None:
    """In the place of the row of the same command."""
    rows = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else []
    row = {"command": command, **counts, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    kept = [one for one in rows if one["command"] != command]
    ROWS.write_text(json.dumps([*kept, row], indent=1) + "\n", encoding="utf-8")
