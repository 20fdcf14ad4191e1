"""A tensor whose values are offloaded: it has a shape, a dtype and a device, but no memory.

Offloaded gradients and optimizer states are such tensors: code that tests for a gradient finds one, and code that
would compute without values gets an error. With a ``Backing`` operations get the values, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from brim.errors import UnsupportedError

_aten = torch.ops.aten
_ZEROING = (_aten.zero_.default, _aten._foreach_zero_.default)


class Backing(Protocol):
    """Access to the values of an offloaded tensor."""

    def value(self) -> torch.Tensor:
        """A copy of the values."""

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the values by a number, now or when they are next needed."""

    def replace(self, value: torch.Tensor) -> None:
        """Replace the values."""


class OffloadedTensor(torch.Tensor):
    """A tensor without values, made by ``offloaded_tensor``.

    Setting it to zero calls ``on_zero``; any other operation needs a ``backing``, or is refused.
    """

    what: str
    todo: str
    on_zero: Callable[[], None] | None
    backing: Backing | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # straight to dispatch

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ZEROING:
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                if isinstance(tensor, OffloadedTensor) and tensor.on_zero is not None:
                    tensor.on_zero()
                else:
                    tensor.zero_()
            return None if isinstance(args[0], (list, tuple)) else args[0]
        offloaded = list(_offloaded_tensors([*args, *(kwargs or {}).values()]))
        if func is _aten.detach.default:
            return offloaded[0]
        if all(other.backing is not None for other in offloaded):
            return _with_values(func, args, kwargs or {})
        raise _refusal(func, offloaded[0])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OffloadedTensor({self.what}, shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


def offloaded_tensor(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    what: str,
    todo: str,
    on_zero: Callable[[], None] | None = None,
    backing: Backing | None = None,
) -> OffloadedTensor:
    """A tensor without values. ``what`` and ``todo`` name it in errors; ``zero_`` calls ``on_zero``."""
    tensor: OffloadedTensor = torch.Tensor._make_wrapper_subclass(
        OffloadedTensor, tuple(shape), strides=tuple(stride), dtype=dtype, device=device
    )
    tensor.what, tensor.todo, tensor.on_zero, tensor.backing = what, todo, on_zero, backing
    return tensor


def _refusal(func: Any, tensor: OffloadedTensor) -> UnsupportedError:
    return UnsupportedError(
        f"{tensor.what} cannot be used by {func}.",
        "Its values are not in memory: brim offloads them between their uses.",
        tensor.todo,
    )


def _with_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call ``func`` on the values; for lists of tensors, which may not fit in memory together, one by one."""
    over_list = _LISTS.get(func)
    if over_list is not None:
        return over_list(*args, **kwargs)
    is_number = len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dim() == 0
    if func is _aten.mul_.Tensor and isinstance(args[0], OffloadedTensor) and is_number:
        assert args[0].backing is not None
        args[0].backing.scale(args[1])
        return args[0]
    if _is_view(func) or _written(func, kwargs.items()):
        # Writes to the result would be lost.
        raise _refusal(func, next(_offloaded_tensors([*args, *kwargs.values()])))
    written = _written(func, enumerate(args))
    listed = [tensor for value in args if isinstance(value, (list, tuple)) for tensor in _offloaded_tensors(value)]
    if listed or len(written) > 1:
        raise _refusal(func, next(_offloaded_tensors(args)))
    values = {
        id(tensor): tensor.backing.value()
        for tensor in _offloaded_tensors([*args, *kwargs.values()])
        if tensor.backing is not None
    }
    output = func(*(values.get(id(a), a) for a in args), **{k: values.get(id(v), v) for k, v in kwargs.items()})
    for tensor in written:
        assert tensor.backing is not None
        tensor.backing.replace(values[id(tensor)])
        return tensor
    return output


def _is_view(func: Any) -> bool:
    """Return whether a result shares its memory with an argument that ``func`` does not change."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _written(func: Any, given: Iterable[tuple[int | str, Any]]) -> list[OffloadedTensor]:
    """The arguments, of ``given`` by position or by name, that ``func`` changes in place."""
    arguments = dict(enumerate(func._schema.arguments)) | {a.name: a for a in func._schema.arguments}
    places = [(arguments.get(key), value) for key, value in given if isinstance(value, OffloadedTensor)]
    return [v for a, v in places if a is not None and a.alias_info is not None and a.alias_info.is_write]


def _norms(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The norms for ``clip_grad_norm_``."""
    return [_aten._foreach_norm.Scalar([_value(tensor)], *args, **kwargs)[0] for tensor in tensors]


def _scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _unscale(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Check that all values are finite and scale them, as a gradient scaler does."""
    for tensor in tensors:
        backing = tensor.backing if isinstance(tensor, OffloadedTensor) else None
        _aten._amp_foreach_non_finite_check_and_unscale_.default([_value(tensor)], found_inf, inverse)
        if backing is not None and inverse.item() != 1:
            backing.scale(inverse)


def _value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.backing.value() if isinstance(tensor, OffloadedTensor) and tensor.backing is not None else tensor


_LISTS: dict[Any, Callable[..., Any]] = {
    _aten._foreach_norm.Scalar: _norms,
    _aten._foreach_mul_.Tensor: _scale_all,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}


def _offloaded_tensors(values: Iterable[Any]) -> Iterator[OffloadedTensor]:
    for value in values:
        if isinstance(value, OffloadedTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _offloaded_tensors(value)
