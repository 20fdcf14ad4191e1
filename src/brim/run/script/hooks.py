"""Detect the first call of every model of a program through PyTorch's global hooks, which are removed afterwards.

A global forward pre-hook is in force until the first model is called. Then the garbage collector lists the other
models; each waits for its own first call with hooks of its own. A global hook on the registration of parameters,
which costs nothing in a step, installs the forward pre-hook again when another model is created.

Sources: PyTorch, torch/nn/modules/module.py (``_call_impl``: order and arguments of hooks).
"""

from __future__ import annotations

import ctypes
import gc
import operator
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.nn.utils import stateless
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

_REST = 20.0  # times the seconds of the last scan of all objects, until the next scan for a few small parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call of a module from outside of any module. ``model`` contains the module; usually it is the same.

    ``kwargs`` is None if they are not known. ``others`` are models that have not been called yet.
    ``optimizers`` are all of the program's, or None if they have not been listed.
    """

    model: nn.Module
    called: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    others: tuple[nn.Module, ...] = ()
    optimizers: Sequence[torch.optim.Optimizer] | None = None


@dataclass(eq=False)
class _Waiting:
    """A model that has not been called yet."""

    model: weakref.ref[nn.Module]
    hooks: list[RemovableHandle] = field(default_factory=list)

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


class Watcher:
    """Calls ``decide`` before the first call of each model that has parameters.

    The first call after new parameters scans all objects, which takes a while: at once if the new parameters have
    ``large_bytes``, else when the scan adds little to the time since the last one.
    """

    def __init__(self, decide: Callable[[Call], None], *, large_bytes: int) -> None:
        self._decide, self._large_bytes = decide, large_bytes
        self._next_s = 0.0
        self._pid = os.getpid()
        self._hooks: list[RemovableHandle] = []
        self._registration: RemovableHandle | None = None
        self._waiting: list[_Waiting] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._new_bytes = 0
        self.busy = False  # True while brim itself calls modules
        self.on_armed: Callable[[bool], None] = lambda armed: None  # called with the state of the global hook

    # -- installing and removing hooks

    def begin(self) -> None:
        self._registration = global_hooks.register_module_parameter_registration_hook(
            _plain(lambda module, name, parameter: self._registered(parameter))
        )
        self._arm()

    def end(self) -> None:
        """Remove every hook."""
        self._disarm()
        if self._registration is not None:
            self._registration.remove()
            self._registration = None
        for waiting in self._waiting:
            waiting.stop()
        self._waiting.clear()

    def _arm(self) -> None:
        """Install two hooks. PyTorch gives keyword arguments to a hook whose number is in a dictionary of the module,
        so the first hook inserts the second one's number. Should PyTorch change that, the second is called
        without."""
        arrive = global_hooks.register_module_forward_pre_hook(_plain(self._arrive))

        def mark(module: nn.Module, args: Any) -> None:
            module._forward_pre_hooks_with_kwargs[arrive.id] = True

        marking = global_hooks.register_module_forward_pre_hook(_plain(mark))
        global_hooks._global_forward_pre_hooks.move_to_end(marking.id, last=False)  # type: ignore[attr-defined]
        self._hooks = [marking, arrive]
        self.on_armed(True)

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            self.on_armed(False)
        self._hooks = []
        self._new_bytes = 0

    def _registered(self, parameter: nn.Parameter | None) -> None:
        if self.busy or parameter is None or os.getpid() != self._pid:
            return
        self._new_bytes += _bytes(parameter)
        if self._hooks:
            return
        self._arm()

    # -- calls

    def _arrive(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
        number = self._hooks[-1].id if self._hooks else -1
        module._forward_pre_hooks_with_kwargs.pop(number, None)
        if self.busy or (self._new_bytes < self._large_bytes and time.perf_counter() < self._next_s):
            return None
        self._disarm()
        if os.getpid() != self._pid:  # a forked worker: the models are its parent's
            self.end()
            return None
        begin_s = time.perf_counter()
        optimizers = self._find()
        end_s = time.perf_counter()
        self._next_s = end_s + _REST * (end_s - begin_s)
        return self._first_call(module, args, kwargs, optimizers)

    def _find(self) -> list[torch.optim.Optimizer]:
        """Wait for the first call of every new model. Returns all optimizers."""
        modules, optimizers = living_of(nn.Module, torch.optim.Optimizer)
        for model in roots(modules):
            if model in self._known or next(model.parameters(), None) is None or _is_fake(model):
                continue
            self._known.add(model)
            if isinstance(model, torch.jit.ScriptModule):
                name = getattr(model, "original_name", type(model).__name__)
                sys.stderr.write(
                    f"brim: {name} is left as it is: it is TorchScript, whose weights brim cannot move\n"
                )
                continue
            self._wait(model)
        return optimizers

    def _wait(self, model: nn.Module) -> None:
        waiting = _Waiting(weakref.ref(model))

        # Quantization copies a module's hooks to its replacement, without the mark for keyword arguments.
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
            return None if self.busy else self._first_call(module, args, kwargs)

        hook = _plain(hook)
        parts = [
            part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)
        ]  # they refuse hooks
        waiting.hooks = [part.register_forward_pre_hook(hook, with_kwargs=True) for part in parts]
        self._waiting.append(waiting)

    def watch_again(self, model: nn.Module) -> None:
        """Call ``decide`` again before the next call of ``model`` itself that records gradients."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if self.busy or not torch.is_grad_enabled():
                return None
            return self._first_call(module, args, kwargs)

        waiting = _Waiting(weakref.ref(model))
        waiting.hooks = [model.register_forward_pre_hook(_plain(hook), with_kwargs=True)]
        self._waiting.append(waiting)

    def _first_call(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> Any:
        if os.getpid() != self._pid:
            return None
        waiting = next((candidate for candidate in self._waiting if _has(candidate.model(), module)), None)
        if waiting is None:
            return None
        model = waiting.model()
        assert model is not None
        if _is_nested_or_traced() or any(is_lazy(p) or p.is_meta for p in model.parameters()):
            return None
        waiting.stop()
        self._waiting.remove(waiting)
        others = tuple(other for candidate in self._waiting if (other := candidate.model()) is not None)
        before = {*module._forward_pre_hooks, *module._forward_hooks}  # both number their hooks from one counter
        self.busy = True
        try:
            call = Call(model=model, called=module, args=args, kwargs=kwargs, others=others, optimizers=optimizers)
            self._decide(call)
        finally:
            self.busy = False
        return _run_new_hooks(module, args, kwargs, before)


def _run_new_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, before: set[int]
) -> Any:
    """Run the hooks added during this call: PyTorch has already listed the hooks that it will run."""
    new = [(number, hook) for number, hook in module._forward_pre_hooks.items() if number not in before]
    new = [(number, hook) for number, hook in new if not getattr(hook, "brim_watches", False)]
    if not new:
        return None
    keywords: Any = kwargs or {}
    try:
        for number, hook in new:
            if number in module._forward_pre_hooks_with_kwargs:
                result = hook(module, args, keywords)
                args, keywords = result if result is not None else (args, keywords)
            else:
                result = hook(module, args)
                args = args if result is None else result if isinstance(result, tuple) else (result,)
    except Exception:
        raise  # PyTorch calls the always-called hooks
    except BaseException:  # Ctrl-C: PyTorch calls none
        _call_always_called_hooks(module, args, before)
        raise
    return args if kwargs is None else (args, keywords)


