"""A model and its inputs from user code (``file.py:build``), for plans of training it in a loop of one's own.

Nothing is known of such a model but its modules: its weights stay where it computes, and what is planned is what
becomes of activations (kept, computed again, sent away), of the optimizer's states, and how many rows go at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.models import Source, find_model, place_in, short
from brim.planning.request import PLAN_FILE, Request
from brim.techniques.dry_run import as_arguments


def is_factory(model: str | Path) -> bool:
    """Whether MODEL names a function in a file of the user's."""
    file, colon, _ = str(model).rpartition(":")
    return bool(colon) and file.endswith(".py")


def made_by(source: Source) -> tuple[nn.Module, Any]:
    """What the function returns: a model, in train mode and without its values, and an example of its inputs.

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
    """How many rows its inputs have: the first size, which all of them must share."""
    sizes = {t.shape[0] for t in tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim()}
    if len(sizes) != 1:
        raise UsageError(
            f"Cannot make a plan for {name}.",
            f"Its inputs have {sorted(sizes) or 'no'} rows.",
            "Return tensors whose first dimension is the batch.",
        )
    return sizes.pop()


def resolved(request: Request) -> Request:
    """``request`` with the rows of the function's inputs where no other batch was asked for; a row is one "token".

    Raises UnsupportedError for what only a language model can do.
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
    """Inputs like ``example`` of ``count`` rows, made where this is called; their values do not matter."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        shape = (count, *tensor.shape[1:]) if tensor.dim() else ()
        return torch.empty(shape, dtype=tensor.dtype)

    return tree_map_only(torch.Tensor, make, example)


def sees_rows_together(model: nn.Module) -> bool:
    """Whether fewer rows at once give another result: batch norm takes its statistics from those that it sees."""
    return any(isinstance(part, _BatchNorm) for part in model.modules())


def command() -> str:
    """The line of a training loop that puts the plan into force."""
    return f'brim.fit(model, optimizer, example=inputs, plan="{PLAN_FILE}")'


__all__ = ["command", "is_factory", "made_by", "resolved", "rows_of", "sees_rows_together", "with_rows"]
