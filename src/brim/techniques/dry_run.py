"""Calls of a model on fake tensors, which take no memory and leave the model as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from brim.errors import UnsupportedError, UsageError, first_line
from brim.model_inputs import map_tensors, tensors_in
from brim.predict.compiled.torch_compile import as_written


@contextmanager
def dry_run(model: nn.Module, example: Any) -> Iterator[Any]:
    """Make operations fake within, and give ``example`` as fake tensors, for ``call_with``.

    Real tensors move to the model's device: the model may be about to be moved to theirs. Other modes, such as a
    trace's recorder, do not see the call, as a real run has no memory of it either. Buffers are replaced meanwhile,
    since fake tensors write through to small constants.
    """
    tensors = tensors_in(example)
    own = [tensor.fake_mode for tensor in (*tensors, *model.parameters()) if isinstance(tensor, FakeTensor)]
    mode = own[0] if own else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        fake_tensor: torch.Tensor = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
        return fake_tensor

    before = [(module, dict(module._buffers)) for module in model.modules()]
    with _disable_current_modes():
        inputs = map_tensors(example, fake)
        with as_written(set()), mode:
            if not own and (first := next(model.parameters(), None)) is not None:
                inputs = map_tensors(inputs, lambda tensor: tensor.to(first.device))
            try:
                for module, buffers in before:
                    module._buffers.update({n: None if b is None else fake(b).clone() for n, b in buffers.items()})
                yield inputs
            finally:
                for module, buffers in before:
                    module._buffers.update(buffers)


def not_predictable(call: str, error: Exception) -> UnsupportedError:
    """The error of ``call``, which raised ``error`` on fake tensors."""
    fix = "Give the size of its activations, for instance activations='512MiB'."
    return UnsupportedError(f"Cannot predict {call} without running it.", first_line(error), fix)


def as_arguments(example: Any) -> dict[str, Any] | tuple[Any, ...]:
    """The arguments of a model for ``example``: named ones for a mapping, positional ones for a tuple or a list, a
    single one for a tensor.

    Raises UsageError for anything else.
    """
    if isinstance(example, torch.Tensor):  # which can be iterated over too, row by row
        return (example,)
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example)
    raise UsageError(
        f"Cannot use a {type(example).__name__} as the example of a model's inputs.",
        "It must be a tensor, a tuple or list of positional inputs, or a dictionary of named ones.",
        "Give the arguments of the model's call.",
    )


def call_with(model: nn.Module, inputs: Any) -> Any:
    arguments = as_arguments(inputs)
    return model(**arguments) if isinstance(arguments, dict) else model(*arguments)
