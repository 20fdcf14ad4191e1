"""Labels, frames and categories of recorded stacks.

Nothing in a recording says what a block is for. The stack tells the phase that allocated it (the model being built,
forward, backward, the optimizer), and the phase that frees it tells the rest. Where neither does, the category is "".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core.trace import Category
from brim.recordings.history import ALLOC, FREE_COMPLETED, Columns

_MOST_FRAMES = 30  # per stack in a Timeline
_PYTHON = re.compile(r"\.py:\d+$")
_OPERATOR = re.compile(r"at::(?:native|_ops)::|torch::autograd::generated::")
_INSIDE_TORCH = re.compile(r"/torch/(?!\w*_user)|<frozen |/_inductor/|generated_cases|/contextlib\.py")


def informative_frames(frames: Sequence[str]) -> list[str]:
    """Return the Python frames; without any, the frames from the operator outwards."""
    python = [frame for frame in frames if _PYTHON.search(frame)]
    first = next((index for index, frame in enumerate(frames) if _OPERATOR.match(frame)), 0)
    return python or list(frames[first:])


def label_of(frames: Sequence[str]) -> str:
    """Return the innermost frame of the user's code, else of any Python code, else of an operator."""
    python = [frame for frame in frames if _PYTHON.search(frame)]
    users = (frame for frame in python if not _INSIDE_TORCH.search(frame))
    return next(users, "") or next(iter(python or informative_frames(frames)), "")


class Phase(IntEnum):
    """The activity of the program. ``INPUT``, ``CACHE`` and ``WORKSPACE`` imply a category.

    ``STATES`` and ``LISTS`` belong to an optimizer's step: it creates its states, and updates lists of tensors at
    once (``foreach``).
    """

    UNKNOWN = 0
    BUILD = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    INPUT = 5
    CACHE = 6
    WORKSPACE = 7
    STATES = 8
    LISTS = 9


# The first that matches any frame of a stack wins.
_PATTERNS = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        (Phase.WORKSPACE, r"[wW]orkspace\w*\(|getNewWorkspace|ncclMem|cudnn\w*[wW]orkspace"),
        (Phase.STATES, r"^_?init_(?:group|states?) at "),
        (Phase.LISTS, r"^_multi_tensor_\w+ at |^_foreach_\w+ at "),
        (Phase.OPTIMIZER, r"torch/optim/|^step at \S*(?:optim|adam|sgd|lion|muon|adafactor)\w*\.py"),
        (
            Phase.BACKWARD,
            r"autograd::Engine|_engine_run_backward|torch/autograd/__init__\.py|^backward at |"
            r"^(?:unpack_hook|recompute_fn) at \S*torch/utils/checkpoint\.py",
        ),
        (Phase.CACHE, r"cache_utils\.py|kv_?cache|KVCache"),
        (Phase.FORWARD, r"_call_impl at |^forward at |torch/nn/functional\.py"),
        (Phase.INPUT, r"dataloader\.py|collate|pin_memory|data_loader\.py|_prepare_inputs?\b|get_batch at "),
        (Phase.BUILD, r"_apply at |load_state_dict|from_pretrained|^__init__ at |reset_parameters|safetensors"),
    )
)
# Phases by part of a step; input, caches and workspaces belong to the part in which they occur.
_PART = {
    Phase.FORWARD: Phase.FORWARD,
    Phase.BACKWARD: Phase.BACKWARD,
    Phase.OPTIMIZER: Phase.OPTIMIZER,
    Phase.STATES: Phase.OPTIMIZER,
    Phase.LISTS: Phase.OPTIMIZER,
}
_PARTS = np.array([_PART.get(phase, Phase.UNKNOWN) for phase in Phase], np.int8)
_FIXED = {Phase.INPUT: Category.INPUT, Phase.CACHE: Category.KV_CACHE, Phase.WORKSPACE: Category.WORKSPACE}
_CATEGORY_AT_START = {
    Phase.BUILD: Category.PARAMETER,
    Phase.OPTIMIZER: Category.OPTIMIZER_STATE,
    Phase.STATES: Category.OPTIMIZER_STATE,
    Phase.LISTS: Category.OPTIMIZER_STATE,
    Phase.BACKWARD: Category.GRADIENT,
} | _FIXED


CATEGORY_NAMES = ("", *map(str, Category))


def phases_of(stacks: Iterable[Sequence[str]]) -> list[Phase]:
    """Return each stack's phase. Every distinct frame is matched once."""
    pattern_of_frame: dict[str, int] = {}
    phases = []
    for frames in stacks:
        for frame in frames:
            if frame not in pattern_of_frame:
                pattern_of_frame[frame] = next(
                    (i for i, (_, pattern) in enumerate(_PATTERNS) if pattern.search(frame)), len(_PATTERNS)
                )
        first = min((pattern_of_frame[frame] for frame in frames), default=len(_PATTERNS))
        phases.append(_PATTERNS[first][0] if first < len(_PATTERNS) else Phase.UNKNOWN)
    return phases


