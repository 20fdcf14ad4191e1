"""Build a model and its inputs from user code (``file.py:build``), to plan its training in the user's loop.

Only the modules of such a model are known: its weights stay in the compute tier, and the plan decides on activations
(kept, recomputed, offloaded), the optimizer's states and the rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.models import Source, find_model, place_in, short
from brim.model_inputs import tensors_in
from brim.planning.request import PLAN_FILE, Request
from brim.techniques.dry_run import as_arguments


def is_factory(model: str | Path) -> bool:
    """Return True where MODEL names a function in a file of the user's."""
    file, colon, _ = str(model).rpartition(":")
    return bool(colon) and file.endswith(".py")


def made_by(source: Source) -> tuple[nn.Module, Any]:
    """Call the function; return its model, in train mode and without values, and its example inputs.

    Raises ModelError where it fails, UsageError where it returns something else.
    """
    assert source.factory is not None, "the source is a function"
    try:
        pair = source.factory()
    except Exception as error:
        raise ModelError(
            f"{source.name} cannot build a model.",
            f"It fails{place_in(error, source.file)}: {short(error)}",
            "Correct the file.",
        ) from error
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
        raise UsageError(
            f"Cannot make a plan for {source.name}.",
            f"It returned {type(pair).__name__}.",
            "Return a model and its inputs as a pair; for a step of your own use brim estimate.",
        )
    model, example = pair
    return model.train().to("meta"), as_arguments(example)


def rows_of(example: Any, name: str) -> int:
    """Return the rows of the inputs: the first size, which all tensors must share."""
    sizes = {t.shape[0] for t in tensors_in(example) if t.dim()}
    if len(sizes) != 1:
        raise UsageError(
            f"Cannot make a plan for {name}.",
            f"The numbers of rows of its inputs are {sorted(sizes) or 'unknown'}, not one number.",
            "Return tensors whose first dimension is the batch.",
        )
    return sizes.pop()


def resolved(request: Request) -> Request:
    """Set the batch of ``request``, unless it is given, to the rows of the function's inputs; a row is a "token".

    Raises UnsupportedError for tasks of language models.
    """
    source = find_model(request.model)
    if request.task != "train" or request.method != "full":
        raise UnsupportedError(
            f"Cannot plan {request.task if request.task != 'train' else request.method} for {source.name}.",
            "Models built by a function can be planned for full training only.",
            "Give --task train --method full, or a model of transformers.",
        )
    _, example = made_by(source)
    rows = rows_of(example, source.name)
    return replace(request, batch=rows if request.batch == 1 else request.batch, seq=1)


def with_rows(example: Any, count: int) -> Any:
    """Create inputs like ``example`` with ``count`` rows; their values do not matter."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        shape = (count, *tensor.shape[1:]) if tensor.dim() else ()
        return torch.empty(shape, dtype=tensor.dtype)

    return tree_map_only(torch.Tensor, make, example)


def sees_rows_together(model: nn.Module) -> bool:
    """Return True where a smaller micro-batch changes the result: batch norm's statistics depend on it."""
    return any(isinstance(part, _BatchNorm) for part in model.modules())


def command() -> str:
    """Return the line of a training loop that applies the plan."""
    return f'brim.fit(model, optimizer, example=inputs, plan="{PLAN_FILE}")'
