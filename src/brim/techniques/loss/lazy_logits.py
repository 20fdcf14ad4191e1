"""Lazy logits: a tensor made of hidden states and the head that would compute the logits.

Operations of training loops between a head and its loss (change the dtype, shift by slicing, flatten, transpose,
scale) are recorded and applied to the rows when these are computed. The loss is computed a chunk of rows at a time.
Any other operation gets the full logits, computed once: correct, only larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from brim.techniques.base import autocast_cache

Change = Callable[[torch.Tensor], torch.Tensor]


class HeadCall:
    """A deferred call of a head by ``compute``, shared by all views of its logits."""

    def __init__(
        self, head: nn.Module, hidden: torch.Tensor, chunk_tokens: int, compute: Callable[..., torch.Tensor]
    ) -> None:
        self.head, self.hidden, self.chunk_tokens, self._compute = head, hidden, chunk_tokens, compute
        self.grad = torch.is_grad_enabled()
        self.full: torch.Tensor | None = None  # once computed
        self._autocast = _autocast_state(hidden)

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """Call the head, hooks included, on ``rows`` (..., hidden), under the autocast of the deferred call."""
        # A cast of the weight made without gradients must not be cached for code that needs gradients.
        with _autocast(rows, self._autocast), autocast_cache(torch.is_grad_enabled()):
            return self._compute(rows)


@dataclass(frozen=True, kw_only=True)
class View:
    """Logits of ``rows`` (*leading, hidden) after ``changes``, with classes at ``class_dim``.

    ``sample`` are the logits of no rows, (0, classes) in their dtype. ``steps`` compute the view from the full logits
    of ``call``.
    """

    call: HeadCall
    rows: torch.Tensor
    sample: torch.Tensor
    class_dim: int
    changes: tuple[Change, ...] = ()
    steps: tuple[Change, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        leading = list(self.rows.shape[:-1])
        return (*leading[: self.class_dim], self.sample.shape[-1], *leading[self.class_dim :])

    @property
    def is_class_last(self) -> bool:
        return self.class_dim == self.rows.dim() - 1

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """The logits of ``rows``, classes last."""
        logits = self.call.run(rows)
        for change in self.changes:
            logits = change(logits)
        return logits

    def full(self) -> torch.Tensor:
        """All logits of the view. Views of the same call share its memory."""
        with torch.set_grad_enabled(self.call.grad):
            if self.call.full is None:
                self.call.full = self.call.run(self.call.hidden)
            value = self.call.full
            for step in self.steps:
                value = step(value)
        return value


class LazyLogits(torch.Tensor):
    """A tensor without memory; see ``View``."""

    view_: View

    @staticmethod
    def __new__(cls, view: View) -> LazyLogits:
        logits: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, dtype=view.sample.dtype, device=_true_device(view.rows)
        )
        logits.view_ = view
        return logits

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.view_.rows.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.view_.rows.is_cuda

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.view_.rows.is_cpu

    def get_device(self) -> int:
        return self.view_.rows.get_device()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(func)
        first = args[0] if args else None
        if rule is not None and isinstance(first, LazyLogits) and first.view_.call.full is None:
            result = rule(first.view_, func, args[1:], kwargs)
            if result is not None:
                return result
        values = tree_map_only(LazyLogits, lambda lazy: lazy.view_.full(), (args, kwargs))
        return func(*values[0], **values[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute in an autograd function of the user, where autograd knows this tensor by ``_Defer``."""
        values = tree_map_only(LazyLogits, lambda lazy: lazy.view_.full().detach(), (args, kwargs or {}))
        return func(*values[0], **values[1])


def _true_device(tensor: torch.Tensor) -> torch.device:
    """The real device of a tensor; in a trace it may report a GPU that is not there."""
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device


