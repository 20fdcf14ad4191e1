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


@contextmanager
def dry_run(model: nn.Module, example: Any) -> Iterator[Any]:
    """While open, operations are fake; gives ``example`` as fake tensors, for ``call_with``.

    What other modes there are (a trace's recorder) does not see it: a real run has no memory of it either. Buffers
    are replaced meanwhile, for fake tensors write through to small constants.
    """
    tensors = [value for value in tree_leaves(example) if isinstance(value, torch.Tensor)]
    own = [tensor.fake_mode for tensor in (*tensors, *model.parameters()) if isinstance(tensor, FakeTensor)]
    mode = own[0] if own else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
        return made

    before = [(module, dict(module._buffers)) for module in model.modules()]
    with _disable_current_modes():
        inputs = tree_map_only(torch.Tensor, fake, example)
        with mode:
            try:
                for module, buffers in before:
                    module._buffers.update({n: None if b is None else fake(b).clone() for n, b in buffers.items()})
                yield inputs
            finally:
                for module, buffers in before:
                    module._buffers.update(buffers)


def call_with(model: nn.Module, inputs: Any) -> Any:
    """``model`` on a dictionary of named inputs, a tuple or list of positional ones, or a single one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
