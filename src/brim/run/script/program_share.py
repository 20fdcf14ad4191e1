"""Growth of the program's own memory in a run, beside tensors, remembered per model.

A run is a new process: it loads libraries' code, the tokenizer, heaps and kernels' buffers. A process that plans
twice grows by them only the first time, so the largest value measured for a model is stored.
"""

from __future__ import annotations

import torch

from brim.run.timing.measurement_cache import Remembered

_METHOD = 1  # to be raised when the measurement changes
_WORTH_BYTES = 1 << 20  # a smaller increase is not stored


def most_grown(task: str, model: torch.nn.Module, tokens: int, grown_bytes: int) -> int:
    """``grown_bytes``, or a larger earlier value for the same ``task`` and a ``model`` of the same size."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    memory = Remembered("program-share", (_METHOD, torch.__version__, torch.get_num_threads()))
    name = f"{task} {type(model).__name__} {parameters} {tokens}"
    most_bytes = int((memory.get(name, count=1) or [0.0])[0])
    if grown_bytes > most_bytes + _WORTH_BYTES:
        memory.keep({name: [float(grown_bytes)]})
    return max(most_bytes, grown_bytes)
