"""Runs a program under ``brim run`` many times, each interrupted (SIGINT) at another call of a function of brim's.

``python interrupting.py SCRIPT FOLDER RAM``: MOMENTS is the list; number N's output goes to FOLDER/N.out and N.err,
and FOLDER/codes.json has how each ended. Every run is a fork that ends as an interpreter ends; what is imported is
imported once.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # every optimizer imports it, and it takes a while

import brim.run.script.decide  # noqa: F401
from brim.cli import main


@dataclass(frozen=True)
class Moment:
    """The ``number``-th call of ``name`` once ``after`` has been called; before it begins, or when it has ended.

    Without a name: the script interrupts itself in its model's first forward pass, the predicted one.
    """

    name: str = ""
    number: int = 1
    after: str = ""
    ended: bool = False


ENFORCING = "brim.run.fit:make_memory"
MOMENTS = (
    Moment(),
    Moment("brim.run.script.decide:machine"),
    Moment("brim.planning.strategy.prediction:make_states"),
    Moment("brim.predict.dispatch:RecordingMode._run", number=100),
    Moment("brim.predict.dispatch:RecordingMode._run", number=100, after="brim.planning.strategy.choose:climb_down"),
    Moment(ENFORCING, ended=True),
    Moment("brim.techniques.optimizer_offload.technique:apply", after=ENFORCING),
    Moment("brim.techniques.optimizer_offload.technique:apply", after=ENFORCING, ended=True),
    Moment("brim.run.script.hooks:_run_new_hooks"),
    Moment("brim.run.script.hooks:_run_new_hooks", ended=True),
)


def wrap(name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = name.partition(":")
    *holders, last = path.split(".")
    holder: Any = functools.reduce(getattr, holders, importlib.import_module(module))
    setattr(holder, last, around(getattr(holder, last)))


def arm(moment: Moment) -> None:
    left, begun = moment.number, not moment.after

    def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= begun
            mine = begun and left == 0
            if mine and not moment.ended:
                signal.raise_signal(signal.SIGINT)
            made = function(*args, **kwargs)
            if mine and moment.ended:
                signal.raise_signal(signal.SIGINT)
            return made

        return call

    def beginning(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            begun = True
            return function(*args, **kwargs)

        return call

    wrap(moment.name, interrupting)
    if moment.after:
        wrap(moment.after, beginning)


def run_all(script: str, folder: Path, ram: str) -> None:
    codes = []
    gc.collect()
    gc.freeze()  # or each child would look through all of it again
    for number, moment in enumerate(MOMENTS):
        pid = os.fork()
        if pid == 0:
            for handle, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{number}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), handle)
            if moment.name:
                arm(moment)
            sys.exit(main(["run", "--ram", ram, script, "0" if moment.name else "1"]))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    run_all(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
