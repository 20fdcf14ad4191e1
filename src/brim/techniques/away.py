"""A tensor whose values are elsewhere: it has the shape, the dtype and the device, and any other use is an error.

``p.grad`` and ``optimizer.state[p][...]`` of what was offloaded are such tensors, so that code which looks whether
there is a gradient sees one, and code which would silently compute with nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from brim.errors import UnsupportedError

_aten = torch.ops.aten
_ZEROING = (_aten.zero_.default, _aten._foreach_zero_.default)


class Away(torch.Tensor):
    """Made by ``away``. Setting it to zero is passed on to whoever keeps the values; nothing else works."""

    what: str
    todo: str
    on_zero: Callable[[], None] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # straight to dispatch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ZEROING:
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                if isinstance(tensor, Away) and tensor.on_zero is not None:
                    tensor.on_zero()
                else:
                    tensor.zero_()
            return None if isinstance(args[0], (list, tuple)) else args[0]
        found = next(_aways([*args, *(kwargs or {}).values()]))
        if func is _aten.detach.default:
            return found
        raise UnsupportedError(
            f"{found.what} was to be used by {func}.",
            "Its values are not in memory: brim keeps them elsewhere between their uses.",
            found.todo,
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Away({self.what}, shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


def away(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    what: str,
    todo: str,
    on_zero: Callable[[], None] | None = None,
) -> Away:
    """A tensor without values. ``what`` and ``todo`` are for the error; ``on_zero`` is called by ``zero_``."""
    made: Away = torch.Tensor._make_wrapper_subclass(
        Away, tuple(shape), strides=tuple(stride), dtype=dtype, device=device
    )
    made.what, made.todo, made.on_zero = what, todo, on_zero
    return made


def _aways(values: Iterable[Any]) -> Iterator[Away]:
    for value in values:
        if isinstance(value, Away):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _aways(value)