class _Defer(torch.autograd.Function):
    """Connects lazy logits to the autograd graph, for code that differentiates through them."""

    @staticmethod
    def forward(ctx: Any, view: View, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.view, ctx.parameters = view, parameters
        return LazyLogits(view)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        view: View = ctx.view
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            rows = view.rows.detach().requires_grad_(needed[0])
            logits = view.run(rows).movedim(-1, view.class_dim)
        inputs = [value for value, need in zip((rows, *ctx.parameters), needed, strict=True) if need]
        input_gradients = iter(torch.autograd.grad(logits, inputs, gradients[0], allow_unused=True))
        return (None, *(next(input_gradients) if need else None for need in needed))


def lazy(view: View) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return LazyLogits(view)
    logits: torch.Tensor = _Defer.apply(view, view.rows, *view.call.head.parameters())  # type: ignore[no-untyped-call]
    return logits


def defer(
    head: nn.Module, hidden: torch.Tensor, chunk_tokens: int, compute: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The lazy result of ``head(hidden)``, which ``compute`` computes; ``hidden`` is (*leading, width)."""
    call = HeadCall(head, hidden, chunk_tokens, compute)
    with torch.no_grad():
        sample = call.run(hidden.reshape(-1, hidden.shape[-1])[:0])
    return lazy(View(call=call, rows=hidden, sample=sample, class_dim=hidden.dim() - 1))


# -- rules, which record an operation; a rule returns None for arguments that it cannot record

Rule = Callable[[View, Any, Sequence[Any], dict[str, Any]], Any]


def _with_step(
    view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any], **changed: Any
) -> torch.Tensor | None:
    if torch.is_grad_enabled() != view.call.grad:
        return None

    def step(value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = func(value, *args, **kwargs)
        return output

    return lazy(replace(view, steps=(*view.steps, step), **changed))


def _pointwise(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not all(isinstance(value, (bool, int, float, torch.dtype)) for value in (*args, *kwargs.values())):
        return None

    def change(logits: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = func(logits, *args, **kwargs)
        return output

    sample = change(view.sample)
    return _with_step(view, func, args, kwargs, changes=(*view.changes, change), sample=sample)


def _to(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    for value in (*args, kwargs.get("device"), kwargs.get("dtype")):
        if isinstance(value, (str, torch.device)) and torch.device(value) != view.rows.device:
            return None
        if value is not None and not isinstance(value, (str, torch.device, torch.dtype, bool)):
            return None
    dtype = next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)
    if set(kwargs) - {"device", "dtype", "non_blocking"}:
        return None
    return _pointwise(view, func, () if dtype is None else (dtype,), {})


def _reshape(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or not sizes or not view.is_class_last or not all(isinstance(size, int) for size in sizes):
        return None
    shape = _inferred(tuple(sizes), math.prod(view.shape))
    if shape is None or shape[-1] != view.sample.shape[-1] or len(shape) < 2:
        return None
    rows = view.rows.reshape(*shape[:-1], view.rows.shape[-1])
    return _with_step(view, func, args, kwargs, rows=rows, class_dim=len(shape) - 1)


def _flatten(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    start, end = (*args, *(kwargs.get(name, default) for name, default in _FLATTEN[len(args) :]))
    start, end = start % len(view.shape), end % len(view.shape)
    if not view.is_class_last or end >= view.class_dim or start > end:
        return None
    rows = view.rows.flatten(start, end)
    return _with_step(view, func, args, kwargs, rows=rows, class_dim=rows.dim() - 1)


def _transpose(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return None
    order = list(range(len(view.shape)))
    order[args[0]], order[args[1]] = order[args[1]], order[args[0]]
    return _ordered(view, func, args, order)


def _permute(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dims = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or len(dims) != len(view.shape):
        return None
    return _ordered(view, func, args, [dim % len(view.shape) for dim in dims])


def _ordered(view: View, func: Any, args: Sequence[Any], order: Sequence[int]) -> Any:
    leading = [dim - (dim > view.class_dim) for dim in order if dim != view.class_dim]
    rows = view.rows.permute(*leading, -1)
    return _with_step(view, func, args, {}, rows=rows, class_dim=order.index(view.class_dim))


def _index(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Slices of rows, or rows picked by a tensor: a mask of leading dimensions, or positions in the first."""
    (key,) = args
    if not view.is_class_last:
        return None
    if isinstance(key, torch.Tensor):
        if key.dtype is torch.bool and key.dim() >= view.rows.dim():
            return None
        rows = view.rows[key]
    else:
        parts = _spelled_out(key if isinstance(key, tuple) else (key,), len(view.shape))
        if parts is None or parts[-1] != slice(None):
            return None
        rows = view.rows[parts]
    if rows.dim() < 2:
        return None
    return _with_step(view, func, args, kwargs, rows=rows, class_dim=rows.dim() - 1)


def _argmax(view: View, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dim = args[0] if args else kwargs.get("dim")
    if len(args) > 1 or set(kwargs) - {"dim"} or dim is None or dim % len(view.shape) != view.class_dim:
        return None
    with torch.no_grad():
        rows = view.rows.reshape(-1, view.rows.shape[-1])
        parts = [view.run(part).argmax(-1) for part in rows.split(view.call.chunk_tokens)]
    return torch.cat(parts).view(view.rows.shape[:-1])


def _inferred(shape: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    if shape.count(-1) > 1:
        return None
    known_count = math.prod(size for size in shape if size != -1)
    if known_count == 0 or count % known_count:
        return None
    inferred = tuple(count // known_count if size == -1 else size for size in shape)
    return inferred if math.prod(inferred) == count else None


def _spelled_out(key: tuple[Any, ...], dims: int) -> tuple[Any, ...] | None:
    """An index of slices and integers with an entry for each dimension; None for any other index."""
    if not all(part is Ellipsis or (isinstance(part, (slice, int)) and not isinstance(part, bool)) for part in key):
        return None
    parts = [part for part in key if part is not Ellipsis]
    if len(parts) > dims or len(key) - len(parts) > 1:
        return None
    at = next((i for i, part in enumerate(key) if part is Ellipsis), len(key))
    return (*key[:at], *(slice(None),) * (dims - len(parts)), *key[at + 1 :])


# -- autocast at the deferred call

_State = dict[str, tuple[bool, torch.dtype]]


def _autocast_state(hidden: torch.Tensor) -> _State:
    devices = dict.fromkeys(("cpu", "cuda", hidden.device.type))
    return {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
        if torch.amp.is_autocast_available(device)
    }


@contextmanager
def _autocast(rows: torch.Tensor, state: _State) -> Iterator[None]:
    with ExitStack() as stack:
        for device, now in _autocast_state(rows).items():
            if now != state[device]:
                enabled, dtype = state[device]
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


def _functions(*names: str) -> Iterator[Any]:
    for name in names:
        for owner in (torch.Tensor, torch):
            if hasattr(owner, name):
                yield getattr(owner, name)


_FLATTEN = (("start_dim", 0), ("end_dim", -1))
# Properties that need no values.
_PROPERTIES = ("shape", "dtype", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_meta", "is_sparse",
               "is_quantized", "is_nested", "output_nr")  # fmt: skip
_METADATA = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES} | set(
    _functions("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
               "stride", "is_contiguous", "__len__", "__hash__")
)  # fmt: skip

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_functions("float", "double", "half", "bfloat16", "tanh", "mul", "div", "multiply", "divide",
                               "true_divide", "__mul__", "__rmul__", "__truediv__", "__div__"), _pointwise),
    **dict.fromkeys(_functions("to"), _to),
    **dict.fromkeys(_functions("contiguous"), _with_step),
    **dict.fromkeys(_functions("view", "reshape"), _reshape),
    **dict.fromkeys(_functions("flatten"), _flatten),
    **dict.fromkeys(_functions("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(_functions("permute"), _permute),
    **dict.fromkeys(_functions("__getitem__"), _index),
    **dict.fromkeys(_functions("argmax"), _argmax),
}  # fmt: skip
