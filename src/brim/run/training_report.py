"""What a training says while it runs: a line per step on the terminal, in ``metrics.jsonl`` and in TensorBoard."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from brim.units import format_bytes, format_seconds

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step. ``moved_bytes`` is keyed by way (``ram->disk``); what went to disk wears a drive. ``gpu_use`` is the
    share of the last moments in which the GPU computed; None where there is none."""

    step: int  # from 1 on
    steps: int
    loss: float
    lr: float
    tokens: int
    step_s: float
    peak_bytes: Mapping[str, int]
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    gpu_use: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s if self.step_s else 0.0

    @property
    def written_bytes(self) -> int:
        """To disk."""
        return sum(count for way, count in self.moved_bytes.items() if way.endswith("->disk"))

    def to_json(self) -> dict[str, Any]:
        made = dataclasses.asdict(self)
        return made | {"tokens_per_s": self.tokens_per_s, "written_bytes": self.written_bytes}

    def line(self) -> str:
        """For people."""
        peaks = ", ".join(f"{tier.upper()} {format_bytes(count)}" for tier, count in self.peak_bytes.items())
        moved = "".join(f"  {way} {format_bytes(count)}" for way, count in self.moved_bytes.items() if count)
        used = "" if self.gpu_use is None else f"  GPU {self.gpu_use:.0%}"
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  "
            f"{format_seconds(self.step_s)}  {peaks}{moved}{used}"
        )


class Metrics:
    """Appends each step to ``metrics.jsonl`` in ``folder``, and to TensorBoard's files where that is installed.

    Steps from ``resumed_at`` on that the file has already (written after the last checkpoint) are dropped first.
    """

    def __init__(self, folder: Path, *, resumed_at: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        kept = _until(path, resumed_at) if resumed_at and path.exists() else []
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder)

    def write(self, report: StepReport) -> None:
        self._file.write(json.dumps(report.to_json()) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board(report)

    def note(self, step: int, text: str) -> None:
        """Something that happened between steps."""
        self._file.write(json.dumps({"step": step, "note": text}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _until(path: Path, step: int) -> list[str]:
    """Lines up to ``step``; a last line that a killed run left unfinished is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if found <= step:
            kept.append(line)
    return kept


def _tensorboard(folder: Path) -> Callable[[StepReport], None] | None:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(report: StepReport) -> None:
        scalars = {"loss": report.loss, "lr": report.lr, "tokens_per_s": report.tokens_per_s, "step_s": report.step_s}
        scalars |= {f"peak_bytes/{tier}": float(count) for tier, count in report.peak_bytes.items()}
        if report.gpu_use is not None:
            scalars["gpu_use"] = report.gpu_use
        scalars |= {f"moved_bytes/{way}": float(count) for way, count in report.moved_bytes.items()}
        for name, value in scalars.items():
            writer.add_scalar(name, value, report.step)
        writer.flush()

    return write
