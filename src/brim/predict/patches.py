"""Replacements during a trace: for code in PyTorch or transformers that reads a value, or treats a fake tensor
differently from a real one."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal.nested_int import NestedIntNode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from brim.predict.autograd import BackwardOrder
from brim.predict.compiled.torch_compile import as_written, is_fused
from brim.predict.dispatch import RecordingMode
from brim.predict.lazy_parameters import lazy_parameters
from brim.predict.lowering import flex_attention
from brim.predict.side_effects import as_tensor_of_file, models_save_nothing, outside_world
from brim.predict.values import packed
from brim.predict.values.known import MADE_UP, give, known
from brim.predict.values.unbacked import UnknownNumber, mark_made_up, unknown_in, unknown_numbers

# Checks whether values are finite, and the answer of a healthy run.
_FINITE = {
    torch.isfinite: True, torch.Tensor.isfinite: True, torch.isnan: False, torch.Tensor.isnan: False,
    torch.isinf: False, torch.Tensor.isinf: False,
}  # fmt: skip

_LINEAR = torch._C._nn.linear  # torch.nn.functional.linear, unless replaced
_OF_LISTS = {torch.tensor, torch.as_tensor, torch.asarray}
_READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a slot of C


class ValueMode(TorchFunctionMode):
    """Intercepts reads of values that are not operations: ``item()``, ``tolist()``, ``numpy()``."""

    def __init__(self, recording: RecordingMode) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and isinstance(args[0], FakeTensor):
            return self._read(func, *args, **kwargs)
        if func is _LINEAR:
            with self.recording.linear():
                return func(*args, **kwargs)
        if func is flex_attention.OPERATION:
            if not is_fused():
                return flex_attention.unfused_attention(self.recording.unseen, *args, **kwargs)
            self.recording.recorder.not_modelled.add(flex_attention.NOTE)
            return flex_attention.attention(*args, **kwargs)
        if func is torch._pack_padded_sequence:
            data, sizes = packed.pack(*args, **kwargs)
            return data, self._on_host(sizes)
        if func is torch._pad_packed_sequence:
            padded, lengths = packed.pad(args[0], packed.sizes_of(args[1]), *args[2:], **kwargs)
            return padded, self._on_host(lengths)
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **kwargs)
        if func in _OF_LISTS and args and isinstance(args[0], (list, tuple)):
            args = (_as_numbers(args[0]), *args[1:])
        if func == _SET_DATA:  # the values are now those of the new data, if these are known
            args[0]._brim_known = getattr(args[1], "_brim_known", None)
        if func in _FINITE and isinstance(args[0], FakeTensor):
            return self.recording.values.taken_as(_FINITE[func], args[0], func(*args, **kwargs))
        if func is torch._is_all_true and isinstance(args[0], FakeTensor):
            return self.recording.values.taken_as(True, args[0], func(*args, **kwargs), check=True)
        if func is torch.asarray and isinstance(args[0], torch.UntypedStorage):
            return as_tensor_of_file(args[0], kwargs["dtype"])
        if (unknown := unknown_in(func, args, kwargs)) is not None:
            return mark_made_up(unknown, args, func(*args, **kwargs))
        return func(*args, **kwargs)

    def _on_host(self, numbers: list[int]) -> torch.Tensor:
        with self.recording.factories(False):
            return torch.tensor(numbers)

    def _read(self, func: Any, tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        values = self.recording.values
        if func is torch.Tensor.item:
            source = known(tensor)
            if source is None and (tensor.dtype.is_floating_point or values.strict):
                return UnknownNumber(values.plausible(tensor), values)
            if source is not None and source.state.origin & MADE_UP and tensor.dtype.is_floating_point:
                return UnknownNumber(float(source.value), values)
            return func(tensor)
        real = values.array(tensor)
        with _disable_current_modes():
            if func is torch.Tensor.tolist:
                return real.tolist()
            array = real.detach().numpy().copy()  # writes to this array do not change the tensor
            return array if func is torch.Tensor.numpy else array.astype(args[0] if args else array.dtype)


@contextmanager
def while_tracing(mode: ValueMode) -> Iterator[None]:
    """Apply all replacements, and ``mode``, for one trace."""
    with mock.patch.object(torch.autograd, "_engine_run_backward", _reentering(mode)), \
         mock.patch.object(torch.utils, "swap_tensors", _set_data), \
         mock.patch.object(torch.UntypedStorage, "resize_", resizing(mode.recording.resized_storage)), \
         _linear_recorded(mode), \
         mock.patch.object(FakeTensor, "__deepcopy__", _deep_copy, create=True), \
         mock.patch.object(FakeTensor, "get_nested_int", _nested_int), \
         mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", _truncated_normal), \
         mock.patch.object(torch, "get_rng_state", _rng_state), \
         mock.patch.object(torch.random, "get_rng_state", _rng_state), \
         mock.patch.object(torch, "set_rng_state", _set_rng_state), \
         mock.patch.object(torch.random, "set_rng_state", _set_rng_state), \
         unknown_numbers(mode.recording.values), outside_world(), as_written(mode.recording.recorder.not_modelled), \
         _zero_tensors_are_viewed(), _transformers_sees_plain_tensors(), \
         models_save_nothing(), lazy_parameters(), mode:  # fmt: skip
        yield


@contextmanager
def _zero_tensors_are_viewed() -> Iterator[None]:
    """Known zero tensors (of forward-mode gradients) get views by kernels that come before Python's, which would make
    fake ones plain. The later kernels do the same (native_functions.yaml)."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden is the purpose
            for name in ("as_strided", "view", "_reshape_alias"):
                library.impl(name, torch.library.fallthrough_kernel, "ZeroTensor", allow_override=True)
        yield
    finally:
        library._destroy()


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Silence PyTorch's log of an exception before it is raised; the caller gets the error once."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def resizing(then: Callable[[torch.UntypedStorage], None]) -> Callable[..., Any]:
    """Return ``UntypedStorage.resize_``, which modes do not intercept, with a call of ``then`` after it."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        made = resize(storage, size)
        then(storage)
        return made

    return resize_


class _RecordedLinear:
    """Records ``torch.nn.functional.linear``; equals the original, by which libraries' tables find it."""

    __name__ = "linear"

    def __init__(self, mode: ValueMode) -> None:
        self._mode = mode

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with self._mode.recording.linear():
            return _LINEAR(input, weight, bias)

    def __hash__(self) -> int:
        return hash(_LINEAR)

    def __eq__(self, other: object) -> bool:
        return other is _LINEAR or other is self


