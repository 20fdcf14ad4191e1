"""A cache of fake kernels' results by their arguments, which repeat in every layer and every trace.

``FakeTensorMode`` has a cache too, whose key has everything that any of its users may depend on; making that key
takes most of a trace's time. This cache is for operations without in-place writes whose result is new, or a view of
the first argument. Its key has everything that such a result depends on, and a result is cached only after
rebuilding it from the cache gave the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from brim.predict.flops import Work

_aten = torch.ops.aten
_MOST_KNOWN = 1 << 16
_PLAIN = frozenset({int, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)})
_DEPEND_ON_MORE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_FACTORIES = (_aten.empty.memory_format, _aten.empty_strided.default)
_Key = list[Any]


@dataclass(frozen=True, slots=True)
class _Output:
    """An output tensor's description; ``viewed``: it views the first argument's storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: bool


@dataclass(slots=True)
class Answer:
    """An operation's outputs, and its work once that has been computed: the same for the same arguments."""

    outputs: tuple[_Output, ...]
    work: Work | None = None


_KNOWN: dict[tuple[Any, ...], Answer | None] = {}  # None: the kernel is called every time
_UNHEARD = Answer(outputs=())
_KINDS: dict[OpOverload, bool] = {}
_STATES: dict[torch.device, dict[str, Any]] = {}  # attributes of a fake tensor on that device, without its mode


def result_of(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode | None
) -> tuple[Any, Answer | None]:
    """The result of ``func(*args, **kwargs)`` below a trace of ``mode``, and its cached answer."""
    key = None if mode is None else _key(func, args, kwargs, mode)
    if key is None or mode is None:
        return func(*args, **kwargs), None
    remembered = _KNOWN.get(key, _UNHEARD)
    if remembered is None:
        return func(*args, **kwargs), None
    if remembered.outputs:
        outputs = [_rebuilt(description, args[0], mode) for description in remembered.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs), remembered
    result = func(*args, **kwargs)
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    described = _described(func, result, args, mode)
    answer = _KNOWN[key] = None if described is None else Answer(outputs=described)
    return result, answer


def _key(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> tuple[Any, ...] | None:
    kind = _KINDS.get(func)
    if kind is None:
        kind = _KINDS[func] = _is_plain(func)
    if not kind or not args or (type(args[0]) is not FakeTensor and func not in _FACTORIES):
        return None
    key: _Key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), mode.allow_fallback_kernels]
    for arg in args:
        if not _add(key, arg, mode):
            return None
    for name, arg in kwargs.items():
        key.append(name)
        if not _add(key, arg, mode):
            return None
    return tuple(key)


def _is_plain(func: OpOverload) -> bool:
    tags = func.tags
    if func.namespace != "aten" or func._schema.is_mutable or any(tag in tags for tag in _DEPEND_ON_MORE):
        return False
    return func.overloadpacket not in (_aten.lift, _aten.lift_fresh, _aten.set)


def _add(key: _Key, arg: Any, mode: Any) -> bool:
    """Add everything that a result may depend on to ``key``; return False where that is not possible."""
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


def _described(
    func: OpOverload, result: Any, args: tuple[Any, ...], mode: FakeTensorMode
) -> tuple[_Output, ...] | None:
    """Return descriptions that rebuild ``result``; None where they would not."""
    if type(result) is tuple and len(result) < 2:
        return None
    results = result if type(result) is tuple else (result,)
    if any(type(output) is not FakeTensor or output.layout is not torch.strided for output in results):
        return None
    first = args[0]
    homes = {
        leaf.untyped_storage()._cdata for leaf in pytree.arg_tree_leaves(*args) if isinstance(leaf, torch.Tensor)
    }
    views = func.is_view or func is _aten._unsafe_view.default
    home = first.untyped_storage()._cdata if views else None
    descriptions = tuple(
        _Output(
            shape=tuple(output.shape),
            stride=tuple(output.stride()),
            offset=output.storage_offset(),
            dtype=output.dtype,
            device=output.fake_device,
            viewed=views and output.untyped_storage()._cdata == home,
        )
        for output in results
    )
    again = [_rebuilt(description, first, mode) for description in descriptions]
    same = all(_facts(output) == _facts(rebuilt) for output, rebuilt in zip(results, again, strict=True))
    own = [
        output.untyped_storage()._cdata for output, what in zip(results, descriptions, strict=True) if not what.viewed
    ]
    return descriptions if same and len(set(own)) == len(own) and homes.isdisjoint(own) else None


def _facts(tensor: FakeTensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, tensor.fake_device,
        tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_inference(), tensor.is_conj(),
        tensor.is_neg(), tensor.constant,
    )  # fmt: skip


def _rebuilt(what: _Output, first: Any, mode: FakeTensorMode) -> FakeTensor:
    with torch._C._DisableTorchDispatch():
        tensor = torch.empty_strided(what.shape, what.stride, dtype=what.dtype, device="meta")
        if what.viewed:
            tensor.set_(first.untyped_storage(), what.offset, what.shape, what.stride)
    return _faked(tensor, what.device, mode)


def _faked(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> FakeTensor:
    """``FakeTensor(mode, tensor, device)``, faster: its checks have the same outcome for every tensor of a device,
    and take longer than the tensor."""
    state = _STATES.get(device)
    if state is None:
        first = FakeTensor(mode, tensor, device)
        _STATES[device] = {name: value for name, value in vars(first).items() if name != "fake_mode"}
        return first
    fake: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(state)
    fake.fake_mode = mode
    return fake
