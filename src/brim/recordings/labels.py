"""What is shown of a recorded stack: the informative frames, and the one that names it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MOST_FRAMES = 30  # of a stack that go into a Timeline
_PYTHON = re.compile(r"\.py:\d+$")
_OPERATOR = re.compile(r"at::(?:native|_ops)::|torch::autograd::generated::")
_INSIDE_TORCH = re.compile(r"/torch/(?!\w*_user)|<frozen |/_inductor/|generated_cases|/contextlib\.py")


def telling_frames(frames: Sequence[str]) -> list[str]:
    """The frames of Python code if there are any; of a stack that has none, those from the operator outwards."""
    python = [frame for frame in frames if _PYTHON.search(frame)]
    first = next((index for index, frame in enumerate(frames) if _OPERATOR.match(frame)), 0)
    return python or list(frames[first:])


def label_of(frames: Sequence[str]) -> str:
    """The innermost frame of the user's code, else of any Python code, else of an operator."""
    python = [frame for frame in frames if _PYTHON.search(frame)]
    users = (frame for frame in python if not _INSIDE_TORCH.search(frame))
    return next(users, "") or next(iter(python or telling_frames(frames)), "")


def stack_text(frames: Sequence[str]) -> str:
    """The stack as a Timeline has it: a frame a line, the innermost first."""
    return "\n".join(telling_frames(frames)[:_MOST_FRAMES])
