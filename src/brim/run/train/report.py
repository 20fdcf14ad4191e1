"""Reports of a running training: a line per step on the terminal, in ``metrics.jsonl`` and in TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.core.files import open_to_write, write_text
from brim.errors import TransferError, UnsupportedError
from brim.units import format_bytes, format_seconds

METRICS_FILE = "metrics.jsonl"
WANDB_RUN = "wandb-run-id"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report of a step. ``moved_bytes`` is keyed by link (``ram->disk``); bytes written to disk wear a drive.
    ``gpu_use`` is the recent share of time in which the GPU computed; None without a GPU."""

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
        """Bytes written to disk."""
        return sum(count for way, count in self.moved_bytes.items() if way.endswith("->disk"))

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return values | {"tokens_per_s": self.tokens_per_s, "written_bytes": self.written_bytes}

    def line(self) -> str:
        """The line for the terminal."""
        peaks = ", ".join(f"{tier.upper()} {format_bytes(count)}" for tier, count in self.peak_bytes.items())
        moved = "".join(f"  {way} {format_bytes(count)}" for way, count in self.moved_bytes.items() if count)
        used = "" if self.gpu_use is None else f"  GPU {self.gpu_use:.0%}"
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  "
            f"{format_seconds(self.step_s)}  {peaks}{moved}{used}"
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The mean loss of every token with a label after ``step`` steps."""

    step: int
    loss: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "eval_loss": self.loss, "eval_s": self.seconds}

    def line(self) -> str:
        """The line for the terminal."""
        perplexity = math.exp(self.loss) if self.loss < 700 else math.inf
        return f"step {self.step}  evaluation: loss {self.loss:.4f}, perplexity {perplexity:.4g}"


class Metrics:
    """Appends each step to ``metrics.jsonl`` in ``folder``, and to the ``reporters`` of ``report_to``.

    ``report_to`` of None is TensorBoard if it is installed. ``settings`` are the training's options, for reporters
    that show them. When resuming, steps after ``resumed_at`` that the file already has (written after the last
    checkpoint) are dropped first. Raises TransferError when the disk refuses.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed_at: int = 0,
        report_to: Sequence[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = folder / METRICS_FILE
        with self._disk_errors():
            folder.mkdir(parents=True, exist_ok=True)
            lines = _lines_until(self._path, resumed_at) if resumed_at and self._path.exists() else []
            write_text(self._path, "".join(f"{line}\n" for line in lines), alone=True)
            self._file = os.fdopen(open_to_write(self._path, append=True), "a", encoding="utf-8")
        names = set(report_to) if report_to is not None else {"tensorboard"} if has_tensorboard() else set()
        self._boards: list[_Board | _Wandb] = []
        if "tensorboard" in names:
            with _or_without("TensorBoard"):
                self._boards.append(_Board(folder, resumed_at))
        if "wandb" in names:
            with _or_without("wandb"):
                self._boards.append(_Wandb(folder, settings or {}, resumes=resumed_at > 0))

    def write(self, report: StepReport) -> None:
        self._append(report.to_json())
        self._show(_scalars(report), report.step)

    def evaluated(self, report: EvaluationReport) -> None:
        self._append(report.to_json())
        self._show({"eval_loss": report.loss}, report.step)

    def _show(self, scalars: Mapping[str, float], step: int) -> None:
        shown, self._boards = self._boards, []
        for board in shown:
            with _or_without(board.name), contextlib.ExitStack() as undo:
                undo.callback(board.close)
                board.write(scalars, step)
                undo.pop_all()
                self._boards.append(board)

    def note(self, step: int, text: str) -> None:
        """Record an event between steps."""
        self._append({"step": step, "note": text})

    def _append(self, document: Mapping[str, Any]) -> None:
        with self._disk_errors():
            self._file.write(json.dumps(document) + "\n")
            self._file.flush()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransferError(
                f"Cannot write the log of the training to {self._path}.",
                f"{error.strerror or error}.",
                "Free some disk space and continue with --resume.",
            ) from error

    def close(self) -> None:
        for board in self._boards:
            with _or_without(board.name):
                board.close()
        with contextlib.suppress(OSError):  # the write has already raised for bytes that cannot be flushed
            self._file.close()


@contextlib.contextmanager
def _or_without(name: str) -> Iterator[None]:
    """Continue without a reporter that the disk refuses: ``metrics.jsonl`` has the same numbers."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"Reports to {name} end here; the training continues: {error.strerror or error}.", stacklevel=4)


def finished(done: int, steps: int, output: Path) -> str:
    """The note for a training that is resumed after its last step."""
    return f"The training is finished: it has done {done} of {steps} steps. Its model is in {output}."


def logged_steps(folder: Path) -> int:
    """Number of steps in the ``metrics.jsonl`` of ``folder``; 0 if there is none."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return 0
    with path.open(encoding="utf-8", errors="replace") as file:
        return sum('"loss"' in line for line in file)


def _lines_until(path: Path, step: int) -> list[str]:
    """Lines up to ``step``; an incomplete last line of a killed run is dropped."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if number <= step:
            lines.append(line)
    return lines


def has_tensorboard() -> bool:
    """True if TensorBoard, an optional package, is installed."""
    return is_installed("tensorboard")


def is_installed(package: str) -> bool:
    """True if ``package`` can be imported; it is not imported."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


_boards = itertools.count()  # makes names unique within a second


class _Board:
    """TensorBoard's files. Steps of an earlier run after ``resumed_at`` are marked as void."""

    name = "TensorBoard"

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # A file for each run of a training, in their order by name, as TensorBoard reads them.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_boards)}"
        (folder / "tensorboard").mkdir(exist_ok=True)
        self._file = (folder / "tensorboard" / name).open("xb", buffering=0)
        with contextlib.ExitStack() as undo:
            undo.callback(self._file.close)
            began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._record(file_version="brain.Event:2"))
            self._write(self._record(step=resumed_at + 1, session_log=began))
            undo.pop_all()

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(self._record(step=step, summary=self._summary(value=values)))

    def _record(self, **values: Any) -> bytes:
        record: bytes = self._event(wall_time=time.time(), **values).SerializeToString()
        return record

    def _write(self, event: bytes) -> None:
        """Write at once and in this thread: errors in the thread of torch's SummaryWriter end in a traceback."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event)
        left = record.getbuffer()
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


class _Wandb:
    """A run of Weights & Biases, with its files below ``folder``; a resumed training continues its run.

    ``WANDB_PROJECT``, ``WANDB_MODE`` and its other environment variables decide where it is sent.
    """

    name = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resumes: bool) -> None:
        wandb: Any = importlib.import_module("wandb")
        name = folder / WANDB_RUN
        run_id = name.read_text(encoding="utf-8").strip() if resumes and name.exists() else None
        project = os.environ.get("WANDB_PROJECT", "brim")
        self._run = wandb.init(
            project=project, dir=str(folder), config=dict(settings), id=run_id, resume="allow" if run_id else None
        )
        write_text(name, str(self._run.id), alone=True)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def _scalars(report: StepReport) -> dict[str, float]:
    scalars = {"loss": report.loss, "lr": report.lr, "tokens_per_s": report.tokens_per_s, "step_s": report.step_s}
    scalars |= {f"peak_bytes/{tier}": float(count) for tier, count in report.peak_bytes.items()}
    if report.gpu_use is not None:
        scalars["gpu_use"] = report.gpu_use
    return scalars | {f"moved_bytes/{way}": float(count) for way, count in report.moved_bytes.items()}


def check_reporters(report_to: Sequence[str] | None) -> None:
    """Raise UnsupportedError for a reporter whose package is missing, before anything takes long."""
    for name in report_to or ():
        if name != "none" and not is_installed(name):
            raise UnsupportedError(
                f"Cannot report to {name}.", f"The package {name} is not installed.", f"Run: pip install {name}"
            )
