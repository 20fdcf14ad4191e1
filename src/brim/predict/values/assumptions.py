"""Assumed values of a trace: those of weights, and of everything that depends on them.

Whole numbers and booleans that are computed from such values are assumed: the worst case for memory, or the outcome
of a healthy run. Floating-point numbers are made up when the program reads one. Each decision by either is recorded
with the line that read it, or refused if ``strict``.

* A comparison is true of each element, or of the share of them that ``assume`` gives; no two floats are equal.
* ``argmax``, ``topk`` and the like choose classes evenly, in turn: token t of a router goes to experts k*t,
  k*t + 1, ...; or, with crowded routing, every token goes to the first k.
* Other whole numbers are 1, so that nothing is empty; elements that are counted are distinct and not zero.
* A check for negative elements finds none.
* In an optimizer's code nothing has converged, so its step takes as long as it can: a number exceeds a tolerance
  that it is compared with, and of two numbers the left one, which is the newer, is the smaller.
* Values are finite, and the program's checks hold: only a healthy run can be planned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from brim.predict import failures
from brim.predict.flops import leaves
from brim.predict.values.known import (
    ASSUMED,
    MADE_UP,
    NEGATIVE,
    ROUTED,
    KnownValues,
    fits,
    flat_leaves,
    give,
    give_later,
    known,
    mapped,
    peek,
    shape_depends_on_values,
)

_aten = torch.ops.aten
_MOST_EXPERTS = 1024
_TOLERANCE = 0.01  # at most this large, an optimizer's comparison value is a tolerance
_SHRINKS = 0.9  # numbers that a line reads repeatedly approach zero, so that loops on them end
_ORDERED: dict[Any, Callable[[float, float], bool]] = {
    _aten.gt: float.__gt__, _aten.ge: float.__ge__, _aten.lt: float.__lt__, _aten.le: float.__le__,
}  # fmt: skip
_NEVER = {_aten.eq, _aten.isnan, _aten.isinf, _aten.isneginf, _aten.isposinf}
_CHOICES = {_aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.topk, _aten.multinomial, _aten.kthvalue,
            _aten.median, _aten.mode, _aten.cummax, _aten.cummin}  # fmt: skip
_COMPARISONS = {_aten.equal.default, _aten.allclose.default}
_CHOOSERS = {"torchvision::nms"}
_PERMUTATIONS = {_aten.sort, _aten.argsort}


@dataclass(frozen=True, slots=True)
class Item:
    item: Any


@dataclass(slots=True)
class Questions:
    """A program's reads of unknown values, by their lines (each once, in order)."""

    routing: bool = False
    finite: bool = False  # whether values are finite
    checks: bool = False  # whether all of a tensor is true
    decided: dict[str, None] = field(default_factory=dict)  # a made-up number decided something
    read: dict[str, None] = field(default_factory=dict)  # it was read as a plain number or array
    assumed: dict[str, None] = field(default_factory=dict)  # whole numbers, booleans and sizes