def _call_always_called_hooks(module: nn.Module, args: tuple[Any, ...], before: set[int]) -> None:
    """Run the always-called forward hooks added during this call, which end the work of the pre-hooks."""
    for number, hook in reversed(module._forward_hooks.items()):
        if number in module._forward_hooks_always_called and number not in before:
            hook(module, args, None)


def _plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ``copy.deepcopy`` of a module does not copy, and that Dynamo does not trace."""

    def call(*args: Any) -> Any:
        return hook(*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark, without importing it
    call.brim_watches = True  # type: ignore[attr-defined]
    return call


def _has(model: nn.Module | None, module: nn.Module) -> bool:
    return model is not None and any(part is module for part in model.modules())


def _is_fake(model: nn.Module) -> bool:
    """True if ``model`` is left over from a prediction."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and any(isinstance(p, fakes.FakeTensor) for p in model.parameters())


def _is_nested_or_traced() -> bool:
    """True for calls that are no first call of a model: nested, in a backward pass, traced or compiled.

    Calls by ``torch.func`` with substituted parameters, or over many samples at once, count as nested too.
    """
    if torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling() or torch._C._get_tracing_state():
        return True
    if _get_current_dispatch_mode_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        if frame.f_code is _CALL_WITH_OTHERS:
            return True
        calls += frame.f_code is _CALL
        frame = frame.f_back
    return calls > 1


