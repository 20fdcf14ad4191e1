"""What autograd keeps for backward, seen by several techniques at once.

PyTorch calls only the innermost pair of saved-tensor hooks (torch/autograd/graph.py, ``saved_tensors_hooks``), so a
technique that takes some tensors would hide all others from the user's own hooks, from ``torch.utils.checkpoint``
(whose non-reentrant form lives by such hooks) and from other techniques. ``keeping`` passes on what it does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        self._hooks = torch.autograd.graph.saved_tensors_hooks(_Packing(self._keeper, _top_hooks()), _unpack)
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


Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _top_hooks() -> Hooks | None:
    """The hooks in force in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def keepers_in_force() -> Iterator[Keeper]:
    """The keepers whose hooks would see a tensor that is saved now, innermost first, as far as they can be seen."""
    hooks = _top_hooks()
    while hooks is not None and isinstance(hooks[0], _Packing):
        yield hooks[0].keeper
        hooks = hooks[0].outer


def is_recomputed() -> bool:
    """Whether what is saved now is only noted down, to be computed again (torch/utils/checkpoint.py)."""
    hooks = _top_hooks()
    while hooks is not None and isinstance(hooks[0], _Packing):
        hooks = hooks[0].outer
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class Unchanged:
    """The check that plain autograd makes when it uses what it saved, and that hooks take the place of.

    ``nothing`` is an empty tensor: what stands for ``tensor`` from now on shares its version counter, not its bytes.
    """

    __slots__ = ("_expected", "_kind", "_size", "witness")

    def __init__(self, tensor: torch.Tensor, nothing: torch.Tensor | None) -> None:
        # Without its history: an output that its own node keeps would keep the node.
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


class _Passed:
    """A tensor that the hooks outside keep."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Any]) -> None:
        self._packed, self._unpack = packed, unpack

    def unpack(self) -> Any:
        return self._unpack(self._packed)


class _Plain:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._unchanged = Unchanged(tensor, None)

    def unpack(self) -> torch.Tensor:
        self._unchanged.check()
        return self._unchanged.witness


class _Packing:
    """What autograd calls with each tensor that it saves; ``outer`` is the pair of hooks around it."""

    def __init__(self, keeper: Keeper, outer: Hooks | None) -> None:
        self.keeper, self.outer = keeper, outer

    def __call__(self, tensor: torch.Tensor) -> Kept:
        kept = self.keeper.pack(tensor)
        if kept is not None:
            return kept
        if self.outer is not None:
            return _Passed(self.outer[0](tensor), self.outer[1])
        return _Plain(tensor)


def _unpack(kept: Kept) -> torch.Tensor:
    return kept.unpack()
