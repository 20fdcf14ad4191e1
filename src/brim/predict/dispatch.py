"""Record the allocations of every operation below autograd.

Storages are identified by their C++ identity, so views and in-place operations share one. A weak reference to the
storage's Python object fires when its last owner, in Python or in autograd, releases it: PyTorch keeps that object
alive as long as the C++ storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._higher_order_ops.out_dtype import out_dtype, out_dtype_dense
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from brim.core import Category, Phase
from brim.core.trace import TO_DEVICE, TO_RAM
from brim.predict import autograd, failures, sparse
from brim.predict.flops import Work, is_view, leaves, op_name, op_work
from brim.predict.host_residency import Resting
from brim.predict.lowering import flex_attention
from brim.predict.lowering.cpu.kernels import in_parts
from brim.predict.lowering.cuda import dtypes
from brim.predict.lowering.fakes import COMPOSITES, FAKES
from brim.predict.lowering.kernel import Kernel, Rule
from brim.predict.modules import ModuleTracker
from brim.predict.recorder import Life, Recorder
from brim.predict.shapes import Answer, result_of
from brim.predict.values.assumptions import Values

_add = torch.ops.aten.add.Tensor
_to_copy = torch.ops.aten._to_copy.default
_COPIES = (_to_copy, torch.ops.aten.copy_.default)
_IN_PYTHON = ("torch_nn", "flex_lib")  # PyTorch writes these operators in Python, of others
_device_of = torch.ops.prim.device.default
# Below autograd, composed of other operators on every device.
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_IN_PARTS = {
    torch.ops.aten._euclidean_dist.default: _EXPLICIT,
    torch.ops.aten.binary_cross_entropy_with_logits.default: _EXPLICIT,
    torch.ops.aten._unsafe_masked_index.default: _EXPLICIT,
    torch.ops.aten._unsafe_masked_index_put_accumulate.default: _EXPLICIT,
    torch.ops.aten.cholesky_solve.default: _EXPLICIT,
    torch.ops.aten.soft_margin_loss_backward.default: _EXPLICIT,
    torch.ops.aten.soft_margin_loss_backward.grad_input: _EXPLICIT,
    torch.ops.aten.masked_scatter_backward.default: _EXPLICIT,
    torch.ops.aten._trilinear.default: torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
    torch.ops.aten.linalg_pinv.atol_rtol_tensor: torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
}
_OF_OPERATORS: dict[Any, Callable[..., Any]] = {out_dtype: out_dtype_dense} | flex_attention.UNFUSED
# Operators with kernels for the CPU only.
_NOT_FOR_CUDA = {
    torch.ops.aten.histogram, torch.ops.aten._histogramdd_bin_edges, torch.ops.aten._histogramdd_from_bin_cts,
    torch.ops.aten._histogramdd_from_bin_tensors, torch.ops.aten._sparse_mm_reduce_impl,
    torch.ops.aten._sparse_mm_reduce_impl_backward, torch.ops.aten._spdiags,
}  # fmt: skip
# Comparisons that CUDA does by other operations (cuda/Equal.cpp, TensorCompare.cpp).
_COMPARED: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.equal.default: lambda first, second: first.shape == second.shape and first.eq(second).all(),
    torch.ops.aten.allclose.default: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
}
_META, _CPU = torch.device("meta"), torch.device("cpu")


@dataclass(slots=True)
class _Entry:
    """A recorded storage. ``fake_bytes``: of the fake storage; the real kernel may allocate more.

    ``storage`` keeps the callback that ends ``life`` when the storage dies.
    """

    life: Life
    storage: weakref.ref[torch.UntypedStorage]
    fake_bytes: int


class RecordingMode(TorchDispatchMode):
    """Records into ``recorder`` every operation of the fake tensors below it.

    ``rule_for`` gives the rule of a kernel's temporaries, or None when it has none.
    """

    def __init__(
        self,
        recorder: Recorder,
        modules: ModuleTracker,
        values: Values,
        rule_for: Callable[[OpOverload], Rule | None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.modules, self.values = recorder, modules, values
        self._rule_for = rule_for
        self.resting = Resting()
        self._live: dict[int, _Entry] = {}
        self.on_device = True  # True if factories create tensors on the traced device
        self._placed: bool | None = None
        self.pretends = False  # True if fake CPU tensors stand for CUDA tensors
        self.after_backward: Callable[[], None] = lambda: None
        self._graph_task = -1  # the running backward pass
        self._in_linear = False
        self.inside = False  # True during an operation: fake tensors then show their true device
        self._fakes: FakeTensorMode | None = None  # the mode below, which makes fake tensors
        self._sparse: sparse.SparseOperations | None = None  # once there is a sparse tensor
        self._alone = False  # True if no mode below records the operations of fake kernels

    # -- operations ----------------------------------------------------------------------------------------------

    def __enter__(self) -> RecordingMode:
        below = _get_current_dispatch_mode_stack()
        fakes = [mode for mode in below if isinstance(mode, FakeTensorMode)]
        self._alone = len(fakes) == len(below)
        self._fakes = fakes[-1] if fakes else None
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip Dynamo: nothing is compiled while a trace runs, and PyTorch's wrapper of every call for it takes
        time."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._of_operators(func, args, kwargs or {})
        if func is _device_of:  # C++ reads a tensor's device, once for every operation; nothing runs
            return _device(args[0])
        if any(kind is not FakeTensor and wraps(kind) for kind in types):  # its parts come back here
            return NotImplemented
        # PyTorch disables function modes inside its functions. The backward pass calls no such function, so they
        # would intercept every access to a tensor from here on.
        with torch._C.DisableTorchFunction():
            return self._seen(func, args, kwargs or {})

    def _seen(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _decomposes(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace in _IN_PYTHON:
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if not self.pretends and (parts := in_parts(func)) is not None:
            with self:
                return parts(*args, **kwargs)
        if func in _IN_PARTS and not any(isinstance(mode, type(self)) for mode in _get_current_dispatch_mode_stack()):
            with self:
                return func._op_dk(_IN_PARTS[func], *args, **kwargs)
        if self.pretends and func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        if self.pretends and kwargs and getattr(kwargs.get("device"), "type", None) == "cuda":
            # PyTorch's Python functions call one another with the mode for functions off.
            self.recorder.uses_device = True
            with self.placed(True):
                return self._seen(func, args, kwargs | {"device": _CPU})
        if self.pretends and func.overloadpacket in _NOT_FOR_CUDA and self._place(func, args, kwargs):
            raise failures.no_cuda_kernel(func)
        if self.pretends and func in dtypes.CHECKS and self._place(func, args, kwargs):
            dtypes.check(func, args)
        if (self._sparse is not None and sparse.given(args, kwargs)) or sparse.makes(func, args):
            return self._of_sparse(func, args, kwargs)
        func = autograd.as_plain(func, args)
        if self.pretends and "dtype" in kwargs and args:
            kwargs = autograd.accumulated(args, kwargs)
        self._notice_backward()
        if self.pretends and func in _COMPARED:
            with self:  # records the kernels of CUDA's comparison; the trace supplies the answer
                _COMPARED[func](*args, **kwargs)
        known_item = self.values.read(func, args, kwargs)
        if known_item is not None:
            return known_item.item
        was_inside, self.inside = self.inside, True
        try:
            return self._run(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise failures.data_dependent(func) from error
        except (UnsupportedOperatorException, NotImplementedError) as error:
            if sparse.given(args, kwargs):  # the first sparse tensor, created outside of the trace
                return self._of_sparse(func, args, kwargs)
            raise failures.no_fake_kernel(func) from error
        except RuntimeError as error:
            if "no fake impl registered" in str(error):
                raise failures.no_fake_kernel(func) from error
            raise
        finally:
            self.inside = was_inside

    supports_higher_order_operators = True

    def _of_operators(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator as its parts: a product with wider results, or attention that is not
        compiled."""
        in_parts = _OF_OPERATORS.get(func)
        if in_parts is None:
            raise failures.not_traced(f"torch.ops.higher_order.{func.name()}", "Call the wrapped function directly.")
        with self:
            return in_parts(*args, **kwargs)

    def _of_sparse(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._notice_backward()
        if self._sparse is None:
            assert self._fakes is not None
            self._sparse = sparse.SparseOperations(
                self.values, self._fakes, self._describe, self.recorder.not_modelled
            )
        with self:
            return self._sparse.run(func, args, kwargs)

    def _describe(self, name: str, work: Work) -> None:
        self.recorder.describe_op(self.recorder.begin_op(name, self.phase(), self.modules.current()), work)

    def _remembered(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Answer | None]:
        """The fake kernel's result, from the cache where it is known and no mode below watches the kernel."""
        if not self._alone:
            return func(*args, **kwargs), None
        written = autograd.written(func, args, kwargs)
        return result_of(func, args, kwargs, self._fakes) if written is None else (written, None)

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, phase, module = self.recorder, self.phase(), self.modules.current()
        result, answer = self.values.shape_of(func, args, kwargs), None
        if result is None:
            adds_bias = self._in_linear and func is _add and args[1].dim() == 1
            fake = autograd.add_bias if adds_bias else FAKES.get(func)
            result_and_answer = (
                (fake(*args, **kwargs), None) if fake is not None else self._remembered(func, args, kwargs)
            )
            result, answer = result_and_answer
            self.values.carry(func, args, kwargs, result)
        outputs = list(leaves(result))
        if outputs and all(isinstance(each, FakeTensor) and each.fake_device.type == "meta" for each in outputs):
            return result
        fresh = self._fresh(outputs)
        resized = self._resized(func, args, kwargs)
        in_ram = self.resting.used and self.resting.made_of(life.in_ram for life in self._lives_of(args, kwargs))
        on_device = self._place(func, args, kwargs)
        crossing = self._crossing(func, args, on_device)
        # Until a program names a device, its tensors count as the device's.
        counts = (on_device or crossing is not None or not recorder.uses_device) and not in_ram
        rule = self._rule_for(func) if counts else None
        if fresh or resized or rule is not None or not is_view(func):
            index = recorder.begin_op(self.resting.named(op_name(func, args)), phase, module)
            work = op_work(func, args, kwargs, result) if answer is None or answer.work is None else answer.work
            if answer is not None:
                answer.work = work
            recorder.describe_op(index, work, in_ram=in_ram)
            kernel = Kernel(func, args, kwargs, [tensor for tensor, _ in fresh], result, on_device, crossing)
            if rule is not None:
                kernel.stream = recorder.stream()
                rule(kernel)
                if kernel.unknown:
                    recorder.not_modelled.add(kernel.unknown)
            for life, bytes in resized:
                self._resize(life, bytes, phase)
            self._play(kernel, fresh, phase, module, on_device)
            for tensor, _ in fresh if in_ram else ():
                self.rest_in_ram(tensor)
        return result

    def _notice_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._graph_task):
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.after_backward())

    def note_op(self, name: str) -> None:
        """Record an operation that is not a kernel."""
        self.recorder.begin_op(name, self.phase(), self.modules.current())

    def phase(self) -> Phase:
        if torch._C._current_graph_task_id() != -1:
            return Phase.BACKWARD
        return Phase.OPTIMIZER if self.modules.in_optimizer else self.recorder.phase

    @contextmanager
    def factories(self, on_device: bool) -> Iterator[None]:
        """While open, operations without tensor inputs create their results on the device, or on the host."""
        before, self.on_device = self.on_device, on_device
        try:
            yield
        finally:
            self.on_device = before

    @contextmanager
    def linear(self) -> Iterator[None]:
        """While open, ``torch.nn.functional.linear`` is running."""
        before, self._in_linear = self._in_linear, True
        try:
            yield
        finally:
            self._in_linear = before

    @contextmanager
    def placed(self, on_device: bool | None) -> Iterator[None]:
        """While open, every result is on that device, whatever the inputs (None: the default)."""
        before, self._placed = self._placed, on_device if on_device is not None else self._placed
        try:
            yield
        finally:
            self._placed = before

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """While open, operations on fake tensors are not recorded."""
        was_inside, self.inside = self.inside, True
        assert self._fakes is not None
        try:
            with _disable_current_modes(), self._fakes:
                yield
        finally:
            self.inside = was_inside

    # -- storages ------------------------------------------------------------------------------------------------

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        entry = self._entry_of(tensor)
        return entry.life if entry else None

    def _entry_of(self, tensor: torch.Tensor) -> _Entry | None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor counts as this rank's part
        if self._sparse is not None and sparse.is_sparse(tensor):
            tensor = sparse.values_of(tensor)
        return self._live.get(tensor.untyped_storage()._cdata)

    def _lives_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Life]:
        return [life for t in (*leaves(args), *leaves(list(kwargs.values()))) if (life := self.life_of(t))]

    def crossing(self, *, to_ram: bool) -> AbstractContextManager[None]:
        """While open, results are copies in RAM, or on the device (``techniques.parallel.sharding``)."""
        return self.resting.crossing(to_ram=to_ram)

    def making_in_ram(self) -> AbstractContextManager[None]:
        """While open, operations without tensor inputs create their results in RAM."""
        return self.resting.making()

    def rest_in_ram(self, tensor: torch.Tensor) -> None:
        """Record the tensor's storage as in RAM, all its life."""
        if (life := self.life_of(tensor)) is not None:
            life.in_ram = self.resting.used = True

    def lives(self) -> Iterator[Life]:
        return (entry.life for entry in self._live.values())

    def mark(self, tensor: object, category: Category, module: int = -1) -> None:
        """Set a tensor's category and module (-1: the module that allocated it)."""
        if isinstance(tensor, torch.Tensor) and (life := self.life_of(tensor)) is not None:
            life.category = category
            if module >= 0:
                life.module = module

    def adopt(self, tensor: torch.Tensor, category: Category) -> None:
        """Record a storage from outside of the trace as allocated at its first use."""
        self._watch(
            tensor,
            self.recorder.alloc(
                tensor.untyped_storage().nbytes(),
                phase=Phase.BUILD,
                module=-1,
                dtype=_dtype(tensor),
                category=category,
            ),
        )

    def _fresh(self, outputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Outputs whose storages were not seen before, with their sizes; each storage once."""
        fresh: dict[int, tuple[torch.Tensor, int]] = {}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live and storage._cdata not in fresh:
                fresh[storage._cdata] = (tensor, storage.nbytes())
        return list(fresh.values())

    def _resized(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Life, int]]:
        """Storages that an ``out=`` or ``resize_`` operation resized."""
        if not func._schema.is_mutable:
            return []
        resized = []
        for tensor in (*leaves(args), *leaves(list(kwargs.values()))):
            entry = self._entry_of(tensor)
            if entry is not None and entry.fake_bytes != (now := tensor.untyped_storage().nbytes()):
                resized.append((entry.life, now))
        return resized

    def resized_storage(self, storage: torch.UntypedStorage) -> None:
        """Record a storage that was resized by itself, not by an operation: FSDP2 frees and reallocates whole
        weights."""
        entry = self._live.get(storage._cdata)
        if entry is None or entry.fake_bytes == storage.nbytes():
            return
        life, phase = entry.life, self.phase()
        self.recorder.free(life, phase)  # nothing is copied
        entry.fake_bytes = storage.nbytes()
        entry.life = self.recorder.alloc(
            entry.fake_bytes, phase=phase, module=life.module, dtype=life.dtype, on_device=life.on_device
        )

    def _resize(self, life: Life, bytes: int, phase: Phase) -> None:
        """Resize a storage: the new bytes are allocated before the old are freed (they are copied over)."""
        entry = next(entry for entry in self._live.values() if entry.life is life)
        entry.fake_bytes = bytes
        entry.life = self.recorder.alloc(
            bytes, phase=phase, module=life.module, dtype=life.dtype, on_device=life.on_device, category=life.category
        )
        self.recorder.free(life, phase)

    def _play(
        self, kernel: Kernel, fresh: list[tuple[torch.Tensor, int]], phase: Phase, module: int, on_device: bool
    ) -> None:
        kernel.emit()
        recorder, lives = self.recorder, {}
        factory = not any(True for _ in leaves(kernel.args))
        works_on_device = on_device or kernel.crossing is not None
        for what, handle, bytes in kernel.script:
            if what == "alloc":
                lives[handle] = recorder.alloc(
                    bytes, phase=phase, module=module, on_device=works_on_device, category=Category.TEMPORARY,
                    reduction=kernel.reductions.get(handle),
                )  # fmt: skip
            elif what == "keep":
                category, library = Category.WORKSPACE, kernel.libraries[handle]
                recorder.alloc(bytes, phase=phase, module=-1, on_device=on_device, category=category, library=library)
            elif what == "free":
                if handle in lives:
                    recorder.free(lives.pop(handle), phase)
            else:
                tensor, size = fresh[handle]
                if life := self._output(tensor, size if bytes < 0 else bytes, phase, module, on_device):
                    life.from_factory = factory
        for life in lives.values():
            recorder.free(life, phase)

    def _output(self, tensor: torch.Tensor, bytes: int, phase: Phase, module: int, on_device: bool) -> Life | None:
        if bytes == 0:  # its memory is not from PyTorch's allocator
            storage_bytes = tensor.untyped_storage().nbytes()
            # A tensor without elements has no bytes; tensors created from it are on its device.
            self._watch(tensor, self.recorder.unrecorded(storage_bytes, on_device=on_device and not storage_bytes))
            return None
        life = self.recorder.alloc(bytes, phase=phase, module=module, dtype=_dtype(tensor), on_device=on_device)
        self._watch(tensor, life)
        return life

    def _watch(self, tensor: torch.Tensor, life: Life) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata

        def died(_: object) -> None:
            self.recorder.free(self._live.pop(key).life, self.phase())

        self._live[key] = _Entry(life=life, storage=weakref.ref(storage, died), fake_bytes=storage.nbytes())

    def _place(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return the device of an operation's results: that of its inputs, or of the caller's context without
        inputs."""
        if self._placed is not None:
            return self._placed
        if lives := self._lives_of(args, kwargs):
            return any(life.on_device for life in lives)
        return self.on_device or (torch._C._current_graph_task_id() != -1 and self.recorder.uses_device)

    def _crossing(self, func: OpOverload, args: tuple[Any, ...], on_device: bool) -> str | None:
        """Return the direction of a copy between host and device, if the program distinguishes them."""
        if not self.recorder.uses_device or func not in _COPIES:
            return None
        target, source = (None, args[0]) if func is _to_copy else args[:2]
        if not isinstance(source, torch.Tensor):  # a number that a formula writes
            return None
        ends_there = on_device if target is None else self._lies_on_device(target)
        if ends_there == self._lies_on_device(source):
            return None
        return TO_DEVICE if ends_there else TO_RAM

    def _lies_on_device(self, tensor: torch.Tensor) -> bool:
        life = self.life_of(tensor)
        return life is not None and life.on_device


def mark(name: str) -> None:
    """Record an operation of that name, which is not a kernel, in the current trace; without one, do nothing."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, RecordingMode):
            mode.note_op(name)


@contextmanager
def on_host() -> Iterator[None]:
    """While open, new tensors of a trace lie on the host; without a trace, nothing changes.

    For programs that keep a host and a device apart where PyTorch's device names do not: a trace of the CPU counts
    the rest as the device's.
    """
    mode = next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, RecordingMode)), None)
    if mode is None:
        yield
        return
    mode.recorder.uses_device = True
    with mode.placed(False):
        yield


@cache
def wraps(kind: type) -> bool:
    """Return whether a kind of tensor wraps others: a rank's share, jagged rows, quantized weights. Tensors that wait
    for a collective do not count: their result is read below."""
    return is_traceable_wrapper_subclass_type(kind) and kind.__name__ != "AsyncCollectiveTensor"


@cache
def _decomposes(func: OpOverload) -> bool:
    """Divide a composite operation, which PyTorch does not divide without autograd (inference mode)."""
    if func in FAKES:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


def _device(tensor: torch.Tensor) -> Any:
    """Answer ``prim::device`` as ``FakeTensor`` does."""
    if not isinstance(tensor, FakeTensor):
        return _device_of(tensor)
    return _META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
