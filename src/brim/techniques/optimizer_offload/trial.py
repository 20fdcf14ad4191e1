"""Try an optimizer: find the state tensors of each parameter, and if it can be run block by block.

This works for any class: a copy of the user's optimizer steps two small parameters
together and one after the other. If the results differ (a shared counter, one random stream, a norm over all
parameters), so would those of steps block by block.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from brim.errors import UnsupportedError
from brim.techniques.blocks import inner_tensors, with_inner

_STEPS = 3
_TRIED, _PART = 97, 61  # elements of the last dimension, and of a part
_GPU_TRIED, _GPU_PART = 128, 64  # parts end at multiples of 1,024 (state_blocks.py), so at those of these too
# Options that choose a kernel and not the states; some kernels refuse tensors without values.
_KERNELS = {"foreach": None, "fused": None, "capturable": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor in an optimizer's state of a parameter. ``like``: a dense one of its kind, on the meta device."""

    key: str
    like: torch.Tensor

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor) -> StateTensor:
        with _apart():
            plain = (
                torch.empty_strided(t.shape, dense_stride(t), dtype=t.dtype, device="meta")
                for t in inner_tensors(tensor)
            )
            return cls(key=key, like=with_inner(tensor, plain))

    def part(self, begin: int, end: int) -> StateTensor:
        """The elements ``begin`` to ``end`` of a contiguous tensor."""
        with _apart():
            return StateTensor(key=self.key, like=self.like.reshape(-1)[begin:end])


def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype and shape, or the class of a tensor that wraps others, what it keeps beside them, and their kinds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.dtype, tuple(tensor.shape)
    return type(tensor), tensor.__tensor_flatten__()[1], [kind(inner) for inner in inner_tensors(tensor)]


def raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's step without PyTorch's hooks around it (``profile_hook_step``)."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class Trial:
    """Samples of an optimizer's states. Raises UnsupportedError if it cannot step its parameters one by one.

    ``on_gpu``: a GPU will step. The trial is on the CPU all the same, as for a GPU that is not here.
    """

    def __init__(self, optimizer: Optimizer, *, on_gpu: bool = False) -> None:
        self._optimizer = optimizer
        # A CPU's kernels may round whole vectors and the elements after them in two ways, a GPU's have one: then the
        # tried parts are whole vectors of the CPU, whichever it has.
        self._tried, self._part = (_GPU_TRIED, _GPU_PART) if on_gpu else (_TRIED, _PART)
        self._samples: dict[tuple[int, int, torch.dtype], dict[str, Any]] = {}
        self._elementwise: dict[tuple[int, int, torch.dtype], bool] = {}
        self._state_tensors: dict[tuple[Any, ...], list[StateTensor]] = {}
        manager = getattr(optimizer, "mng", None)  # bitsandbytes'
        if getattr(optimizer, "is_paged", False):
            raise self._refusal("bitsandbytes pages its states itself.")
        if manager is not None and (manager.index2config or manager.module_weight_config_triple):
            raise self._refusal("bitsandbytes has options for some parameters, by their positions among all.")

    def sample(self, group: int, parameter: torch.Tensor) -> dict[str, Any]:
        """The state, after some steps, of a tiny parameter of the same number of dimensions."""
        key = group, parameter.dim(), parameter.dtype
        if key not in self._samples:
            with _apart():
                self._samples[key] = self._try(self._optimizer.param_groups[group], (2,) * key[1], key[2])
        return self._samples[key]

    def is_elementwise(self, group: int, parameter: torch.Tensor) -> bool:
        """Return whether a parameter may be updated part by part, each with its part of the states.

        For a CPU, the tried parts end within vectors: kernels must compute the same for single elements as for many.
        """
        key = group, parameter.dim(), parameter.dtype
        if key not in self._elementwise:
            with _apart():
                self._elementwise[key] = self._is_same_in_parts(self._optimizer.param_groups[group], *key[1:])
        return self._elementwise[key]

    def _is_same_in_parts(self, options: dict[str, Any], dims: int, dtype: torch.dtype) -> bool:
        if not dims or not dtype.is_floating_point:
            return False
        shape = (2,) * (dims - 1) + (self._tried,)
        try:
            at_once, in_parts = (self._run_in_parts(options, shape, dtype, length) for length in (None, self._part))
        except Exception:  # its step may refuse parameters of one dimension in any way
            return False
        return all(_same(left, right) for left, right in zip(at_once, in_parts, strict=True))

    def _run_in_parts(
        self, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, length: int | None
    ) -> list[Any]:
        """Step a parameter, or its parts one by one. Returns the values, states, groups and other attributes."""
        count = torch.Size(shape).numel()
        at = torch.arange(count, dtype=torch.float64)
        data = torch.sin(at * 1.7).to(dtype)
        copied = without_states(self._optimizer, [{**options, "params": []}])
        runs = [slice(begin, begin + (length or count)) for begin in range(0, count, length or count)]
        states: list[dict[str, Any]] = [{} for _ in runs]
        used: list[torch.Tensor] = []  # kept alive, so that no identity is reused
        for turn in range(_STEPS):
            slope = (torch.cos(at * 0.9 + turn) * 10.0 ** (-at % 7)).to(dtype)
            for number, run in enumerate(runs):
                # A part is another tensor at each step, as its stand-in is; the parameter is always the same.
                part = data[run].view(-1) if length else used[0] if used else data.view(shape)
                used.append(part)
                part.grad = slope[run].view(part.shape)
                copied.param_groups[0]["params"] = [part]
                if states[number]:
                    copied.state[part] = states[number]
                raw_step(copied)(copied)
                states[number] = dict(copied.state.pop(part, {}))
        return [data, _joined(states), _settings(copied)]

    def state_tensors(self, group: int, parameter: torch.Tensor, length: int | None = None) -> list[StateTensor]:
        """The tensors in the state of ``parameter``, or of a part of ``length`` elements, without single numbers."""
        shape, stride = (parameter.shape, dense_stride(parameter)) if length is None else ((length,), (1,))
        key = group, parameter.dim(), parameter.dtype, tuple(shape), stride
        if key in self._state_tensors:
            return self._state_tensors[key]
        sample, options = self.sample(group, parameter), self._optimizer.param_groups[group]
        with _apart():
            meta = {**options, **{name: value for name, value in _KERNELS.items() if name in options}}
            state = self._state_of(meta, torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta"))
            if not state.keys() >= sample.keys():  # its step reads values before the state is complete
                state = self._state_of(options, torch.empty_strided(shape, stride, dtype=parameter.dtype).zero_())
        tensors = [(name, v) for name, v in state.items() if isinstance(v, torch.Tensor) and v.dim() and v.numel()]
        for name, value in tensors:
            if any(type(inner) is not torch.Tensor for inner in inner_tensors(value)):
                raise UnsupportedError(
                    f"Cannot offload the states of {type(self._optimizer).__name__}.",
                    f"{name!r} is a {type(value).__name__}, which brim cannot move as plain bytes.",
                    'Leave its states where they are (states="keep").',
                )
        self._state_tensors[key] = [StateTensor.of(name, value) for name, value in tensors]
        return self._state_tensors[key]

    def _state_of(self, options: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """The state after a first step, or as much of it as was created before the step failed."""
        parameter.grad = torch.zeros_like(parameter)
        copied = without_states(self._optimizer, [{**options, "params": [parameter]}])
        with contextlib.suppress(Exception):  # a kernel may need values; the caller notices an incomplete state
            raw_step(copied)(copied)
        return dict(copied.state.get(parameter, {}))

    def _try(self, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        try:
            together, alone = (self._run(options, shape, dtype, split) for split in (False, True))
        except Exception as error:
            raise self._refusal(f"A trial step without a closure raised {error!r}.") from error
        if not all(_same(left, right) for left, right in zip(together, alone, strict=True)):
            raise self._refusal("Updating its parameters one by one gives other results than updating them together.")
        sample: dict[str, Any] = alone[1][0]
        return sample

    def _run(self, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, split: bool) -> list[Any]:
        """Step two parameters. Returns the values, states, groups and other attributes."""
        count = max(1, torch.Size(shape).numel())
        pair = [(torch.linspace(low, 1, count, dtype=torch.float64)).view(shape).to(dtype) for low in (-1, 0.5)]
        copied = without_states(self._optimizer, [{**options, "params": pair}])
        step = raw_step(copied)
        for turn in range(_STEPS):
            for sign, parameter in zip((1, -1), pair, strict=True):
                slope = torch.linspace(0.1, sign * (0.5 + turn), count, dtype=torch.float64)
                parameter.grad = slope.view(shape).to(dtype)
            for params in [pair[:1], pair[1:]] if split else [pair]:
                copied.param_groups[0]["params"] = params
                step(copied)
        return [pair, [dict(copied.state.get(p, {})) for p in pair], _settings(copied)]

    def _refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"Cannot run {type(self._optimizer).__name__} block by block.",
            reason,
            "Use an optimizer that updates each parameter on its own, such as AdamW, or leave its states in memory.",
        )


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``tensor`` if it is dense, else those of a contiguous tensor."""
    count = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != count:
            return torch.empty(tensor.shape, device="meta").stride()
        count *= size
    return tuple(tensor.stride())


def without_states(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """A shallow copy of an optimizer with other parameter groups and no states."""
    copied: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():  # a step may put tensors of the copy's device into its dictionaries
        vars(copied)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    vars(copied).pop("step", None)  # a wrapper of a learning rate scheduler or of brim
    copied.state, copied.param_groups = defaultdict(dict), list(groups)
    return copied


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Make tensors real within, also in a trace, compile nothing, and keep the program's random state."""
    compiles = "torch._dynamo" in sys.modules
    with (
        torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        yield


def _settings(copied: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer without states and parameters."""
    copied.param_groups[0]["params"] = []
    return {key: value for key, value in vars(copied).items() if key != "state"}


def _joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a parameter from those of its parts, whose numbers must be the same."""
    joined: dict[str, Any] = {}
    for key, first in states[0].items():
        values = [state.get(key) for state in states]
        if isinstance(first, torch.Tensor) and first.dim():
            joined[key] = torch.cat([value.reshape(-1) for value in values if isinstance(value, torch.Tensor)])
        else:
            joined[key] = first if all(_same(first, value) for value in values) else object()
    return joined


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        pairs = zip(inner_tensors(left), inner_tensors(right), strict=False)
        return kind(left) == kind(right) and all(torch.allclose(*p, rtol=0, atol=0, equal_nan=True) for p in pairs)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and bool(left == right)
