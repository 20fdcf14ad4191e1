"""Known values of a trace: values that the program itself creates, computed for real in addition to the fake tensors.

Values that do not depend on weights are known up to a size: literals, files, ranges, draws from random generators,
and results computed from them. Small tensors are computed at once, larger ones when they are read, so that a batch of
images costs nothing until the program reads it. Weights, and results computed from them, have no values;
``values/assumptions.py`` has their assumptions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from brim.predict.flops import leaves

_aten = torch.ops.aten
_AT_ONCE = 1 << 12  # elements: larger values wait until they are read
_MOST_ELEMENTS = {False: 1 << 26, True: 1 << 24}  # by whether the dtype is floating
_MOST_WEIGHTS = 1  # elements of a tensor that requires gradients and is known nevertheless: a temperature
# For a tensor that is computed because it is written in place: optimizers' states are not.
_MOST_CHANGED = {False: 1 << 20, True: 1 << 16}
_DEEPEST = 100  # longest chain of operations that wait
_KNOWN_DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip

ROUTED, ASSUMED, MADE_UP, NEGATIVE = 1, 2, 4, 8
"""What a value rests on: experts that a router was taken to choose, an assumption, a number that was made up; the
assumption that elements are negative."""

# Operators that read only shapes, dtypes and layouts of these.
_LIKE = {
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.empty_like.default,
    _aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype,
    _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# Operators that write every element of their first argument without reading it.
_OVERWRITE = {
    _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default, _aten.uniform_.default,
    _aten.normal_.default, _aten.random_.default, _aten.random_.to, _aten.random_.__getattr__("from"),
    _aten.bernoulli_.float, _aten.bernoulli_.Tensor, _aten.exponential_.default, _aten.log_normal_.default,
    _aten.cauchy_.default, _aten.geometric_.default,
}  # fmt: skip
_EMPTY = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_UNSAFE_VIEWS = {_aten._unsafe_view.default, _aten._reshape_alias.default, _aten.lift_fresh.default}
_CHECKED = _aten._amp_foreach_non_finite_check_and_unscale_.default  # it finds all gradients finite


@dataclass(slots=True)
class State:
    """Shared by all known tensors that share a storage."""

    valid: bool = True
    origin: int = 0  # ROUTED, ASSUMED, MADE_UP
    outside: bool = False  # created outside of the trace, and never changed
    readers: list[weakref.ref[_Call]] = field(default_factory=list)  # waiting calls that read this storage


@dataclass(slots=True, weakref_slot=True)
class Known:
    """A real tensor with a fake one's values, or the operation that computes it when it is read."""

    computed: torch.Tensor | None
    state: State
    call: _Call | None = None
    index: int | None = None  # of the operation's results
    shape: tuple[int, ...] = ()

    @property
    def value(self) -> torch.Tensor:
        if self.computed is None:
            assert self.call is not None
            result = self.call.run()
            self.computed = result if self.index is None else result[self.index]
            self.call = None
        return self.computed

    @property
    def depth(self) -> int:
        return 0 if self.call is None else self.call.depth


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Call:
    """An operation on known values that waits until its result is read."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    depth: int
    seed: int | None = None
    result: Any = None

    def run(self) -> Any:
        if self.result is None:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                args, kwargs = _values(self.args), _values(self.kwargs)
                if self.seed is not None:
                    self.result = _drawn(self.func, args, kwargs, self.seed)
                else:
                    self.result = self.func(*args, **kwargs)
            self.args = self.kwargs = None
        return self.result


def _drawn(func: Callable[..., Any], args: Any, kwargs: Any, seed: int) -> Any:
    if kwargs.get("generator") is not None:
        return func(*args, **(kwargs | {"generator": torch.Generator().manual_seed(seed)}))
    before = torch._C.default_generator.get_state()
    torch._C.default_generator.manual_seed(seed)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C.default_generator.set_state(before)


def known(tensor: object) -> Known | None:
    """The values of ``tensor``, computed now if they waited; None where they are unknown."""
    value = peek(tensor)
    if value is None or value.computed is not None:
        return value
    try:
        real = value.value
    except (RuntimeError, IndexError, ValueError):  # the CPU lacks such a kernel, or rejects the values
        value.state.valid = False
        return None
    if tuple(real.shape) != value.shape:
        value.state.valid = False
        return None
    return value


def peek(tensor: object) -> Known | None:
    """Return known values like ``known``, without computing delayed ones."""
    value: Known | None = getattr(tensor, "_brim_known", None)
    if value is None:
        return _from_outside(tensor)
    if not value.state.valid:
        return None
    if tensor.requires_grad and tensor.numel() > _MOST_WEIGHTS:  # type: ignore[attr-defined]
        return None
    return value


def _from_outside(tensor: object) -> Known | None:
    """The values of a tensor that was made outside of the trace."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return None
    assert isinstance(tensor, torch.Tensor)
    if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if tensor.requires_grad and tensor.numel() > _MOST_WEIGHTS:
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        outside = Known(tensor.detach(), State(outside=True), shape=tuple(tensor.shape))
    tensor._brim_known = outside  # type: ignore[attr-defined]
    return outside


