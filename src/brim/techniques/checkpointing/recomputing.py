"""What must be as it was when a block's forward runs a second time: its buffers, and the caches it was given.

RNG state and autocast are restored by ``torch.utils.checkpoint`` itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from brim.errors import UnsupportedError


class BuffersBefore:
    """The buffers of ``module`` as they are now, to be in force while its forward is run again.

    Batch norm and spectral norm write to theirs in forward; a second write would leave other statistics than plain
    training. The copies stand in for the module's own buffers and are dropped. May be entered more than once.
    """

    def __init__(self, module: nn.Module) -> None:
        with torch.no_grad():
            self._kept = [
                (owner, name, buffer.clone())
                for owner in module.modules()
                for name, buffer in owner._buffers.items()
                if buffer is not None
            ]
        self._live: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._live = [owner._buffers[name] for owner, name, _ in self._kept]
        with torch.no_grad():
            for owner, name, before in self._kept:
                owner._buffers[name] = before.clone()

    def __exit__(self, *_: object) -> None:
        for (owner, name, _before), live in zip(self._kept, self._live, strict=True):
            owner._buffers[name] = live
        self._live = []


class Together:
    """Several context managers as one that may be entered again, as they may."""

    def __init__(self, *parts: AbstractContextManager[Any]) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *failure: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(*failure)


def is_cache(value: object) -> bool:
    """Whether it is a key-value cache of transformers' kind, that a forward appends to."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("update", "get_seq_length"))


def copy_of_cache(cache: Any) -> Any:
    """A cache with the same tensors that can be appended to without the original noticing."""
    copied = copy.copy(cache)
    for name, value in vars(copied).items():
        vars(copied)[name] = _copy_of_part(value)
    return copied


def _is_part(value: object) -> bool:
    """A layer of a cache, or a cache in a cache."""
    return is_cache(value) or (hasattr(value, "update_conv_state") and not isinstance(value, type))


def _copy_of_part(value: Any) -> Any:
    if _is_part(value):
        return copy_of_cache(value)
    if isinstance(value, list):
        return [_copy_of_part(item) for item in value]
    if type(value) is dict:
        return {name: _copy_of_part(item) for name, item in value.items()}
    return value


class Unwritten:
    """Makes sure that no tensor which a cache already held is written to: a second run would write it again."""

    def __init__(self, caches: Iterable[Any]) -> None:
        self._versions = [(tensor, tensor._version) for cache in caches for tensor in _tensors(vars(cache))]

    def check(self, block: nn.Module) -> None:
        """Raise UnsupportedError where one was."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                f"Cannot checkpoint {type(block).__name__} with a cache that it writes to in place.",
                "Its forward pass runs again during backward and would write a second time.",
                "Pass use_cache=False, or leave this block out.",
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif _is_part(value):
        yield from _tensors(vars(value))
