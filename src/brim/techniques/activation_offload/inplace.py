"""In-place activations: ReLU and similar modules overwrite inputs that are not needed any more.

Autograd refuses this only for tensors that it has saved itself; a residual connection that reads the old value later
would silently be wrong. So the model is run once on fake tensors with every storage watched: an activation may write
over its input if an operation made it, and only the activation's own backward reads it afterwards. The remaining
modules are tested, forward and backward, before they are set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from brim.errors import UnsupportedError, UsageError
from brim.model_inputs import tensors_in
from brim.techniques.dry_run import call_with, dry_run

NAME = "inplace_activations"
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)  # their in-place kernels may draw other numbers


def apply(model: nn.Module, example: Any, names: Sequence[str] | None = None) -> InplaceActivations:
    """Set ``inplace`` on the modules of ``model`` that support it, if results stay bit for bit the same.

    ``example`` are inputs of the model in training: a dictionary, a tuple or a tensor. All later calls must take the
    same branches. With ``names``, those of an earlier handle of the same model with the same techniques in force,
    nothing is tested. Raises UnsupportedError if the model cannot run on fake tensors.
    """
    if any(isinstance(part, InplaceActivations) for part in vars(model).values()):
        raise UsageError(
            f"Cannot make the activations of {type(model).__name__} in-place.",
            "They are in-place already.",
            "Call .remove() on its handle first.",
        )
    return InplaceActivations(model, list(_inplace_bytes(model, example)) if names is None else names)


class InplaceActivations:
    """The handle. ``names`` are the modules that work in place."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._modules = [model.get_submodule(name) for name in names]
        _set(self._modules, True)
        self._model: nn.Module | None = model
        vars(model)[_MARK] = self

    def remove(self) -> None:
        if self._model is not None:
            _set(self._modules, False)
            del vars(self._model)[_MARK]
            self._model = None


def saved_bytes(model: nn.Module, example: Any) -> int:
    """Return the bytes of the largest input over which an activation may write, 0 if there is none."""
    return max(_inplace_bytes(model, example).values(), default=0)


_MARK = "brim_inplace_activations"


def _inplace_bytes(model: nn.Module, example: Any) -> dict[str, int]:
    """The modules that may work in place, with the bytes of the largest input of each."""
    candidates = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "inplace", None) is False and not isinstance(module, _RANDOM) and _is_exact(module)
    }
    for training in (True, False) if candidates else ():
        with _trial(model, training):
            watch = _Watch(candidates)
            _run(model, example, watch)
        candidates = {name: module for name, module in candidates.items() if watch.allows(module)}
        sizes = {name: watch.largest_bytes(module) for name, module in candidates.items()}

    def works(names: Sequence[str]) -> bool:
        chosen = [candidates[name] for name in names]
        _set(chosen, True)
        try:
            for training in (True, False):
                with _trial(model, training):
                    _run(model, example)
        except UnsupportedError:
            return False
        finally:
            _set(chosen, False)
        return True

    return {name: sizes[name] for name in _largest_working(list(candidates), works)}


