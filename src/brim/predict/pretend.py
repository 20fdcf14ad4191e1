"""A simulated GPU: while a trace for CUDA runs, ``.cuda()``, ``device="cuda"`` and ``torch.cuda`` work.

Fake tensors stay on the CPU underneath (fake CUDA tensors fail in autograd without a GPU). Every storage remembers
whether the program put it on the GPU; storages on the host are not part of a CUDA trace.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal import sdpa
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.attention import SDPBackend
from torch.optim import optimizer

from brim.predict import autograd, failures, sparse
from brim.predict.data_parallel import data_parallel
from brim.predict.dispatch import RecordingMode, wraps
from brim.predict.lazy_parameters import carried
from brim.predict.lowering.cuda import attention as cuda_attention
from brim.predict.lowering.cuda import dtypes
from brim.predict.lowering.cuda import norms as cuda_norms
from brim.predict.lowering.cuda import recurrent as cuda_recurrent
from brim.predict.patches import ValueMode
from brim.predict.torch_cuda import AUTOCAST_STATE, AutocastCache, Generator, autocast_of_cpu, in_place, torch_cuda
from brim.processes import on_loopback

_CUDA = torch.device("cuda", 0)
_is_cuda: Any = torch.Tensor.is_cuda
_is_cpu: Any = torch.Tensor.is_cpu
_device: Any = torch.Tensor.device
_init_process_group: Any = getattr(torch.distributed, "init_process_group", None)
_pretended: ContextVar[tuple[int, int] | None] = ContextVar("pretended", default=None)


def pretended_capability() -> tuple[int, int] | None:
    """Return the capability of the GPU that a trace pretends now, for programs that choose kernels."""
    return _pretended.get()


class PretendCuda(ValueMode):
    """Sends calls that name a CUDA device to the fake CPU, and records the device of the result."""

    def __init__(self, recording: RecordingMode, capability: tuple[int, int]) -> None:
        super().__init__(recording)
        self.capability, self.autocast = capability, AutocastCache()
        self.default_on_device = False  # True if tensors without a device argument are created on the GPU
        self._replaced: dict[Any, Callable[..., Any]] = {
            torch.Tensor.cuda: self._cuda,
            torch.Tensor.cpu: lambda tensor, **kwargs: self._move(tensor, False),
            torch.Tensor.to: self._to,
            torch.Tensor.pin_memory: lambda tensor, *args, **kwargs: tensor,
            torch.Tensor.is_pinned: lambda tensor, *args, **kwargs: False,
            torch.Tensor.get_device: lambda tensor: 0 if self.on_device(tensor) else -1,
            _is_cuda.__get__: self.on_device,
            _device.__get__: self._device,
            _is_cpu.__get__: lambda tensor: not self.on_device(tensor),
            torch.nn.functional.scaled_dot_product_attention: self.attention,
            torch.tensor_split: self._tensor_split,
            torch.Tensor.tensor_split: self._tensor_split,
            torch.native_batch_norm: _batch_norm,
            **autograd.BY_VALUES,
            torch.dropout: self._dropout,
            torch.rms_norm: self.rms_norm,
            torch.nn.functional.rms_norm: self.rms_norm,
            torch.nn.functional.dropout: self.dropout,
            **{make: functools.partial(self._sparse, make) for make in sparse.FACTORIES},
            torch.lstm_cell: functools.partial(self._cell, cuda_recurrent.lstm_cell, torch.lstm_cell),
            torch.gru_cell: functools.partial(self._cell, cuda_recurrent.gru_cell, torch.gru_cell),
            **{kind: functools.partial(cuda_recurrent.layer, kind) for kind in cuda_recurrent.KINDS},
        }

    def on_device(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, FakeTensor):
            if wraps(type(tensor)):  # it is on the device of its parts
                parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
                return any(self.on_device(part) for part in parts if isinstance(part, torch.Tensor))
            return tensor.device.type == "cuda"  # a lazily computed tensor has its true device
        life = self.recording.life_of(tensor)
        return life is not None and life.on_device

    def _device(self, tensor: torch.Tensor) -> torch.device:
        device: torch.device = _device.__get__(tensor)
        return _CUDA if device.type == "cpu" and wraps(type(tensor)) and self.on_device(tensor) else device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replaced = self._replaced.get(func)
        if replaced is not None:
            return replaced(*args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            recording = self.recording  # no context manager, for speed: every call of the program is intercepted here
            before = recording.on_device
            recording.on_device = self.default_on_device or self._any_on_device(args)
            try:
                return super().__torch_function__(func, types, args, kwargs)
            finally:
                recording.on_device = before
        cuda = is_cuda(device)
        self.recording.recorder.uses_device |= cuda
        with self.recording.factories(cuda), self.recording.placed(cuda if _copies(func) else None):
            kwargs |= {"device": "meta" if _is_meta(device) else "cpu"}
            return super().__torch_function__(func, types, args, kwargs)

    def _sparse(self, make: Callable[..., Any], *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Move the parts of a wrapper tensor to the named device, values first."""
        if device is None:
            return super().__torch_function__(make, (), sparse.sized(make, args, kwargs), kwargs)
        cuda = is_cuda(device)
        self.recording.recorder.uses_device |= cuda
        moved = [self._placed_at(part, cuda) for part in reversed(args[: sparse.FACTORIES[make]])]
        args = (*reversed(moved), *args[len(moved) :])
        return super().__torch_function__(make, (), sparse.sized(make, args, kwargs), kwargs)

    def _placed_at(self, part: Any, cuda: bool) -> Any:
        if isinstance(part, torch.Tensor):
            return self._move(part, cuda)
        with self.recording.placed(cuda):
            return torch.tensor(part)

    def _any_on_device(self, args: Any) -> bool:
        for arg in args:
            if isinstance(arg, FakeTensor):
                if self.on_device(arg):
                    return True
            elif isinstance(arg, (tuple, list)) and arg and isinstance(arg[0], FakeTensor) and self.on_device(arg[0]):
                return True
        return False

    def _cuda(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.recording.recorder.uses_device = True
        return self._move(tensor, True)

    def _move(self, tensor: torch.Tensor, cuda: bool) -> torch.Tensor:
        if wraps(type(tensor)) and type(tensor).__name__ != "DTensor" and self.on_device(tensor) != cuda:
            return torch.Tensor.to(tensor, _CUDA if cuda else torch.device("cpu"))
        made_outside = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # not in the trace: a data set
        if not (made_outside or isinstance(tensor, FakeTensor)) or self.on_device(tensor) == cuda:
            return tensor
        return self._moved(tensor, cuda, tensor.dtype)

    def _moved(self, tensor: torch.Tensor, cuda: bool, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        """A copy on the other device; its gradient comes back."""
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # as PyTorch says
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        if tensor.requires_grad and torch.is_grad_enabled() and isinstance(tensor, FakeTensor) and not inside:
            return _Moved.apply(tensor, self.recording, cuda, dtype, options)  # type: ignore[no-any-return,no-untyped-call]
        return carried(tensor, _copied(self.recording, tensor, cuda, dtype, options))

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        if args and isinstance(args[0], torch.Tensor):  # .to(other)
            device, args = _CUDA if self.on_device(args[0]) else torch.device("cpu"), (args[0].dtype, *args[1:])
        elif args and (args[0] is None or (isinstance(args[0], (str, torch.device, int)) and not _is_dtype(args[0]))):
            device, args = args[0], args[1:]
            if args and args[0] is None:  # nn.Module.to passes it for tensors that are not floating-point
                args = (tensor.dtype, *args[1:])
        if device is None:
            return torch.Tensor.to(tensor, *args, **kwargs) if args or kwargs else tensor
        if _is_meta(device):
            return torch.Tensor.to(tensor, "meta", *args, **kwargs)
        cuda = is_cuda(device)
        self.recording.recorder.uses_device |= cuda
        if wraps(type(tensor)) and type(tensor).__name__ != "DTensor":
            return torch.Tensor.to(tensor, _CUDA if cuda else torch.device("cpu"), *args, **kwargs)
        moves = self.on_device(tensor) != cuda
        if args and _is_dtype(args[0]):
            kwargs["dtype"], args = args[0], args[1:]
        kwargs = dict(zip(("non_blocking", "copy"), args, strict=False)) | kwargs
        dtype = kwargs.pop("dtype", None) or tensor.dtype
        non_blocking = bool(kwargs.pop("non_blocking", False))
        if moves and non_blocking:
            kwargs["non_blocking"] = True
        copies = bool(kwargs.pop("copy", False))
        if moves:
            return self._moved(tensor, cuda, dtype, **kwargs)
        with self.recording.placed(cuda):
            return torch.Tensor.to(tensor, dtype, copy=copies, **kwargs)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        options = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(query, NestedTensor):
            return _jagged_attention(query, key, value, **options)
        if not torch.is_autocast_enabled("cuda"):  # autocast converts them to one dtype
            dtypes.check_attention(query, key, value, options.get("attn_mask"))
        with self.recording.factories(self._any_on_device((query,))):
            attend = self.autocast.lower_if_enabled(cuda_attention.attention)
            return attend(query, key, value, capability=self.capability, **options)

    def _tensor_split(self, tensor: torch.Tensor, where: Any = None, dim: int = 0, **named: Any) -> Any:
        """C++ reads where to split, from the CPU."""
        names = ("tensor_indices_or_sections", "indices_or_sections", "indices", "sections")
        where = next((named[name] for name in names if name in named), where)
        if isinstance(where, torch.Tensor):
            if self.on_device(where):
                raise RuntimeError("tensor_split expected tensor_indices_or_sections to be on cpu, but it's on cuda")
            where = where.tolist()
        return torch.tensor_split(tensor, where, dim)

    def rms_norm(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.recording.factories(self._any_on_device((input,))):
            return cuda_norms.rms_norm(input, *args, **kwargs)

    def _cell(self, cell: Callable[..., Any], on_host: Callable[..., Any], input: torch.Tensor, *args: Any) -> Any:
        if not self.on_device(input):
            return on_host(input, *args)
        with self.recording.factories(True):
            return self.autocast.lower_if_enabled(cell)(input, *args)

    def _dropout(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """CUDA fuses dropout and keeps a boolean mask (aten/src/ATen/native/Dropout.cpp)."""
        if train and 0 < p < 1 and input.numel() > 0:
            return torch.native_dropout(input, p, train)[0]
        return torch.dropout(input, p, train)

    def dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if inplace:
            return torch.dropout_(input, p, training)
        return self._dropout(input, p, training)


def _copied(
    recording: RecordingMode, source: torch.Tensor, cuda: bool, dtype: torch.dtype, options: dict[str, Any]
) -> torch.Tensor:
    """A tensor on the other device."""
    with recording.placed(cuda):
        return torch.Tensor.to(source, dtype, copy=True, **options)


class _Moved(torch.autograd.Function):
    """A copy on the other device. Its gradient is moved back, as ``ToCopyBackward`` does: underneath, both devices
    are the CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        recording: RecordingMode,
        cuda: bool,
        dtype: torch.dtype,
        options: dict[str, Any],
    ) -> torch.Tensor:
        ctx.recording, ctx.cuda, ctx.dtype = recording, cuda, source.dtype
        return _copied(recording, source, cuda, dtype, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with ctx.recording.placed(not ctx.cuda):
            return torch.Tensor.to(gradient, ctx.dtype, copy=True), None, None, None, None


def is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _is_meta(device: object) -> bool:
    return device == "meta" or (isinstance(device, torch.device) and device.type == "meta")


def _is_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype)


def _copies(func: Any) -> bool:
    """Functions of a tensor and a device: the result is on that device, not on the tensor's."""
    return getattr(func, "__name__", "").endswith(("_like", "as_tensor")) or getattr(func, "__name__", "").startswith(
        "new_"
    )


@contextmanager
def pretending(mode: PretendCuda) -> Iterator[None]:
    """Everything besides ``mode`` itself that makes CUDA seem present, for the duration of one trace."""
    recording = mode.recording
    recording.on_device, recording.pretends = False, True
    functional = torch.nn.functional
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place(torch_cuda(recording, mode.capability)))
        stack.enter_context(mock.patch.object(torch.nn.DataParallel, "scatter", _one_replica))
        stack.enter_context(mock.patch.object(torch.nn.RNNBase, "flatten_parameters", _flatten(mode)))
        stack.enter_context(mock.patch.object(torch.cuda.jiterator._JittedFunction, "__call__", _compiled_kernel))
        # Its argument is checked in C++ before a mode sees the call.
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _nothing))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(_made_on_the_cpu)))
        stack.enter_context(_default_device(mode))
        stack.enter_context(mock.patch.object(FakeTensor, "device", _device_property(mode, recording)))
        stack.enter_context(_autocast_state())
        supported = [*optimizer._foreach_supported_types, FakeTensor]
        stack.enter_context(mock.patch.object(optimizer, "_foreach_supported_types", supported))
        # Functions of torch.nn.functional that call one another do so with the mode off.
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", mode.attention))
        stack.enter_context(mock.patch.object(functional, "dropout", mode.dropout))
        stack.enter_context(mock.patch.object(functional, "rms_norm", mode.rms_norm))
        stack.enter_context(data_parallel())
        if torch.distributed.is_available():
            stack.enter_context(_groups_end())
            stack.enter_context(on_loopback())
            rendezvous = sys.modules["torch.distributed.rendezvous"]
            stack.enter_context(mock.patch.object(rendezvous, "_create_c10d_store", _store_of_one))
            stack.enter_context(mock.patch.object(torch.distributed, "init_process_group", _group_of_one))
        token = _pretended.set(mode.capability)
        stack.callback(_pretended.reset, token)
        yield