@contextmanager
def _linear_recorded(mode: ValueMode) -> Iterator[None]:
    """Record ``torch.nn.functional.linear`` where functions of the same module call it, with the mode off.

    A replacement by another library stays, and is recorded when it calls PyTorch's function.
    """
    if torch.nn.functional.linear is not _LINEAR:
        yield
        return
    linear = _RecordedLinear(mode)
    table = torch.jit._builtins._get_builtin_table()  # torch.jit.script finds it here by its identity
    table[id(linear)] = table[id(_LINEAR)]
    try:
        with mock.patch.object(torch.nn.functional, "linear", linear):
            yield
    finally:
        del table[id(linear)]


def _reentering(mode: ValueMode) -> Callable[..., Any]:
    """Enable the mode again within ``Tensor.backward``: a mode is off while it handles a call, and recomputation and
    hooks in the backward pass must be recorded too."""
    run: Callable[..., Any] = torch.autograd.graph._engine_run_backward
    if mode.recording.pretends:
        run = partial(BackwardOrder().run, run)

    def _run_backward(*args: Any, **kwargs: Any) -> Any:
        if any(other is mode for other in _get_current_function_mode_stack()):
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    return _run_backward


@contextmanager
def _transformers_sees_plain_tensors() -> Iterator[None]:
    """Let transformers check a mask's values, which it skips for fake tensors; here they are known or an error."""
    module = sys.modules.get("transformers.utils.import_utils")
    if module is None or hasattr(module, "is_fake_tensor"):
        try:
            import transformers.utils.import_utils as module
            from transformers import PreTrainedModel
        except Exception:  # a broken import may raise anything; a program that needs it raises it itself
            module = None
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    with (
        mock.patch.object(module, "is_fake_tensor", lambda tensor: False),
        # It only warns, but reads the tokens for it.
        mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *args, **kwargs: None),
    ):
        yield


