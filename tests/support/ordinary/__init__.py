"""Ordinary training programs, written as documentation writes them; ``bench/ordinary_programs.py`` runs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Step = Callable[[], Any]
KINDS = (
    "functional", "generative", "graphs", "language", "library", "multimodal", "numerics", "plumbing",
    "reinforcement", "sequences", "systems", "vision",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Program:
    """``build`` makes model, optimizer and data and returns a step. ``asks`` is whether sizes or branches of the step
    depend on values that the device computes: only where whole numbers are, memory can be compared. ``merges``:
    whether the device joins equal indices of sparse tensors, which the rehearsal device does not count: compared with
    a GPU only."""

    kind: str
    name: str
    build: Callable[[], Step]
    asks: bool
    merges: bool


_PROGRAMS: list[Program] = []


def program(build: Callable[[], Step] | None = None, *, asks: bool = False, merges: bool = False) -> Any:
    """Register ``build`` as an ordinary program."""

    def register(function: Callable[[], Step]) -> Callable[[], Step]:
        kind = function.__module__.rpartition(".")[2]
        _PROGRAMS.append(Program(kind=kind, name=function.__name__, build=function, asks=asks, merges=merges))
        return function

    return register if build is None else register(build)


def programs() -> list[Program]:
    for kind in KINDS:
        importlib.import_module(f"{__name__}.{kind}")
    return sorted(_PROGRAMS, key=lambda one: (one.kind, one.name))
