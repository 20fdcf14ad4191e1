"""What autograd keeps for backward, seen by several techniques at once.

PyTorch calls only the innermost pair of saved-tensor hooks (torch/autograd/graph.py, ``saved_tensors_hooks``), so a
technique that takes some tensors would hide all others from the user's own hooks, from ``torch.utils.checkpoint``
(whose non-reentrant form lives by such hooks) and from other techniques. ``keeping`` passes on what it does not take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Keeper(Protocol):
    """Keeps some tensors for backward in its own way."""

    def pack(self, tensor: torch.Tensor) -> Kept | None:
        """What stands for ``tensor`` until backward; None: not a tensor that this keeper takes."""


class Kept(Protocol):
    def unpack(self) -> torch.Tensor:
        """The tensor, or one with the same values, when backward needs it. It may be asked for more than once."""


class Saving:
    """Hooks around a stretch of forward: ``keeper`` takes what it wants, the hooks outside take the rest.

    ``begin`` and ``end`` must pair like brackets with all other saved-tensor hooks of the thread.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def begin(self) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(_packing(self._keeper, outer), _unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """Safe to call when ``begin`` was not."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

    def __enter__(self) -> Saving:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Passed:
    """A tensor that the hooks outside keep."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Any]) -> None:
        self._packed, self._unpack = packed, unpack

    def unpack(self) -> Any:
        return self._unpack(self._packed)


class _Plain:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # with its history, an output that its own node keeps would keep the node

    def unpack(self) -> torch.Tensor:
        return self._tensor


def _packing(
    keeper: Keeper, outer: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None
) -> Callable[[torch.Tensor], Kept]:
    def pack(tensor: torch.Tensor) -> Kept:
        kept = keeper.pack(tensor)
        if kept is not None:
            return kept
        if outer is not None:
            return _Passed(outer[0](tensor), outer[1])
        return _Plain(tensor)

    return pack


def _unpack(kept: Kept) -> torch.Tensor:
    return kept.unpack()
