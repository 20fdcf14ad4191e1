"""Bytes of optimizer states, to the byte: moments, factored moments, quantized moments and step counters."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from brim.errors import UsageError

BLOCK = 256  # elements that share one scale, with torchao as with bitsandbytes
CODE_BOOK_BYTES = 256 * 4  # a table of 256 float32 per moment: for each parameter (torchao), for all (bitsandbytes)
_SMALLEST_QUANTIZED = 4096  # elements; smaller parameters are not quantized by either

_STATES = {  # for each parameter: tensors of its size, and step counters in float32
    "adamw": (2, 1),  # torch/optim/adam.py: exp_avg, exp_avg_sq, step
    "adam": (2, 1),
    "sgd": (0, 0),
    "sgd-momentum": (1, 0),  # torch/optim/sgd.py: momentum_buffer
    "adafactor": (1, 1),  # torch/optim/_adafactor.py: row_var, col_var or variance, step
    "rmsprop": (1, 1),  # torch/optim/rmsprop.py: square_avg, step
    "adagrad": (1, 1),  # torch/optim/adagrad.py: sum, step
    "lion": (1, 0),  # Chen et al., arXiv 2302.06675: exp_avg
    "adamw8bit": (2, 1),  # torchao/optim/adam.py, torchao/optim/subclass_8bit.py: codes, scale, qmap, step
}
OPTIMIZERS = tuple(_STATES)


def is_quantized(elements: int) -> bool:
    """Return whether torchao quantizes the moments of a parameter of that size, else they keep its dtype."""
    return elements >= _SMALLEST_QUANTIZED and elements % BLOCK == 0


def state_bytes(optimizer: str, shape: Sequence[int], item_bytes: int) -> int:
    """Bytes of the state for a parameter of this shape and ``item_bytes`` per element, its step counter included.

    The state has the parameter's dtype. PyTorch keeps the counters in RAM unless the optimizer is fused or
    capturable.
    """
    check_name(optimizer)
    copies, counters = _STATES[optimizer]
    elements = math.prod(shape)
    if optimizer == "adamw8bit" and is_quantized(elements):
        return 2 * (elements + 4 * (elements // BLOCK) + CODE_BOOK_BYTES) + 4
    if optimizer == "adafactor" and len(shape) > 1:  # Shazeer and Stern, arXiv 1804.04235: its rows and columns
        elements = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    return copies * elements * item_bytes + 4 * counters


def check_name(optimizer: str) -> None:
    """Raise UsageError with the nearest names where ``optimizer`` is none."""
    if optimizer not in _STATES:
        near = difflib.get_close_matches(optimizer, _STATES, n=3, cutoff=0.0)
        raise UsageError(f"Unknown optimizer {optimizer!r}.", todo=f"Nearest: {', '.join(near)}.")