def _set_data(first: torch.Tensor, second: torch.Tensor) -> None:
    """Swap tensors where ``nn.Module.to`` sets ``.data`` of plain ones, as it does for fake tensors except those on
    meta."""
    if (first.device.type == "meta") != (second.device.type == "meta"):
        torch._C._swap_tensor_impl(first, second)
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    else:
        first.data = second.data


def _as_numbers(data: Any) -> Any:
    """Convert lists of tensors to lists of numbers: PyTorch reads their values in C++."""
    if isinstance(data, (list, tuple)):
        return [_as_numbers(part) for part in data]
    return data.tolist() if isinstance(data, FakeTensor) else data


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Scatter into zeros (aten/src/ATen/native/Onehot.cpp); for fake ones PyTorch would compare with each class."""
    if num_classes == -1 and tensor.dtype == torch.long and tensor.numel():
        num_classes = int(tensor.max().item()) + 1
    if num_classes <= 0 or tensor.dtype != torch.long:
        return torch.nn.functional.one_hot(tensor, num_classes)
    shape = (*tensor.shape, num_classes)
    return torch.zeros(shape, dtype=torch.long).scatter_(-1, tensor.unsqueeze(-1), 1)


def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Clone a fake tensor, in the same memory: ``copy.deepcopy`` of a module would copy its storage's bytes."""
    if id(tensor) not in memo:
        with torch.no_grad():
            copied = tensor.detach().clone()
        made = torch.nn.Parameter(copied) if isinstance(tensor, torch.nn.Parameter) else copied
        memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    found: torch.Tensor = memo[id(tensor)]
    return found


_nested_ints = itertools.count(1 << 20)  # distinct from those of real tensors


def _nested_int(tensor: FakeTensor, *, coeff: int = 1) -> Any:
    """The size of a jagged dimension, by which PyTorch distinguishes such dimensions; a compiler would use a
    symbol."""
    if coeff != 1:
        return torch.SymInt(NestedIntNode(next(_nested_ints), coeff))
    if tensor.nested_int_memo is None:
        tensor.nested_int_memo = torch.SymInt(NestedIntNode(next(_nested_ints), 1))
    return tensor.nested_int_memo


def _rng_state() -> torch.Tensor:
    """The CPU generator's state, as checkpointing saves it: 5,056 bytes (ATen/CPUGeneratorImpl.cpp)."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        state = torch._C.default_generator.get_state()
    made = torch.empty(state.shape, dtype=state.dtype)
    if not isinstance(made, FakeTensor):  # a compiler saves the state while it captures, outside the trace
        return state
    give(made, state)
    return made


def _set_rng_state(state: torch.Tensor) -> None:
    if (source := known(state)) is not None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            torch._C.default_generator.set_state(source.value)


def _truncated_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Run torch.nn.init's rejection sampling with the expected number of rounds."""
    with torch.no_grad():
        cdf = [(1 + math.erf((edge - mean) / std / math.sqrt(2))) / 2 for edge in (a, b)]
        accepted = cdf[1] - cdf[0]
        tensor.normal_(mean, std, generator=generator)
        result, rejected = tensor, tensor.numel() * (1 - accepted)
        while True:
            mask = (result < a) | (result > b)
            if rejected < 1 or accepted <= 0.3:
                break
            result = torch.where(mask, torch.empty_like(result).normal_(mean, std, generator=generator), result)
            rejected *= 1 - accepted
        if tensor is not result:
            tensor.copy_(result)
    return tensor