def _batch_norm(tensor: Any, weight: Any, bias: Any, mean: Any, variance: Any, *others: Any) -> Any:
    """``torch.native_batch_norm`` without cuDNN."""
    statistics = () if mean is None else (mean, variance)
    return torch._native_batch_norm_legit(tensor, weight, bias, *statistics, *others)


@contextlib.contextmanager
def _groups_end() -> Iterator[None]:
    """While open, process groups can be created; they are destroyed at the end."""
    here = torch.distributed.is_initialized()
    try:
        yield
    finally:
        if not here and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _group_of_one(*args: Any, **kwargs: Any) -> Any:
    """A group of the one traced rank. gloo's collectives stand for CUDA's: nothing is sent."""
    arguments = inspect.signature(_init_process_group).bind(*args, **kwargs).arguments
    backend, ranks = arguments.pop("backend", None), arguments.get("world_size", -1)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks < 0 else ranks
    if backend == "fake" or not (backend is None or "nccl" in backend):
        return _init_process_group(backend, **arguments)
    if ranks > 1:
        raise failures.not_traced(
            f"A process group of {ranks} ranks", "Trace one rank alone, with a group of one (WORLD_SIZE=1)."
        )
    arguments.pop("device_id", None)
    arguments.pop("pg_options", None)
    return _init_process_group("gloo", **arguments)