def give(tensor: torch.Tensor, value: torch.Tensor, origin: int = 0) -> None:
    """Set the values of ``tensor``."""
    tensor._brim_known = Known(value, State(origin=origin), shape=tuple(tensor.shape))  # type: ignore[attr-defined]


def give_later(tensor: torch.Tensor, make: Callable[[], torch.Tensor], origin: int = 0) -> None:
    """Let ``make`` compute the values of ``tensor`` when they are read."""
    call = _Call(make, (), {}, 1)
    tensor._brim_known = Known(None, State(origin=origin), call, shape=tuple(tensor.shape))  # type: ignore[attr-defined]


def forget(tensor: object) -> None:
    value: Known | None = getattr(tensor, "_brim_known", None)
    if value is None and isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
        value = _from_outside(tensor)
    if value is not None:
        value.state.valid = False


class KnownValues:
    """Carries known values from operation to operation."""

    def __init__(self) -> None:
        self._draws = 0

    def compute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute ``func`` of known values now; None where a value is unknown."""
        if any(known(t) is None for t in flat_leaves(args, kwargs)):
            return None
        return _Call(_really(func), _known_parts(args), _known_parts(kwargs), 0).run()

    def carry(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Make ``result`` known where its inputs are, and forget overwritten values; return whether all results and
        written tensors are known."""
        if _written_positions(func):
            return func is _CHECKED or self._write(func, args, kwargs, result)
        tensors = flat_leaves(args, kwargs)
        if func.namespace == "c10d":  # their schemas do not declare writes
            for tensor in tensors:
                forget(tensor)
            return False
        if func.namespace == "brim":  # kernels of other libraries, which exist for traces only
            return False
        if func in _LIKE:
            args = tuple(_stand_in(arg, func) for arg in args)
            tensors = []
        origin, depth, waits = 0, 0, False
        for tensor in tensors:
            source = peek(tensor)
            if source is None:
                return False
            origin |= source.state.origin
            waits |= source.computed is None
            depth = max(depth, source.depth)
        results = [result] if isinstance(result, torch.Tensor) else list(leaves(result))
        if not results or not all(fits(tensor) for tensor in results):
            return False
        if not tensors and (
            func.namespace != "aten" or _views_first(func)
        ):  # a view of a number that C++ converted to a tensor
            return False
        seed = self._seed(func, kwargs, results)
        call = _Call(_really(func), _known_parts(args), _known_parts(kwargs), depth + 1, seed)
        self._attach(func, call, tensors, results, isinstance(result, torch.Tensor), origin)
        if depth >= _DEEPEST or (not waits and seed is None and all(t.numel() <= _AT_ONCE for t in results)):
            return all(known(tensor) is not None for tensor in results)
        return True

    def _attach(
        self,
        func: OpOverload,
        call: _Call,
        sources: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        alone: bool,
        origin: int,
    ) -> None:
        if _views_first(func):
            source = peek(sources[0])
            assert source is not None
            state = source.state
            state.origin |= origin
        else:
            state = None
            for tensor in sources:
                source = peek(tensor)
                assert source is not None
                source.state.readers.append(weakref.ref(call))
        for index, tensor in enumerate(results):
            tensor._brim_known = Known(  # type: ignore[attr-defined]
                None, state or State(origin=origin), call, None if alone else index, tuple(tensor.shape)
            )

    def _seed(self, func: OpOverload, kwargs: dict[str, Any], new: Sequence[torch.Tensor]) -> int | None:
        """The seed of a delayed draw. None: draw now, as the program does."""
        if torch.Tag.nondeterministic_seeded not in func.tags or all(t.numel() <= _AT_ONCE for t in new):
            return None
        self._draws += 1
        generator = kwargs.get("generator") or torch._C.default_generator
        return (generator.initial_seed() + 7919 * self._draws) % (1 << 63)

    # -- operations in place -------------------------------------------------------------------------------------

    def _write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        written = _written(func, args, kwargs)
        overwrites = func in _OVERWRITE
        sources: list[Known] = []
        for tensor in flat_leaves(args, kwargs):
            if overwrites and tensor is args[0]:
                continue
            source = peek(tensor)
            if source is None:
                for overwritten in written:
                    forget(overwritten)
                return False
            sources.append(source)
        if len(written) == 1 and (overwrites or self._is_better_anew(written[0])) and _is_whole(written[0]):
            return self._write_anew(func, args, kwargs, written[0], sources)
        if overwrites and (target := peek(args[0])) is not None:
            sources.append(target)
        elif overwrites:
            return False
        for counter in written:  # optimizers' counters are incremented together
            if (
                (source := peek(counter)) is not None
                and source.state.outside
                and _is_whole(counter)
                and _may_change(counter)
            ):
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    made = source.value.clone()
                forget(counter)
                give(counter, made, source.state.origin)
        if any(s.computed is None and not _may_change(t) for t in written if (s := peek(t)) is not None) or any(
            s.state.outside for t in written if (s := peek(t)) is not None
        ):
            for overwritten in written:
                forget(overwritten)
            return False
        return self._write_in_place(func, args, kwargs, written, result)

    def _is_better_anew(self, tensor: torch.Tensor) -> bool:
        source = peek(tensor)
        return source is not None and (source.state.outside or source.computed is None)

    def _write_anew(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.Tensor,
        sources: Sequence[Known],
    ) -> bool:
        """Write new values to the whole storage, without computing the old ones."""
        before = peek(target) if func not in _OVERWRITE else None
        forget(target)
        if not fits(target) or (target.requires_grad and target.numel() > _MOST_WEIGHTS):
            return False
        shape, stride, dtype = tuple(target.shape), tuple(target.stride()), target.dtype

        def write(first: torch.Tensor | None, *rest: Any, **options: Any) -> torch.Tensor:
            output = torch.empty_strided(shape, stride, dtype=dtype)
            if first is not None:
                output.copy_(first)
            func(output, *rest, **options)
            return output

        depth = max((source.depth for source in sources), default=0)
        seed = self._seed(func, kwargs, [target])
        call = _Call(write, (before, *_known_parts(args[1:])), _known_parts(kwargs), depth + 1, seed)
        for source in sources:
            source.state.readers.append(weakref.ref(call))
        origin = 0
        for source in sources:
            origin |= source.state.origin
        target._brim_known = Known(None, State(origin=origin), call, shape=shape)  # type: ignore[attr-defined]
        if depth >= _DEEPEST or (seed is None and target.numel() <= _AT_ONCE):
            return known(target) is not None
        return True

    def _write_in_place(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[torch.Tensor],
        result: Any,
    ) -> bool:
        for tensor in written:
            target = peek(tensor)
            assert target is not None
            readers, target.state.readers = target.state.readers, []
            for reference in readers:  # they read the values before the write
                if (call := reference()) is not None and call.args is not None:
                    _run_or_leave(call)
        everything = flat_leaves(args, kwargs)
        if any(known(tensor) is None for tensor in everything):
            for overwritten in written:
                forget(overwritten)
            return False
        real = _Call(func, _known_parts(args), _known_parts(kwargs), 0).run()
        origin = 0
        for tensor in everything:
            origin |= tensor._brim_known.state.origin  # type: ignore[attr-defined]
        for tensor in written:
            tensor._brim_known.state.origin |= origin  # type: ignore[attr-defined]
        for fake, value in zip(leaves(result), leaves(real), strict=False):
            if getattr(fake, "_brim_known", None) is None:
                give(fake, value, origin)
        return True


