"""Programs in children of this process, plain and under ``brim run``, and what they take with nothing to restrict."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it, and it takes a while
from torch import nn

import brim
import brim.run.script.decide  # once here, not in every child
from brim.run.script import hooks
from brim.run.script.run import run
from brim.run.script.script import Program, execute
from brim.run.script.settings import Settings
from support.cpu.truth import memory_events, peak_bytes

OWN = str(Path(brim.__file__).parent) + os.sep  # as tracebacks name it; a checkout may have any name, brim's too
SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended, and what it wrote. ``found`` is what the child had to say besides."""

    code: int
    out: str
    err: str
    found: Any = None


@dataclass(kw_only=True)
class Told:
    """For the child: what it is to tell its parent."""

    value: Any = field(default=None)


def hear_interrupts() -> None:
    """In a child before it begins: what a shell starts in the background has SIGINT ignored, and so its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def in_child(work: Callable[[Told], int | None], folder: Path) -> Ended:
    """Call ``work`` in a copy of this process, PyTorch imported and warm, with stdin empty and its own output."""
    files = [folder / name for name in ("out", "err", "found")]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(work, *files)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err, found = (file.read_text(encoding="utf-8") if file.exists() else "" for file in files)
    return Ended(code=code, out=out, err=err, found=json.loads(found) if found else None)


def _child(work: Callable[[Told], int | None], out: Path, err: Path, found: Path) -> None:
    code = 1
    try:
        # PyTorch's pool of threads is made anew in a child, which threads of autograd's would do at once, and abort
        # (caffe2/utils/threadpool/pthreadpool-cpp.cc).
        torch.set_num_threads(torch.get_num_threads())
        gc.collect()
        _disown_what_lives()
        gc.freeze()  # the collector need not go through it
        for number, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115  # for the rest of the child's life
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
        importlib.reload(warnings)  # without what pytest records them with
        warnings.resetwarnings()
        sys.meta_path[:] = [one for one in sys.meta_path if not type(one).__module__.startswith("_pytest")]
        told = Told()
        try:
            code = work(told) or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if told.value is not None:
            found.write_text(json.dumps(told.value), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _disown_what_lives() -> None:
    """Models and optimizers that are alive in this process are not the program's: brim is not to see them."""
    strangers = [one for found in hooks.living_of(nn.Module, torch.optim.Optimizer) for one in found]
    disowned = {id(one): one for one in strangers}  # kept alive, so that no new object gets such an identity
    known = hooks._all_objects
    hooks._all_objects = lambda: [one for one in known() if id(one) not in disowned]  # type: ignore[assignment]


def program(name: str, *arguments: str) -> Program:
    """A script of ``tests/scripts``, or with a dot in front a module."""
    if name.startswith("."):
        return Program(target=name[1:], arguments=arguments, is_module=True)
    return Program(target=str(SCRIPTS / f"{name}.py"), arguments=arguments)


def plainly(what: Program, folder: Path, *, measure: bool = True) -> Ended:
    """Without brim. ``found`` is its need: the most bytes that PyTorch's CPU allocator held at once."""

    def work(told: Told) -> int:
        if measure:
            code: list[Any] = []
            told.value = peak_bytes(memory_events(lambda: _run(what, code), 0))
            return code[0] if code else 0
        execute(what)
        return 0

    return in_child(work, folder)


def _run(what: Program, code: list[Any]) -> Callable[[], Any]:
    try:
        execute(what)
    except SystemExit as error:
        code.append(error.code)
    return lambda: None


def _told_by_brim(what: Program, options: Settings) -> int:
    try:
        return run(what, options)
    except SystemExit:
        raise
    except BaseException:  # it is on stderr already
        return 1


def budgeted(what: Program, folder: Path, **settings: Any) -> Ended:
    """Under ``brim run`` with ``settings``. ``found`` is its report."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    device = "cpu" if torch.cuda.is_available() else "auto"
    options = Settings(report=report, **{"device": device, **settings})
    ended = in_child(lambda told: _told_by_brim(what, options), folder)
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else None
    return Ended(code=ended.code, out=ended.out, err=ended.err, found=found)
