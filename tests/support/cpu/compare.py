"""Lay a predicted and a measured CPU run side by side: peaks, and where the sequences of sizes part."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from brim.core import Trace
from brim.predict.tracer import trace
from support.cpu.truth import memory_events, peak_bytes


def predicted_events(made: Trace) -> list[tuple[int, str]]:
    """Allocations and frees of a trace in the order of its clock, each with the last operation begun."""
    names = {op.at: f"{op.name} [{op.module}]" for op in made.ops}
    rows = [(s.born, s.bytes) for s in made.storages]
    rows += [(s.died, -s.bytes) for s in made.storages if s.died is not None]
    ticks = sorted([*rows, *((at, 0) for at in names)])
    found, name = [], ""
    for at, count in ticks:
        name = names.get(at, name)
        if count:
            found.append((count, name))
    return found


def compare(build: Callable[[], Callable[[], Any]], steps: int = 3, floor: int = 64) -> tuple[int, int, list[str]]:
    """Predicted and measured peak, and a diff of the two sequences of sizes of at least ``floor`` bytes."""
    predicted = predicted_events(trace(build, steps=steps, target="cpu"))
    measured = memory_events(build, steps)
    mine = [e for e in predicted if abs(e[0]) >= floor]
    real = [e for e in measured if abs(e[0]) >= floor]
    matcher = difflib.SequenceMatcher(None, [e[0] for e in mine], [e[0] for e in real], autojunk=False)
    lines = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            lines.append("--")
            lines += [f"  predicted {count:>12} {name}" for count, name in mine[a:b]]
            lines += [f"  measured  {count:>12} {name}" for count, name in real[c:d]]
    return peak_bytes(predicted), peak_bytes(measured), lines
