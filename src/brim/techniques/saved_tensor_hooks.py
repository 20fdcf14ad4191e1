"""Saved-tensor hooks of autograd that several techniques share.

PyTorch calls only the innermost pair of saved-tensor hooks (torch/autograd/graph.py, ``saved_tensors_hooks``), so a
technique that takes some tensors would hide all others from the user's own hooks, from ``torch.utils.checkpoint``
(whose non-reentrant form relies on such hooks) and from other techniques. ``Saving`` passes the rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

Unpack = Callable[[], torch.Tensor]


class Packer(Protocol):
    """Replaces some of the tensors that autograd saves."""

    def pack(self, tensor: torch.Tensor) -> Unpack | None:
        """Return a function that gives the values of ``tensor``, repeatedly if needed, or None to leave it to
        others."""


class Saving:
    """Saved-tensor hooks around a part of forward. The outer hooks get the tensors that ``packer`` does not take.

    ``begin`` and ``end`` must nest with all other saved-tensor hooks of the thread.
    """

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def begin(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            _PackHook(self._packer, _top_hooks()), lambda unpack: unpack()
        )
        self._hooks.__enter__()

    def end(self) -> None:
        """Remove the hooks; also safe without ``begin``."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

    def __enter__(self) -> Saving:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _top_hooks() -> Hooks | None:
    """The innermost hooks of this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def active_packers() -> Iterator[Packer]:
    """The packers whose hooks would get a tensor that is saved now, innermost first, as far as they are known."""
    hooks = _top_hooks()
    while hooks is not None and isinstance(hooks[0], _PackHook):
        yield hooks[0].packer
        hooks = hooks[0].outer


def is_recomputed() -> bool:
    """Return whether a checkpoint (torch/utils/checkpoint.py) will recompute the tensors that are saved now."""
    hooks = _top_hooks()
    while hooks is not None and isinstance(hooks[0], _PackHook):
        hooks = hooks[0].outer
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class Unchanged:
    """Autograd's check that a saved tensor was not changed in place, which it leaves out for hooks.

    With ``nothing``, an empty tensor, the witness shares the version counter of ``tensor`` and not its memory.
    """

    __slots__ = ("_expected", "_kind", "_size", "witness")

    def __init__(self, tensor: torch.Tensor, nothing: torch.Tensor | None) -> None:
        # Detached: an output that its own node saves would keep the node alive.
        self.witness, self._expected = tensor.detach(), tensor._version
        self._kind, self._size = (tensor.dtype, tensor.device), list(tensor.shape)
        if nothing is not None:
            self.witness.data = nothing

    def check(self) -> None:
        """Raise the RuntimeError that PyTorch raises (torch/csrc/autograd/saved_variable.cpp)."""
        if self.witness._version != self._expected:
            kind = torch.empty(0, dtype=self._kind[0], device=self._kind[1]).type()
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{kind} {self._size}] is at version {self.witness._version}; expected "
                f"version {self._expected} instead. Hint: enable anomaly detection to find the operation that failed "
                "to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
            )

    def checked(self) -> torch.Tensor:
        self.check()
        return self.witness


@dataclass(eq=False)
class _PackHook:
    """The pack hook of ``packer``; ``outer`` is the pair of hooks around it."""

    packer: Packer
    outer: Hooks | None

    def __call__(self, tensor: torch.Tensor) -> Unpack:
        unpack = self.packer.pack(tensor)
        if unpack is not None:
            return unpack
        if self.outer is not None:
            return partial(self.outer[1], self.outer[0](tensor))
        return Unchanged(tensor, None).checked
