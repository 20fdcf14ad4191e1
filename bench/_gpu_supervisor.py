"""Runs cases in a worker process and outlives it: a case that crashes or hangs is recorded, the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_START_S = 90.0  # more for the first case: the libraries are imported
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """``script`` reads the request whose path is its argument, and appends a JSON line per case to its ``result``."""

    script: Path
    request: Mapping[str, Any]
    environment: Mapping[str, str]
    case_limit_s: float
    end_s: float  # of time.monotonic(): what is not done by then is left out

    def run(self, cases: Sequence[Record], told: Callable[[Record], None]) -> list[Record]:
        """Every case's record, in order, told as soon as it is there. A failed worker is started again after it."""
        made: list[Record] = []

        def tell(record: Record) -> None:
            made.append(record)
            told(record)

        while len(made) < len(cases) and time.monotonic() < self.end_s:
            failure = self._round(cases[len(made) :], tell)
            if failure is None:
                break
            if failure and len(made) < len(cases):
                tell({"case": cases[len(made)], "error": failure})
        return made

    def _round(self, cases: Sequence[Record], tell: Callable[[Record], None]) -> str | None:
        """One worker's life. None: it did what it was to do; empty: time is up; else what went wrong."""
        with tempfile.TemporaryDirectory() as folder:
            result, asked = Path(folder) / "records.jsonl", Path(folder) / "request.json"
            asked.write_text(json.dumps({**self.request, "cases": list(cases), "result": str(result)}))
            process = subprocess.Popen([sys.executable, str(self.script), str(asked)], env=dict(self.environment))
            try:
                return self._watch(process, result, tell)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes], result: Path, tell: Callable[[Record], None]) -> str | None:
        seen, limit_s = 0, time.monotonic() + self.case_limit_s + _START_S
        while True:
            ended = process.poll()
            lines = result.read_text(encoding="utf-8").split("\n")[:-1] if result.exists() else []  # whole ones
            for line in lines[seen:]:
                tell(json.loads(line))
                limit_s = time.monotonic() + self.case_limit_s
            seen = len(lines)
            if ended is not None:
                return None if ended == 0 else f"the worker ended with {ended}"
            if time.monotonic() > self.end_s:
                return ""
            if time.monotonic() > limit_s:
                return f"no result in {self.case_limit_s:.0f} s"
            time.sleep(_POLL_S)