def _largest_working(names: list[str], works: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return ``names`` without the modules that fail, found by bisection."""
    working: list[str] = []
    pending = [names]
    while pending:
        group = pending.pop()
        if not group:
            continue
        if works([*working, *group]):
            working += group
        elif len(group) > 1:
            middle = len(group) // 2
            pending += [group[middle:], group[:middle]]
    return working


def _set(modules: Sequence[nn.Module], inplace: bool) -> None:
    for module in modules:
        module.inplace = inplace  # type: ignore[assignment]  # a plain attribute of these modules


def _is_exact(module: nn.Module) -> bool:
    """Return whether the module in place gives the same bits, forward and backward, and saves its output only.

    Where a derivative needs the input (SiLU), autograd copies it first, so that no memory is saved; where it is
    computed from the output instead (ELU), it is rounded differently.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            plain, inplace = (_run_once(module, dtype, inplace) for inplace in (False, True))
            if not (inplace.keeps_output_only and _same(plain.values, inplace.values)):
                return False
    return True


@dataclass(frozen=True, kw_only=True)
class _SingleRun:
    values: tuple[torch.Tensor, ...]  # output and gradient
    keeps_output_only: bool


def _run_once(module: nn.Module, dtype: torch.dtype, inplace: bool) -> _SingleRun:
    twin = copy.copy(module)
    vars(twin)["inplace"] = inplace
    start = torch.linspace(-8, 8, 513, dtype=dtype).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor

    hidden = start * 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = type(twin).forward(twin, hidden)
    (gradient,) = torch.autograd.grad(output, start, torch.linspace(1, 3, 513, dtype=dtype))
    own = all(tensor.untyped_storage()._cdata == output.untyped_storage()._cdata for tensor in saved)
    return _SingleRun(values=(output.detach(), gradient), keeps_output_only=own)


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- the run on fake tensors


@contextmanager
def _trial(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode of the model within: for example, dropout returns its input itself in evaluation."""
    before = [(module, module.training) for module in model.modules()]
    if not training:
        model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _run(model: nn.Module, example: Any, watch: _Watch | None = None) -> None:
    """Run forward and backward on fake tensors, without changing the model's gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with dry_run(model, example) as inputs, ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if watch is not None:
                stack.enter_context(watch.hooked())
                stack.enter_context(watch)
            output = call_with(model, inputs)
            tree = dict(output) if isinstance(output, Mapping) else output
            outputs = tensors_in(tree)
            if watch is not None:
                watch.outputs(outputs)
            loss = [value.sum() for value in outputs if value.requires_grad]
            if loss and trained:
                torch.autograd.grad(loss, trained, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"Cannot test {type(model).__name__} with in-place activations.",
            f"It cannot run on fake tensors: {error}",
            "Leave in-place activations out.",
        ) from error


@dataclass
class _Call:
    module: nn.Module
    input: torch.Tensor  # kept alive, so that no other tensor gets its storage
    node: Any  # the output's grad_fn
    allowed: bool = True


@dataclass
class _Storages:
    created: set[int] = field(default_factory=set)  # by an operation, in this run
    alive: list[torch.Tensor] = field(default_factory=list)
    watched: dict[int, list[_Call]] = field(default_factory=dict)


class _Watch(TorchDispatchMode):
    """Watches for reads of an activation's input after the activation."""

    def __init__(self, candidates: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._candidates = list(candidates.values())
        self._calls: list[_Call] = []
        self._storages = _Storages()

    def allows(self, module: nn.Module) -> bool:
        """Return whether the module was called, and may work in place in all of its calls."""
        calls = [call for call in self._calls if call.module is module]
        return bool(calls) and all(call.allowed for call in calls)

    def largest_bytes(self, module: nn.Module) -> int:
        return max(call.input.untyped_storage().nbytes() for call in self._calls if call.module is module)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        hooks = [module.register_forward_hook(self._note_call) for module in self._candidates]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count the outputs of the model as read, by its caller."""
        self._read(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = tensors_in(args, kwargs)
        if func is not torch.ops.prim.device.default:
            self._read(read)
        result = func(*args, **kwargs)
        seen = {_storage(tensor) for tensor in read}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in seen:
                self._storages.created.add(_storage(tensor))
                self._storages.alive.append(tensor.detach())
        return result

    def _read(self, tensors: Sequence[torch.Tensor]) -> None:
        # Backward formulas run without gradients, the recomputation of a checkpoint with them.
        node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
        for tensor in tensors:
            for call in self._storages.watched.get(_storage(tensor), ()):
                if node is None or node is not call.node:
                    call.allowed = False

    def _note_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        input = args[0] if args else None
        if not isinstance(input, torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        storage = _storage(input)
        call = _Call(module, input, output.grad_fn, allowed=storage in self._storages.created)
        self._calls.append(call)
        self._storages.watched.setdefault(storage, []).append(call)


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
