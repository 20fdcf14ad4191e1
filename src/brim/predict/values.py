"""Values that are known although nothing is computed.

Small tensors whose values follow from the program alone (``arange``, ``ones``, ``torch.tensor([...])`` and what is
computed from them) are computed for real beside their fakes, so that masks and index tables can be asked about.
The experts that a router's ``topk`` picks are taken as balanced: token t goes to experts k*t, k*t + 1, ...; or, where
the worst case is asked for, as crowded: every token goes to the first k experts.
A program that asks whether values are finite hears that they are, and one that checks whether all of a tensor is true
(as distributions check their parameters) that it is: only a run that is well can be planned.
Nothing else is guessed, and a trace notes which of these it was asked for. A draw from [0, 1) that is compared with a
number outside of it, or with 0 itself (how layers are dropped with probability 0), has one answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
_MOST_ELEMENTS = {False: 1 << 20, True: 1 << 14}  # by whether the dtype is floating
_MOST_TOKENS = 1 << 24  # where there is a number per token of a batch, or per token and expert
_MOST_ROUTED = 1 << 26  # tables of which token goes to which expert
_FACTORIES = {
    _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.ones.default, _aten.zeros.default,
    _aten.full.default, _aten.linspace.default, _aten.eye.default, _aten.eye.m, _aten.scalar_tensor.default,
    _aten.lift_fresh.default, _aten.tril_indices.default, _aten.triu_indices.default,
}  # fmt: skip
_MOST_EXPERTS = 1024
_DRAWS = {_aten.rand.default, _aten.rand_like.default}
_ABOVE = {_aten.gt.Scalar: True, _aten.ge.Scalar: True, _aten.lt.Scalar: False, _aten.le.Scalar: False}


@dataclass(slots=True)
class Known:
    """A real tensor with a fake one's values; ``state`` is shared by all that share its storage."""

    value: torch.Tensor
    state: dict[str, bool] = field(default_factory=lambda: {"valid": True, "routing": False})


@dataclass(frozen=True, slots=True)
class Item:
    item: Any


def known(tensor: object) -> Known | None:
    found: Known | None = getattr(tensor, "_brim_known", None)
    return found if found is not None and found.state["valid"] else None