class Values:
    """The values of one trace: known ones, and assumptions for the others."""

    def __init__(self, routing: str = "balanced", *, strict: bool = False, assume: float = 1.0) -> None:
        self.crowded, self.strict, self.share = routing == "crowded", strict, assume
        self.known = KnownValues()
        self.questions = Questions()
        self._reads: Counter[str] = Counter()
        self.optimizer_asks: Callable[[], bool] = lambda: False  # whether an optimizer's own code is running

    # -- questions of the program ----------------------------------------------------------------------------------

    def read(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        """Return the result of a read of values (``item``, ``equal``); None if it is unknown."""
        if func in _COMPARISONS:
            return self._compared(func, args, kwargs)
        if func is not _aten._local_scalar_dense.default:
            return None
        source = known(args[0])
        if source is not None:
            self.note(source.state.origin, args[0].dtype)
            with _disable_current_modes():
                return Item(source.value.item())
        if self.strict:
            return None
        if args[0].dtype.is_floating_point or args[0].dtype.is_complex:
            number = self.plausible(args[0])
            self.questions.read[failures.line()] = None
            return Item(complex(number) if args[0].dtype.is_complex else number)
        self.questions.assumed[failures.line()] = None
        return Item(True if args[0].dtype == torch.bool else 1)

    def _compared(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        """Return True if two tensors are equal, or if one is unknown, as such a check passes."""
        sources = [known(one) for one in args[:2]]
        real = [source.value for source in sources if source is not None]
        if len(real) == len(sources):
            for source in sources:
                self.note(source.state.origin if source else 0)
            with _disable_current_modes():
                return Item(func(*real, *args[2:], **kwargs))
        if self.strict:
            return None
        self.questions.checks = True
        return Item(args[0].shape == args[1].shape or func is _aten.allclose.default)

    def note(self, origin: int, dtype: torch.dtype | None = None) -> None:
        """Record that a value of ``origin`` was read."""
        self.questions.routing |= bool(origin & ROUTED)
        if origin & MADE_UP:
            where = self.questions.read if dtype is not None and dtype.is_floating_point else self.questions.decided
            where[failures.line()] = None
        elif origin & ASSUMED:
            self.questions.assumed[failures.line()] = None

    def decide(self) -> None:
        """Record that the program decides by a made-up number; raises UnsupportedError if ``strict``."""
        if self.strict:
            raise failures.decision()
        self.questions.decided[failures.line()] = None

    def plausible(self, tensor: torch.Tensor) -> float:
        """A plausible number for a tensor of one element; the same at each call."""
        number: float | None = getattr(tensor, "_brim_plausible", None)
        if number is None:
            number = tensor._brim_plausible = self.number()  # type: ignore[attr-defined]
        return number

    def number(self) -> float:
        """Return a number of the size of a loss, smaller with each read of the same line."""
        line = failures.line()
        self._reads[line] += 1
        return float(max(_SHRINKS ** (self._reads[line] - 1), 1e-30))

    def is_made_up(self, tensor: torch.Tensor) -> bool:
        """Return True if the number read from ``tensor``, of one element, is assumed."""
        if tensor.numel() != 1 or not tensor.dtype.is_floating_point or self.strict:
            return False
        source = known(tensor)
        return source is None or bool(source.state.origin & MADE_UP)

    def answer(self, result: torch.Tensor, answer: bool) -> None:
        """Record ``result`` as the outcome of a comparison of made-up numbers."""
        with _disable_current_modes():
            give(result, torch.full(tuple(result.shape), answer), MADE_UP)

    def as_compared(self, first: float, second: float, made_up: tuple[bool, bool]) -> tuple[float, float]:
        """Return the operands of a comparison if some are made up."""
        if not any(made_up) or not self.optimizer_asks():
            return first, second
        if all(made_up):
            return 0.0, 1.0
        limit = second if made_up[0] else first
        if not 0 < abs(limit) <= _TOLERANCE:
            return first, second
        beyond = math.copysign(1.0, limit)
        return (beyond, second) if made_up[0] else (first, beyond)

    def array(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of ``tensor``, for NumPy and lists; raises UnsupportedError where there are none."""
        source = known(tensor)
        if source is not None:
            self.note(source.state.origin, tensor.dtype)
            return source.value
        if self.strict or not fits(tensor):
            raise failures.no_numpy()
        (self.questions.read if tensor.dtype.is_floating_point else self.questions.assumed)[failures.line()] = None
        return _distinct(tensor)

    def taken_as(
        self, answer: bool, tensor: torch.Tensor, result: torch.Tensor, *, check: bool = False
    ) -> torch.Tensor:
        """Set all elements of ``result`` to ``answer``, unless the values of ``tensor`` are known."""
        source = known(tensor)
        if source is None or source.state.origin & (ASSUMED | MADE_UP):
            self.questions.checks |= check
            self.questions.finite |= not check
            with _disable_current_modes():
                give(result, torch.full(tuple(result.shape), answer))
        return result

    # -- operations ------------------------------------------------------------------------------------------------

    def shape_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of an operation whose shape depends on values; None for others, and if it is unknown."""
        if func.namespace != "aten" and (chosen := self._all_of(func, args)) is not None:
            return chosen
        if not shape_depends_on_values(func):
            return None
        if func is _aten.index.Tensor:
            return self._masked_index(args[0], args[1])
        if func is _aten.masked_select.default:
            source, mask = torch.broadcast_tensors(*args)
            if mask is not args[1] and (real := known(args[1])) is not None:
                with _disable_current_modes():
                    give(mask, real.value.expand(tuple(mask.shape)), real.state.origin)
            return self._masked_index(source, [mask])
        sources = flat_leaves(args, kwargs)
        unknown = [tensor for tensor in sources if known(tensor) is None]
        if not unknown:
            real = self.known.compute(func, args, kwargs)
        elif self.strict or not all(fits(tensor) for tensor in unknown):
            return None
        else:
            with _disable_current_modes():
                real = func(*filled(args), **filled(kwargs))
        origin = ASSUMED if unknown else 0
        for tensor in sources:
            origin |= 0 if (source := peek(tensor)) is None else source.state.origin
        self.note(origin)
        fakes = [torch.empty(r.shape, dtype=r.dtype) for r in leaves(real)]
        if func is _aten.nonzero.default:  # Nonzero.cu, as the CPU: each column is contiguous
            fakes = [torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)]
        for fake, value in zip(fakes, leaves(real), strict=True):
            if not unknown or not value.is_floating_point():
                give(fake, value, origin)
        return fakes[0] if isinstance(real, torch.Tensor) else tuple(fakes)

    def _all_of(self, func: OpOverload, args: tuple[Any, ...]) -> torch.Tensor | None:
        """An operator of another library that selects from its first argument: all of it, the worst case. None for
        others."""
        if func.name() not in _CHOOSERS or self.strict:
            return None
        self.questions.assumed[failures.line()] = None
        count = args[0].size(0)
        made: torch.Tensor = args[0].new_empty(count, dtype=torch.long)
        give_later(made, lambda: torch.arange(count), ASSUMED)
        return made

    def _masked_index(self, source: torch.Tensor, index_args: Any) -> Any:
        """``source[mask]``: the same as indexing with the mask's positions."""
        indices: list[Any] = []
        if not any(_is_mask(index) for index in index_args):
            return None
        for index in index_args:
            if not _is_mask(index):
                indices.append(index)
                continue
            mask = known(index)
            if mask is None:
                if self.strict or not fits(index):
                    return None
                self._assume_share(index)
                mask = known(index)
                assert mask is not None
            self.note(mask.state.origin)
            with _disable_current_modes():
                positions = mask.value.nonzero(as_tuple=True)
            fakes = [torch.empty(p.shape, dtype=p.dtype) for p in positions]
            for fake, value in zip(fakes, positions, strict=True):
                give(fake, value, mask.state.origin)
            indices += fakes
        result = _aten.index.Tensor(source, indices)
        self.carry(_aten.index.Tensor, (source, indices), {}, result)
        return result

    def carry(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Set the values of ``result``, or assumptions for whole numbers and booleans."""
        if func.overloadpacket is _aten.any and (negative := peek(args[0])) and negative.state.origin & NEGATIVE:
            self.questions.checks = True
            shape = tuple(result.shape)
            give_later(result, lambda: torch.zeros(shape, dtype=torch.bool))
            return
        if self.known.carry(func, args, kwargs, result):
            return
        made = [result] if isinstance(result, torch.Tensor) else leaves(result)
        for tensor in made:
            if tensor.dtype.is_floating_point or peek(tensor) is not None or not fits(tensor):
                continue
            if self.strict and func.overloadpacket is not _aten.topk:
                continue
            self._assume(func, args, kwargs, tensor)

    # -- assumptions -----------------------------------------------------------------------------------------------

    def _assume(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        packet = func.overloadpacket
        if packet in _CHOICES or packet in _PERMUTATIONS:
            self._choose(func, args, kwargs, result)
        elif result.dtype != torch.bool:
            shape, dtype = tuple(result.shape), result.dtype
            give_later(result, lambda: torch.ones(shape, dtype=dtype), ASSUMED)
        elif packet in _ORDERED and result.numel() == 1 and self._compare(packet, args, result):
            return
        elif packet in _NEVER:
            shape = tuple(result.shape)
            give_later(result, lambda: torch.zeros(shape, dtype=torch.bool), ASSUMED)
        else:
            below = packet in (_aten.lt, _aten.le) and not isinstance(args[1], torch.Tensor) and args[1] <= 0
            self._assume_share(result, ASSUMED | NEGATIVE if below else ASSUMED)

    def _assume_share(self, mask: torch.Tensor, origin: int = ASSUMED) -> None:
        """Assume that a share of a mask's elements is true, spread evenly."""
        shape, share = tuple(mask.shape), self.share
        if share == 1 or mask.numel() == 1:
            give_later(mask, lambda: torch.ones(shape, dtype=torch.bool), origin)
            return

        def spread() -> torch.Tensor:
            count = torch.arange(mask_elements + 1, dtype=torch.float64).mul_(share).ceil_()
            return count[1:].gt(count[:-1]).view(shape)

        mask_elements = mask.numel()
        give_later(mask, spread, origin)

    def _compare(self, packet: Any, args: tuple[Any, ...], result: torch.Tensor) -> bool:
        """Compare single numbers by their assumed values."""
        numbers, made_up = [], []
        for arg in args[:2]:
            if not isinstance(arg, torch.Tensor):
                if not isinstance(arg, (int, float)):
                    return False
                numbers.append(float(arg))
                made_up.append(False)
            elif (source := known(arg)) is not None:
                with _disable_current_modes():
                    numbers.append(float(source.value.item()))
                made_up.append(bool(source.state.origin & MADE_UP))
            elif arg.dtype.is_floating_point and arg.numel() == 1:
                numbers.append(self.plausible(arg))
                made_up.append(True)
            else:
                return False
        self.answer(result, _ORDERED[packet](*self.as_compared(numbers[0], numbers[1], (made_up[0], made_up[1]))))
        return True

    def _choose(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        """Assume positions along a dimension of the first argument."""
        scores, shape, crowded = args[0], tuple(result.shape), self.crowded
        if func.overloadpacket is _aten.sort and not result.dim():
            return
        dim = _dimension(func, args, kwargs)
        classes = scores.numel() if dim is None or not scores.dim() else scores.size(dim)
        axis = None if dim is None else dim % max(scores.dim(), 1)
        keeps = axis is not None and len(shape) == scores.dim()  # topk and sort: several along that dimension
        count = shape[axis] if axis is not None and keeps and shape else 1
        if self.strict and (axis is None or axis != scores.dim() - 1 or classes > _MOST_EXPERTS):
            return
        routed = classes <= _MOST_EXPERTS and func.overloadpacket not in _PERMUTATIONS
        start = 0 if routed else classes // 2

        def choose() -> torch.Tensor:
            if not result_elements:
                return torch.empty(shape, dtype=torch.long)
            rows = result_elements // count
            if not routed and count > 1:
                first = torch.zeros(rows, 1, dtype=torch.long)
            else:
                first = torch.arange(rows).mul(0 if crowded else count).add(start).unsqueeze(1)
            picks = (first + torch.arange(count)).remainder(max(classes, 1))
            if not keeps or axis is None:
                return picks.view(shape)
            outer = [size for index, size in enumerate(shape) if index != axis]
            return picks.view(*outer, count).movedim(-1, axis)

        result_elements = result.numel()
        give_later(result, choose, ROUTED if routed else ASSUMED)


def _dimension(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension of a choice such as ``argmax``; None: all dimensions."""
    if func.overloadpacket is _aten.multinomial:
        return -1
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            value = args[position] if position < len(args) else kwargs.get("dim", argument.default_value)
            return None if value is None else int(value)
    return None


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Made-up values: no two floats are equal, and none is zero."""
    with _disable_current_modes():
        if tensor.dtype == torch.bool or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return torch.ones(tuple(tensor.shape), dtype=tensor.dtype)
        exact = torch.float64 if tensor.numel() > 1 << 22 else torch.float32
        steps = torch.arange(1, tensor.numel() + 1, dtype=exact).div_(tensor.numel() + 1)
        return steps.view(tuple(tensor.shape)).to(tensor.dtype if tensor.element_size() >= 4 else exact)


def filled(value: Any) -> Any:
    """Replace all fake tensors by real ones."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        source = known(tensor)
        return _distinct(tensor) if source is None else source.value

    return mapped(value, torch.Tensor, fill)