def _run_or_leave(call: _Call) -> None:
    """Compute the values of a call. Reading a tensor without values reports it."""
    try:
        call.run()
    except (RuntimeError, IndexError, ValueError):
        call.args = call.kwargs = None
        call.func, call.args, call.kwargs = _fails, (), {}


def _fails() -> Any:
    raise RuntimeError("the values were written over before they could be computed")


def _may_change(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _MOST_CHANGED[tensor.dtype.is_floating_point]


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


@cache
def _written_positions(func: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for position, name in _written_positions(func):
        written += leaves(args[position] if position < len(args) else kwargs.get(name))
    return written


@cache
def _views_first(func: OpOverload) -> bool:
    """Return True if the results lie in the first argument's storage."""
    return func in _UNSAFE_VIEWS or any(result.alias_info is not None for result in func._schema.returns)


@cache
def shape_depends_on_values(func: OpOverload) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags


@cache
def _really(func: OpOverload) -> Callable[..., Any]:
    """Return the function that computes the values of ``func``."""
    if func.overloadpacket in _EMPTY:  # uninitialized memory reads as zeros
        return lambda *args, **kwargs: func(*args, **kwargs).zero_()
    if func is _aten.histc.default:  # CUDA supports it for integers too
        return lambda source, *args: func(source.double(), *args).to(source.dtype)
    return func


def fits(tensor: torch.Tensor) -> bool:
    """Return True if values of the tensor may be computed."""
    if tensor.layout is not torch.strided or tensor.dtype not in _KNOWN_DTYPES:
        return False
    if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
        return False
    return tensor.numel() <= _MOST_ELEMENTS[tensor.dtype.is_floating_point]


def _stand_in(value: Any, func: OpOverload) -> Any:
    """A tensor of the same shape, dtype and layout for an operation that reads nothing else."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride, dtype = tuple(value.shape), tuple(value.stride()), value.dtype
    if "like" not in func.name():  # the new tensor has its own shape
        shape, stride = (0,), (1,)
    call = _Call(torch.empty_strided, (shape, stride), {"dtype": dtype}, 0)
    return Known(None, State(), call, shape=shape)


def flat_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """``leaves`` of arguments, nearly all of them tensors and numbers. Called for every operation."""
    leaves_found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            leaves_found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            leaves_found += leaves(value)
    return leaves_found


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Copy containers, with ``change`` applied to their leaves of ``kind``."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, kind, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, kind, change) for key, item in value.items()}
    return value


def _known_parts(value: Any) -> Any:
    return mapped(value, torch.Tensor, peek)


def _values(value: Any) -> Any:
    return mapped(value, Known, lambda known_value: known_value.value)
