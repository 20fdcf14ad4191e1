"""What a recorded block probably was, inferred from the stack that asked for it and from when it was freed.

Nothing in a recording says what a block is for. A stack tells the phase (the model being built, forward, backward,
the optimizer), the phase in which it is freed tells the rest. Where neither tells, the category stays "".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core.trace import Category
from brim.recordings.history import ALLOC, FREE_COMPLETED, FREE_REQUESTED, Columns


class Phase(IntEnum):
    """What the program was doing. ``INPUT``, ``CACHE`` and ``WORKSPACE`` tell the category at once."""

    UNKNOWN = 0
    BUILD = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    INPUT = 5
    CACHE = 6
    WORKSPACE = 7


# Of what the frames of a stack tell, the first here wins.
_PATTERNS = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        (Phase.WORKSPACE, r"[wW]orkspace\w*\(|getNewWorkspace|ncclMem|cudnn\w*[wW]orkspace"),
        (Phase.OPTIMIZER, r"torch/optim/|^step at \S*(?:optim|adam|sgd|lion|muon|adafactor)\w*\.py"),
        (Phase.BACKWARD, r"autograd::Engine|_engine_run_backward|torch/autograd/__init__\.py|^backward at "),
        (Phase.CACHE, r"cache_utils\.py|kv_?cache|KVCache"),
        (Phase.FORWARD, r"_call_impl at |^forward at "),
        (Phase.INPUT, r"dataloader\.py|collate|pin_memory|data_loader\.py|_prepare_inputs?\b|get_batch at "),
        (
            Phase.BUILD,
            r"_apply at |load_state_dict|from_pretrained|^__init__ at |reset_parameters|safetensors",
        ),
    )
)
_STEPS = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_FIXED = {Phase.INPUT: Category.INPUT, Phase.CACHE: Category.KV_CACHE, Phase.WORKSPACE: Category.WORKSPACE}
_OF_THE_START = {
    Phase.BUILD: Category.PARAMETER,
    Phase.OPTIMIZER: Category.OPTIMIZER_STATE,
    Phase.BACKWARD: Category.GRADIENT,
} | _FIXED


def phases_of(stacks: Iterable[Sequence[str]]) -> list[Phase]:
    """The phase that each stack tells. Every frame is looked at once, however many stacks share it."""
    pattern_of_frame: dict[str, int] = {}
    phases = []
    for frames in stacks:
        for frame in frames:
            if frame not in pattern_of_frame:
                pattern_of_frame[frame] = next(
                    (i for i, (_, found) in enumerate(_PATTERNS) if found.search(frame)), len(_PATTERNS)
                )
        first = min((pattern_of_frame[frame] for frame in frames), default=len(_PATTERNS))
        phases.append(_PATTERNS[first][0] if first < len(_PATTERNS) else Phase.UNKNOWN)
    return phases


def of_the_start(phase: Phase) -> str:
    """The category of a block that was there before the first event and after the last."""
    return str(_OF_THE_START.get(phase, ""))


NAMES = ("", *map(str, Category))


def infer(columns: Columns, phases: Sequence[Phase]) -> NDArray[np.int8]:
    """The category of what each event allocates, as an index of ``NAMES``: "" for others and where nothing tells.

    ``phases`` are those of the stacks that the events' stacks number.
    """
    categories = np.zeros(len(columns.actions), np.int8)
    events = np.flatnonzero((columns.actions == ALLOC) | (columns.actions == FREE_COMPLETED))
    if not len(events):
        return categories
    stacks = columns.stacks[events]
    has_stack = (stacks >= 0) & (stacks < len(phases))
    phase = np.append(np.array(phases, np.int8), Phase.UNKNOWN)[np.where(has_stack, stacks, -1)]
    steps = np.flatnonzero(np.isin(phase, _STEPS))
    last_step = np.searchsorted(steps, np.arange(len(events)), side="right")  # 0: none yet
    step = np.append(np.int8(Phase.UNKNOWN), phase[steps])
    now = step[last_step]
    part = np.cumsum(np.append(0, step[1:] != step[:-1]))[last_step]
    place = np.zeros(len(columns.actions), np.int64)  # of each event among those
    place[events] = np.arange(len(events))
    order = place[columns.by_address[columns.actions[columns.by_address] != FREE_REQUESTED]]
    addresses, frees = columns.addresses[events][order], (columns.actions[events] == FREE_COMPLETED)[order]
    last = np.append(addresses[1:] != addresses[:-1], True)  # of its address
    freed = np.flatnonzero(~frees & ~last & np.append(frees[1:], False))
    allocations, gone = order[freed], order[np.minimum(freed + 1, len(order) - 1)]
    table = [[[_freed(was, then, same=same) for same in (False, True)] for then in Phase] for was in Phase]
    same = (part[allocations] == part[gone]).astype(np.int8)
    categories[events[allocations]] = _numbers(table)[phase[allocations], now[gone], same]
    kept = order[~frees & last]
    categories[events[kept]] = _numbers([_kept(was, Phase(int(now[-1]))) for was in Phase])[phase[kept]]
    return categories


def _numbers(names: Any) -> NDArray[np.int8]:
    """Nested lists of names as an array of indices of ``NAMES``."""
    array = np.array(names, object)
    return np.array([NAMES.index(str(name)) for name in array.ravel()], np.int8).reshape(array.shape)


def _freed(was: Phase, now: Phase, *, same: bool) -> str:
    """A block that phase ``was`` allocated and freed in phase ``now``; ``same``: no other phase came between."""
    if was in _FIXED:
        return _FIXED[was]
    if was is Phase.FORWARD and not same:
        return Category.ACTIVATION if now is Phase.BACKWARD else Category.TEMPORARY
    if was is Phase.BACKWARD and not same:
        return Category.GRADIENT
    return "" if was is Phase.UNKNOWN else Category.TEMPORARY


def _kept(was: Phase, now: Phase) -> str:
    """A block that is in use when the recording ends in phase ``now``."""
    if was is Phase.FORWARD:
        return Category.ACTIVATION if now in (Phase.FORWARD, Phase.BACKWARD) else ""
    return of_the_start(was)
