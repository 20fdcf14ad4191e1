"""The peak of activations and temporaries of a forward pass, found on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from brim.errors import UnsupportedError


class _LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that operations make, from their making until Python lets go of them."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def know(self, tensors: Sequence[torch.Tensor]) -> None:
        """These exist already and are not counted."""
        self._known |= {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def peak_bytes(model: nn.Module, run: Callable[[Callable[..., Any]], None]) -> int:
    """The peak over ``run(call)``, where ``call`` is the model on fake tensors under no_grad.

    Raises UnsupportedError when the forward needs values that only a real run has.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        state = {
            name: torch.empty(t.shape, dtype=t.dtype)
            for name, t in [*model.named_parameters(), *model.named_buffers()]
        }
        counter = _LiveBytes()
        counter.know(list(state.values()))

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(_faked(fake), (args, kwargs))
            counter.know([t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
            with counter:
                return torch.func.functional_call(model, state, args, kwargs)

        try:
            run(call)
        except torch._subclasses.fake_tensor.UnsupportedFakeTensorException as error:
            raise UnsupportedError(
                f"The activations of {type(model).__name__} were to be predicted without running it.",
                f"{error}.",
                "Give them with activations=..., for instance activations='512MiB'.",
            ) from error
    return counter.peak_bytes


def step_bytes(model: nn.Module, example: Mapping[str, Any] | Sequence[Any]) -> int:
    """Peak bytes of one forward pass on an input like ``example``, the input itself left out."""

    def run(call: Callable[..., Any]) -> None:
        if isinstance(example, Mapping):
            call(**example)
        else:
            call(*example)

    return peak_bytes(model, run)


def _faked(fake: FakeTensorMode) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor):
            return value
        return fake.from_tensor(value)

    return convert