_CALL = nn.Module._call_impl.__code__
_CALL_WITH_OTHERS = stateless._functional_call.__code__


def living(kind: type[Any]) -> list[Any]:
    """Every living object whose type is ``kind``. ``__class__`` is not read: a proxy may do anything then."""
    return living_of(kind)[0]


def living_of(*kinds: type[Any]) -> list[list[Any]]:
    """As ``living``, for several unrelated ``kinds`` in one pass over all objects, which takes a while."""
    by_kind: list[list[Any]] = [[] for _ in kinds]
    # By id: a class cannot be a key if its metaclass has an ``__eq__`` but no ``__hash__``.
    lists = {id(cls): by_kind[number] for number, kind in enumerate(kinds) for cls in _with_subclasses(kind)}
    for value in _all_objects():
        if id(type(value)) in lists:
            lists[id(type(value))].append(value)
    return by_kind


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    kinds, more = {kind}, [kind]
    while more:
        new = [cls for cls in type.__subclasses__(more.pop()) if cls not in kinds]
        kinds.update(new)
        more += new
    return kinds


def roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are not part of another module."""
    by_id = {id(module): module for module in modules if "_modules" in vars(module)}
    children = {id(child) for module in by_id.values() for child in module._modules.values() if child is not None}
    return [module for key, module in by_id.items() if key not in children]


def parameter_bytes(module: nn.Module) -> int:
    return sum(_bytes(parameter) for parameter in module.parameters())


def _bytes(parameter: torch.Tensor) -> int:
    return 0 if isinstance(parameter, UninitializedParameter) else parameter.numel() * parameter.element_size()


def _of_python(name: str) -> Any:
    """A function of Python's C API that takes an object, called with the interpreter's lock held."""
    function = getattr(ctypes.pythonapi, name)
    function.argtypes, function.restype = (ctypes.py_object,), None
    return function


_UNTRACK, _TRACK = _of_python("PyObject_GC_UnTrack"), _of_python("PyObject_GC_Track")


def _all_objects() -> list[Any]:
    """All objects of the garbage collector, frozen ones included. The same objects are frozen afterwards as before.

    ``gc.get_objects`` leaves out objects set aside by ``gc.freeze``, and the collector can only unfreeze or freeze
    all objects at once. A program freezes objects on purpose: to share pages with processes that it forks, or to
    avoid pauses. So objects that were not frozen before are untracked and tracked again, which puts them into the
    young generation.
    """
    if not gc.get_freeze_count():
        return gc.get_objects()
    collects = gc.isenabled()
    gc.disable()
    try:
        free = gc.get_objects()
        gc.unfreeze()
        objects = gc.get_objects()
        gc.freeze()
        _melt(free)
    finally:
        if collects:
            gc.enable()
    return objects


def _melt(objects: Sequence[Any]) -> None:
    """Move ``objects`` out of the permanent generation, into the young one.

    Tracking a tracked object aborts the process, and another thread tracks a dictionary when it first fills it. So
    both calls are made for all objects without executing Python code in between, where threads switch.
    """
    twice = chain.from_iterable(zip(objects, objects, strict=True))
    deque(map(operator.call, cycle((_UNTRACK, _TRACK)), twice), maxlen=0)
