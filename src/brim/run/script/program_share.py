"""What the program itself grows by, of which a process that did the same before shows nothing any more.

A run is a process of its own: libraries' code, the tokenizer, heaps and kernels' buffers are all new to it. Who plans
twice in one process would see only the first time what they take, so the most that was ever seen of a model is kept.
"""

from __future__ import annotations

import torch

from brim.run.timing.measurement_cache import Remembered

_METHOD = 1  # raised when what is measured changes
_WORTH_BYTES = 1 << 20  # a smaller difference is not written down


def most_grown(task: str, model: torch.nn.Module, tokens: int, grown_bytes: int) -> int:
    """``grown_bytes``, or what was seen before of the same ``task`` with as large a ``model`` if that is more."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    memory = Remembered("program-share", (_METHOD, torch.__version__, torch.get_num_threads()))
    name = f"{task} {type(model).__name__} {parameters} {tokens}"
    known = int((memory.get(name) or [0.0])[0])
    if grown_bytes > known + _WORTH_BYTES:
        memory.keep({name: [float(grown_bytes)]})
    return max(known, grown_bytes)
