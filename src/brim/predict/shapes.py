"""Results of fake kernels, remembered by what they were asked: layer after layer and trace after trace ask the same.

``FakeTensorMode`` remembers them too, under a key of everything that any of its users may depend on; to make that key
and to come to it takes most of a trace. Here only operations are remembered that write into nothing and whose result
is new, or a view of the first argument. All that such a result depends on is in the key, and a result is remembered
only after it was made a second time from what is remembered and both were the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
_MOST_KNOWN = 1 << 16
_PLAIN = frozenset({int, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)})
_DEPEND_ON_MORE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_Key = list[Any]


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a kernel gave; ``viewed``: it is the first argument's storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: bool


_KNOWN: dict[tuple[Any, ...], tuple[_Made, ...] | None] = {}  # None: it is asked every time
_KINDS: dict[torch._ops.OpOverload, bool] = {}


def result_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` below a trace."""
    key = _key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    known = _KNOWN.get(key, ())
    if known:
        made = [_rebuilt(one, args[0]) for one in known]
        return made[0] if len(made) == 1 else tuple(made)
    result = func(*args, **kwargs)
    if known is not None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _described(func, result, args)
    return result


def _key(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    kind = _KINDS.get(func)
    if kind is None:
        kind = _KINDS[func] = _is_plain(func)
    if not kind or not args or type(args[0]) is not FakeTensor:
        return None
    mode = args[0].fake_mode
    key: _Key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), mode.allow_fallback_kernels]
    for arg in args:
        if not _add(key, arg, mode):
            return None
    for name, arg in kwargs.items():
        key.append(name)
        if not _add(key, arg, mode):
            return None
    return tuple(key)


def _is_plain(func: torch._ops.OpOverload) -> bool:
    tags = func.tags
    if func.namespace != "aten" or func._schema.is_mutable or any(tag in tags for tag in _DEPEND_ON_MORE):
        return False
    return func.overloadpacket not in (_aten.as_strided, _aten.lift, _aten.lift_fresh, _aten.set)


def _add(key: _Key, arg: Any, mode: Any) -> bool:
    """Write what a result may depend on to ``key``; False where that is not all told."""
    kind = type(arg)
    if kind is FakeTensor:
        if arg.fake_mode is not mode or arg.constant is not None or arg.layout is not torch.strided:
            return False
        if arg.is_conj() or arg.is_neg() or arg.is_quantized:
            return False
        key += (
            kind, arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device, arg.is_inference(),
        )  # fmt: skip
        return True
    if kind is float:
        key += (kind, arg)
        return not math.isnan(arg)
    if kind in _PLAIN:
        key += (kind, arg)
        return True
    if kind is list or kind is tuple:
        key += (kind, len(arg))
        return all(_add(key, part, mode) for part in arg)
    return False


def _described(func: torch._ops.OpOverload, result: Any, args: tuple[Any, ...]) -> tuple[_Made, ...] | None:
    """What makes ``result`` again; None where that would be another one."""
    if type(result) is tuple and len(result) < 2:
        return None
    results = result if type(result) is tuple else (result,)
    if any(type(one) is not FakeTensor or one.layout is not torch.strided for one in results):
        return None
    first = args[0]
    homes = {one.untyped_storage()._cdata for one in pytree.arg_tree_leaves(*args) if isinstance(one, torch.Tensor)}
    views, home = func.is_view or func is _aten._unsafe_view.default, first.untyped_storage()._cdata
    made = tuple(
        _Made(
            shape=tuple(one.shape),
            stride=tuple(one.stride()),
            offset=one.storage_offset(),
            dtype=one.dtype,
            device=one.fake_device,
            viewed=views and one.untyped_storage()._cdata == home,
        )
        for one in results
    )
    again = [_rebuilt(one, first) for one in made]
    same = all(_facts(one) == _facts(other) for one, other in zip(results, again, strict=True))
    own = [one.untyped_storage()._cdata for one, what in zip(results, made, strict=True) if not what.viewed]
    return made if same and len(set(own)) == len(own) and homes.isdisjoint(own) else None


def _facts(tensor: FakeTensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, tensor.fake_device,
        tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_inference(), tensor.is_conj(),
        tensor.is_neg(), tensor.constant,
    )  # fmt: skip


def _rebuilt(what: _Made, first: FakeTensor) -> FakeTensor:
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(what.shape, what.stride, dtype=what.dtype, device="meta")
        if what.viewed:
            made.set_(first.untyped_storage(), what.offset, what.shape, what.stride)
    return FakeTensor(first.fake_mode, made, what.device)
