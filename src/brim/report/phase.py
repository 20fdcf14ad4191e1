"""The phase of a program in which memory ran out, by its stack, and advice for each phase, the best first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from brim.report import listed, read_table


@dataclass(frozen=True)
class Advice:
    """A piece of advice. ``paste`` is a command or setting to paste, "" for none; ``helps`` False: it does not help.

    ``change`` names the change that a rehearsal can make to a program to try it (``rehearsal/changes.py``), "": none.
    """

    text: str
    paste: str = ""
    helps: bool = True
    change: str = ""


class Phase(StrEnum):
    """A part of a run. ``STATES`` is an optimizer's first step, which makes them; ``OPTIMIZER`` any later one."""

    LOADING = "loading"
    FORWARD = "forward"
    ATTENTION = "attention"
    LOSS = "loss"
    BACKWARD = "backward"
    STATES = "states"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVING = "saving"


_TABLE = read_table("advice.toml")
NAMED = {
    name: Advice(**entry) if isinstance(entry, dict) else Advice(*entry) for name, entry in _TABLE["named"].items()
}
SMALLER, RECOMPUTE, PRECISION = NAMED["smaller"], NAMED["recompute"], NAMED["precision"]
FUSED, ONE_BY_ONE, CHUNKED_LOSS = NAMED["fused"], NAMED["one by one"], NAMED["chunked loss"]
STATES_IN_8_BITS, WEIGHTS_IN_16_BITS = NAMED["states in 8 bits"], NAMED["weights in 16 bits"]


def advice_of(kind: str) -> dict[str, tuple[Advice, ...]]:
    """Return the advice of a section of ``advice.toml``: by ``phase``, ``cause`` or ``family`` of a message."""
    return {name: tuple(map(_advice, entries)) for name, entries in _TABLE[kind].items()}


def _advice(entry: str | list[str] | dict[str, Any]) -> Advice:
    if isinstance(entry, str):
        return NAMED[entry[1:]] if entry.startswith("$") else Advice(entry)
    return Advice(**entry) if isinstance(entry, dict) else Advice(entry[0], entry[1])


BY_PHASE = {Phase(name): advices for name, advices in advice_of("phase").items()}
_INNERMOST, _ENCLOSING = (
    tuple((Phase(name), re.compile("|".join(listed(text)))) for name, text in _TABLE[kind].items())
    for kind in ("innermost", "enclosing")
)
_FORWARD = re.compile(r"_call_impl|\bin forward\b|^forward at |\.forward\(")
# A closure runs forward and backward inside of the optimizer's step.
_CLOSURE = re.compile(r"\bclosure\(|closure\.py|\bin closure\b|^closure at ")


def phase_of(frames: Iterable[str]) -> Phase | None:
    """Return the phase of a stack, given the innermost frame first; None if no frame shows it."""
    is_forward = False
    for line in frames:
        frame = line.replace("\\", "/").strip()
        if not is_forward:
            for phase, pattern in _INNERMOST:
                if pattern.search(frame):
                    return phase
            is_forward = _FORWARD.search(frame) is not None
        for phase, pattern in _ENCLOSING:
            if pattern.search(frame):
                return phase
        if _CLOSURE.search(frame):
            break
    return Phase.FORWARD if is_forward else None