def _laid_out_alike(fake: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether an operation on memory, not on elements, is the same on both."""
    here = fake.stride(), fake.storage_offset(), fake.untyped_storage().nbytes()
    return here == (value.stride(), value.storage_offset(), value.untyped_storage().nbytes())


class KnownValues:
    """Carries known values from operation to operation."""

    def __init__(self, routing: str = "balanced") -> None:
        self.routing = routing
        self.used_routing = False
        self.used_finite = False  # whether the program asked if values are finite
        self.used_checks = False  # whether it checked that all of a tensor is true

    def read(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        """What a question about a value (``item``) is answered with, if the value is known."""
        if func is not _aten._local_scalar_dense.default:
            return None
        source = known(args[0])
        if source is None:
            return None
        self.used_routing |= source.state["routing"]
        with _disable_current_modes():
            return Item(source.value.item())

    def taken_as(
        self, answer: bool, asked: torch.Tensor, result: torch.Tensor, *, check: bool = False
    ) -> torch.Tensor:
        """Let all of ``result`` be ``answer``, unless the values that were asked about are known."""
        if known(asked) is None:
            self.used_checks |= check
            self.used_finite |= not check
            with _disable_current_modes():
                result._brim_known = Known(torch.tensor(answer).expand(result.shape))  # type: ignore[attr-defined]
        return result

    def shape_of(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of an operation whose shape depends on values, where these are known; else None."""
        if not _shape_depends_on_values(func):
            return None
        if func is _aten.index.Tensor:
            return self._masked_index(args)
        real = self._compute(func, args, kwargs)
        if real is None:
            return None
        self.used_routing |= any(k.state["routing"] for t in _leaves((args, kwargs)) if (k := known(t)))
        fakes = [torch.empty(r.shape, dtype=r.dtype) for r in _leaves(real)]
        for fake, value in zip(fakes, _leaves(real), strict=True):
            self._attach(fake, value, args, kwargs)
        return fakes[0] if isinstance(real, torch.Tensor) else tuple(fakes)

    def carry(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of ``result`` from known inputs, or forget those that ``func`` wrote over."""
        if func in _FACTORIES:
            if _small(result):
                real = self._compute(func, args, kwargs)
                if real is not None:
                    result._brim_known = Known(real)
            return
        if func is _aten.topk.default:
            _route(args, result, self.routing == "crowded")
            return
        if func in _DRAWS:
            result._brim_draw = result._version
        elif func in _ABOVE and _is_draw(args[0]):
            _compare_draw(args[1], _ABOVE[func], result)
            return
        inputs = [t for t in _flat_leaves(args, kwargs) if getattr(t, "_brim_known", None) is not None]
        if not inputs:
            return
        real = None
        routed = any(t._brim_known.state["routing"] for t in inputs)  # type: ignore[attr-defined]
        if all(_small(t) or (routed and t.numel() <= _MOST_ROUTED) for t in _leaves(result)):
            real = self._compute(func, args, kwargs)
        if real is None:
            if func._schema.is_mutable and func is not _aten._amp_foreach_non_finite_check_and_unscale_.default:
                _forget(func, args, kwargs)
            return
        for fake, value in zip(_leaves(result), _leaves(real), strict=False):
            if (found := getattr(fake, "_brim_known", None)) is not None:
                found.state["routing"] |= routed
            else:
                self._attach(fake, value, args, kwargs)

    def _compute(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        tensors = list(_leaves((args, kwargs)))
        if func is not _aten.lift_fresh.default and any(known(t) is None for t in tensors):
            return None
        with _disable_current_modes(), torch.no_grad():
            values, options = _real(args), _real(kwargs)
            if func is _aten.as_strided.default and not _laid_out_alike(args[0], values[0]):
                return None
            if func is _aten.histc.default and not values[0].is_floating_point():  # CUDA has it for integers too
                return func(values[0].double(), *values[1:], **options).to(values[0].dtype)
            return func(*values, **options)

    def _masked_index(self, args: tuple[Any, ...]) -> Any:
        """``self[mask]`` with a known mask: the same as indexing with the mask's positions."""
        indices: list[Any] = []
        if not any(_is_mask(index) for index in args[1]):
            return None
        for index in args[1]:
            if not _is_mask(index):
                indices.append(index)
                continue
            mask = known(index)
            if mask is None:
                return None
            self.used_routing |= mask.state["routing"]
            with _disable_current_modes():
                positions = mask.value.nonzero(as_tuple=True)
            indices += [torch.empty(p.shape, dtype=p.dtype) for p in positions]
        result = _aten.index.Tensor(args[0], indices)
        real = self._compute(_aten.index.Tensor, args, {}) if _small(result) else None
        if real is not None:
            self._attach(result, real, args, {})
        return result

    def _attach(self, fake: torch.Tensor, value: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Give ``fake`` its values; one that views an input shares that input's state."""
        sources = [k for t in _leaves((args, kwargs)) if (k := known(t))]
        storage = value.untyped_storage().data_ptr()
        for source in sources:
            if storage and source.value.untyped_storage().data_ptr() == storage:
                fake._brim_known = Known(value, source.state)  # type: ignore[attr-defined]
                return
        made = Known(value)
        made.state["routing"] = any(s.state["routing"] for s in sources)
        fake._brim_known = made  # type: ignore[attr-defined]


@cache
def _shape_depends_on_values(func: torch._ops.OpOverload) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _route(args: tuple[Any, ...], result: Any, crowded: bool) -> None:
    scores, count = args[0], args[1]
    dim = args[2] if len(args) > 2 else -1
    indices = result[1]
    last = dim in (-1, scores.dim() - 1)
    if not last or scores.size(-1) > _MOST_EXPERTS or not _small(indices) or indices.numel() == 0:
        return
    with _disable_current_modes():
        experts = scores.size(-1)
        rows = indices.numel() // count
        first = torch.arange(rows).mul(0 if crowded else count).unsqueeze(1)
        picks = (first + torch.arange(count)).remainder(experts).view(tuple(indices.shape))
    indices._brim_known = Known(picks)
    indices._brim_known.state["routing"] = True


def _is_draw(tensor: torch.Tensor) -> bool:
    """Whether it was drawn from [0, 1) and not written since."""
    return getattr(tensor, "_brim_draw", None) == tensor._version


def _compare_draw(bound: object, above: bool, result: torch.Tensor) -> None:
    """One draw in 2^24 is 0 itself: with that bound the answer is the one of all others."""
    if isinstance(bound, (int, float)) and not 0 < bound < 1:
        with _disable_current_modes():
            answer = torch.tensor((bound <= 0) == above).expand(result.shape)
        result._brim_known = Known(answer)  # type: ignore[attr-defined]


def carry_one_hot(classes: torch.Tensor, result: torch.Tensor) -> None:
    """Let a table of which class each element has be known where the classes are."""
    source = known(classes)
    if source is None or known(result) is not None:
        return
    if _small(result) or (source.state["routing"] and result.numel() <= _MOST_ROUTED):
        with _disable_current_modes():
            table = torch.nn.functional.one_hot(source.value, result.size(-1))
        made = Known(table)
        made.state["routing"] = source.state["routing"]
        result._brim_known = made  # type: ignore[attr-defined]


def _forget(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _leaves(value):
                if (found := getattr(tensor, "_brim_known", None)) is not None:
                    found.state["valid"] = False


def _small(tensor: Any) -> bool:
    """Whether its values are worth computing: those of a matrix of scores are not, those of a batch's tokens are."""
    if not isinstance(tensor, torch.Tensor):
        return False
    floating = tensor.dtype.is_floating_point
    return tensor.numel() <= (_MOST_TOKENS if tensor.dim() <= 2 and not floating else _MOST_ELEMENTS[floating])


def _flat_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """``_leaves`` of arguments, of which nearly all are tensors and numbers: every operation asks."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += _leaves(value)
    return found


def _leaves(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        found = known(value)
        return value if found is None else found.value
    if isinstance(value, (tuple, list)):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return value