def _store_of_one(*_: Any, **__: Any) -> Any:
    """A store for this process only: PyTorch's own would listen on the network."""
    from torch._C._distributed_c10d import HashStore  # not in every build of PyTorch

    return HashStore()


def _compiled_kernel(kernel: Any, *tensors: torch.Tensor, **kwargs: Any) -> Any:
    """Results of an elementwise kernel that ``torch.cuda.jiterator`` compiles."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    results = [torch.empty(shape, dtype=dtype, device=tensors[0].device) for _ in range(kernel.num_outputs)]
    return results[0] if len(results) == 1 else tuple(results)


def _jagged_attention(query: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Attention over jagged batches. PyTorch asks CUDA which kernels support it."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    chosen = SDPBackend.FLASH_ATTENTION if half else SDPBackend.EFFICIENT_ATTENTION
    with mock.patch.object(sdpa, "_select_sdp_backend", lambda *args, **kwargs: chosen):
        return sdpa.jagged_scaled_dot_product_attention(query, *args, **options)


_make_wrapper: Any = torch.Tensor._make_wrapper_subclass


def _made_on_the_cpu(*args: Any, **kwargs: Any) -> Any:
    """Report the CPU as the device of wrapper tensors, as of fake ones: autograd would ask CUDA for its streams."""
    placed = [torch.device("cpu") if isinstance(arg, torch.device) and is_cuda(arg) else arg for arg in args]
    if is_cuda(kwargs.get("device")):
        kwargs["device"] = torch.device("cpu")
    return _make_wrapper(*placed, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _one_replica(parallel: Any, inputs: Any, kwargs: Any, device_ids: Any) -> tuple[Any, Any]:
    """On one GPU the inputs stay as they are (nn/parallel/data_parallel.py then calls the module itself)."""
    return (inputs,), (kwargs,)


def _flatten(mode: PretendCuda) -> Callable[[torch.nn.RNNBase], None]:
    return lambda layer: cuda_recurrent.flatten(layer, mode.on_device)


@contextmanager
def _default_device(mode: PretendCuda) -> Iterator[None]:
    """``torch.set_default_device`` would send factories to a device that is not there, below ``mode``."""
    before = torch.get_default_device()

    def set_default(device: Any) -> None:
        mode.default_on_device = device is not None and is_cuda(device)
        mode.recording.recorder.uses_device |= mode.default_on_device

    def get_default() -> torch.device:
        return _CUDA if mode.default_on_device else torch.device("cpu")

    if before.type == "cuda":
        torch.set_default_device(None)
        set_default(before)
    try:
        with mock.patch.object(torch, "set_default_device", set_default), \
             mock.patch.object(torch, "get_default_device", get_default):  # fmt: skip
            yield
    finally:
        if before.type == "cuda":
            torch.set_default_device(before)


def _device_property(mode: PretendCuda, recording: RecordingMode) -> property:
    true_device = FakeTensor.device

    def get(tensor: FakeTensor) -> torch.device:
        if not recording.inside and tensor.fake_device.type == "cpu" and mode.on_device(tensor):
            return _CUDA
        return true_device.fget(tensor)  # type: ignore[attr-defined,no-any-return]

    return property(get, true_device.fset)  # type: ignore[attr-defined]


@contextmanager
def _autocast_state() -> Iterator[None]:
    """Autocast for CUDA acts on tensors that are the CPU's underneath: its state is kept as the CPU's."""
    with contextlib.ExitStack() as stack:
        for name in AUTOCAST_STATE:
            stack.enter_context(mock.patch.object(torch, name, autocast_of_cpu(getattr(torch, name))))
        before = torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", torch.float16)  # the default of autocast("cuda")
        try:
            yield
        finally:
            torch.set_autocast_dtype("cpu", before)
