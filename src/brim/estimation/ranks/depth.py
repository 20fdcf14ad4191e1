"""A deep model under FSDP2 from three shallow ones, by repeating two layers.

FSDP2 lets a layer's weights go while the next but one is gathered, so what frees them lies two layers on: two layers
together are what repeats (``layer_extrapolation`` asks for copies that reach one copy on).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from brim.core import Trace
from brim.estimation.layer_extrapolation import deepened

UNIT = 2
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_PAIR = re.compile(r"(?:^|(?<=\.))(\d+)\.(even|odd)(?=\.|$)")


def deepened_in_pairs(traces: Sequence[Trace], layers: int) -> Trace | None:
    """The trace with ``layers`` layers more than the first of three has, each two layers deeper than the one before.

    None where they do not repeat. ``layers`` is even.
    """
    deeper = deepened([_renamed(trace, _NUMBER, _paired) for trace in traces], layers // UNIT)
    return None if deeper is None else _renamed(deeper.trace, _PAIR, _single)


def _renamed(trace: Trace, pattern: re.Pattern[str], name: Callable[[re.Match[str]], str]) -> Trace:
    new_names: dict[str, str] = {}

    def of(module: str) -> str:
        if module not in new_names:
            new_names[module] = pattern.sub(name, module, count=1)
        return new_names[module]

    ops = tuple(op if of(op.module) == op.module else replace(op, module=of(op.module)) for op in trace.ops)
    storages = tuple(
        storage if of(storage.module) == storage.module else replace(storage, module=of(storage.module))
        for storage in trace.storages
    )
    return replace(trace, ops=ops, storages=storages)


def _paired(match: re.Match[str]) -> str:
    number = int(match[0])
    return f"{number // UNIT}.{'odd' if number % UNIT else 'even'}"


def _single(match: re.Match[str]) -> str:
    return str(int(match[1]) * UNIT + (match[2] == "odd"))
