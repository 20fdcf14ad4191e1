"""A model called on fake tensors, to see what it does. It takes no memory and leaves no trace in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from brim.errors import UsageError


@contextmanager
def dry_run(model: nn.Module, example: Any) -> Iterator[Any]:
    """While open, operations are fake; gives ``example`` as fake tensors, for ``call_with``.

    True ones go to where the model is: it may be about to be moved to where they are.

    What other modes there are (a trace's recorder) does not see it: a real run has no memory of it either. Buffers
    are replaced meanwhile, for fake tensors write through to small constants.
    """
    tensors = [value for value in tree_leaves(example) if isinstance(value, torch.Tensor)]
    own = [tensor.fake_mode for tensor in (*tensors, *model.parameters()) if isinstance(tensor, FakeTensor)]
    mode = own[0] if own else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        fake_tensor: torch.Tensor = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
        return fake_tensor

    before = [(module, dict(module._buffers)) for module in model.modules()]
    with _disable_current_modes():
        inputs = tree_map_only(torch.Tensor, fake, example)
        with mode:
            if not own and (first := next(model.parameters(), None)) is not None:
                inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(first.device), inputs)
            try:
                for module, buffers in before:
                    module._buffers.update({n: None if b is None else fake(b).clone() for n, b in buffers.items()})
                yield inputs
            finally:
                for module, buffers in before:
                    module._buffers.update(buffers)


def as_arguments(example: Any) -> dict[str, Any] | tuple[Any, ...]:
    """What a model is called with for ``example``: a mapping has named inputs, a tuple or a list positional ones, and
    a tensor alone is the only one.

    Raises UsageError for anything else.
    """
    if isinstance(example, torch.Tensor):  # which can be iterated over too, row by row
        return (example,)
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example)
    raise UsageError(
        f"An example of a model's inputs was given as {type(example).__name__}.",
        "It is a tensor, a tuple or list of positional inputs, or a dictionary of named ones.",
        "Give what the model is called with.",
    )


def call_with(model: nn.Module, inputs: Any) -> Any:
    """``model`` on an example of its inputs, as ``as_arguments`` has it."""
    arguments = as_arguments(inputs)
    return model(**arguments) if isinstance(arguments, dict) else model(*arguments)