class StackTexts:
    """Labels, texts and phases of a recording's stacks, by the stack's number."""

    def __init__(self, stacks: Sequence[Sequence[str]]) -> None:
        self.labels = [label_of(frames) for frames in stacks]
        self.texts = ["\n".join(informative_frames(frames)[:_MOST_FRAMES]) for frames in stacks]
        self.phases = phases_of(stacks)

    def before_events(self, stack: int) -> tuple[str, str, str]:
        """Return label, text and category of a block from before the first event."""
        if not 0 <= stack < len(self.labels):
            return "", "", ""
        return self.labels[stack], self.texts[stack], str(_CATEGORY_AT_START.get(self.phases[stack], ""))


def infer(columns: Columns, phases: Sequence[Phase]) -> NDArray[np.int8]:
    """Return the category of the block that each event allocates, as an index of ``CATEGORY_NAMES``.

    It is "" for other events and unknown categories. ``phases`` are indexed by stack number.
    """
    categories = np.zeros(len(columns.actions), np.int8)
    events = np.flatnonzero((columns.actions == ALLOC) | (columns.actions == FREE_COMPLETED))
    if not len(events):
        return categories
    born, following = columns.lifetimes()  # before other columns take memory
    stacks = columns.stacks[events]
    has_stack = (stacks >= 0) & (stacks < len(phases))
    phase = np.append(np.array(phases, np.int8), np.int8(Phase.UNKNOWN))[np.where(has_stack, stacks, -1)]
    now = _step_parts(phase)
    # Autograd's own thread has no Python frames: a request without any, after a forward pass, is autograd's.
    frameless = ~has_stack & (columns.actions[events] == ALLOC) & np.isin(now, (Phase.FORWARD, Phase.BACKWARD))
    if frameless.any():
        phase[frameless] = Phase.BACKWARD
        now = _step_parts(phase)
    # The program's own requests between a forward and a backward pass belong to its loss.
    phase[has_stack & (phase == Phase.UNKNOWN) & (now == Phase.FORWARD)] = Phase.FORWARD
    part = np.cumsum(np.append(False, now[1:] != now[:-1]), dtype=np.int32)
    place = np.zeros(len(columns.actions), np.int64)  # of each event among those
    place[events] = np.arange(len(events))
    ends = following < len(columns.actions)
    freed = np.flatnonzero(ends)[columns.actions[following[ends]] == FREE_COMPLETED]
    allocations, frees, live = place[born[freed]], place[following[freed]], place[born[~ends]]
    of_freed = [[[_category_of_freed(a, b, same=same) for same in (False, True)] for b in Phase] for a in Phase]
    same = (part[allocations] == part[frees]).astype(np.int8)
    categories[events[allocations]] = _numbers(of_freed)[phase[allocations], now[frees], same]
    end = Phase(int(now[-1]))
    if end is Phase.OPTIMIZER and _PARTS[phase[-1]] != end:
        end = Phase.UNKNOWN  # the optimizer's step is over
    categories[events[live]] = _numbers([_category_of_live(was, end) for was in Phase])[phase[live]]
    if end is Phase.OPTIMIZER:  # in its step: a stack that freed its blocks before will free them again
        passing = stacks[allocations[(phase[allocations] == Phase.OPTIMIZER) & (same == 1)]]
        again = live[(phase[live] == Phase.OPTIMIZER) & np.isin(stacks[live], passing)]
        categories[events[again]] = CATEGORY_NAMES.index(Category.OPTIMIZER_TEMPORARY)
    return categories


def _step_parts(phase: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return the part of a step at each event: that of the last event so far with a known part."""
    parts = _PARTS[phase]
    last = np.arange(len(phase), dtype=np.int32)  # event with a known part so far, else 0
    last[parts == Phase.UNKNOWN] = 0
    return np.asarray(parts[np.maximum.accumulate(last, out=last)])


def _numbers(names: Any) -> NDArray[np.int8]:
    """Nested lists of names as an array of indices of ``CATEGORY_NAMES``."""
    array = np.array(names, object)
    return np.array([CATEGORY_NAMES.index(str(name)) for name in array.ravel()], np.int8).reshape(array.shape)


def _category_of_freed(was: Phase, now: Phase, *, same: bool) -> str:
    """Category of a block allocated in phase ``was`` and freed in ``now``. ``same``: no other phase came between."""
    if was in _FIXED:
        return _FIXED[was]
    part = _PART.get(was, Phase.UNKNOWN)
    if part is Phase.FORWARD and not same:
        return Category.ACTIVATION if now is Phase.BACKWARD else Category.TEMPORARY
    if part is Phase.BACKWARD and not same:
        return Category.GRADIENT
    if part is Phase.OPTIMIZER:
        return Category.OPTIMIZER_STATE if was is Phase.STATES else Category.OPTIMIZER_TEMPORARY
    return "" if was is Phase.UNKNOWN else Category.TEMPORARY


def _category_of_live(was: Phase, now: Phase) -> str:
    """Category of a block in use when the recording ends in phase ``now``."""
    part = _PART.get(was, Phase.UNKNOWN)
    if part is Phase.FORWARD:
        return Category.ACTIVATION if now in (Phase.FORWARD, Phase.BACKWARD) else ""
    if was is Phase.LISTS and now is Phase.OPTIMIZER:
        return Category.OPTIMIZER_TEMPORARY
    return str(_CATEGORY_AT_START.get(was, ""))
