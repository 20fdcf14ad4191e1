"""In-place activations: ReLU and friends write over what they were given, where nobody needs it any more.

Autograd refuses only what it has kept itself; a residual connection that reads the old value later would be wrong
without a word. So the model is run once on fake tensors with every storage watched: an activation may write over its
input if that was made by an operation, and nothing but the activation's own backward reads it afterwards. What is
left is tried out, forward and backward, before it is put into force.
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

from brim.core.hardware import RAM
from brim.errors import UnsupportedError, UsageError
from brim.techniques.base import Option
from brim.techniques.dry_run import call_with, dry_run

NAME = "inplace_activations"
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)  # their in-place kernels may draw other numbers


def apply(model: nn.Module, example: Any, names: Sequence[str] | None = None) -> InplaceActivations:
    """Set ``inplace`` on every module of ``model`` that has it, where results stay bit for bit the same.

    ``example`` is what the model is called with in training: a dictionary, a tuple or a tensor. It must stand for all
    calls to come: the same branches are taken. ``names`` are those of an earlier handle, of the same model with the
    same techniques in force: then nothing is tried out. Raises UnsupportedError where the model cannot run on fake
    tensors.
    """
    if any(isinstance(part, InplaceActivations) for part in vars(model).values()):
        raise UsageError(
            f"Cannot make the activations of {type(model).__name__} in-place.",
            "They are in-place already.",
            "Remove the first handle before.",
        )
    return InplaceActivations(model, list(_found(model, example)) if names is None else names)


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


def options(model: nn.Module, example: Any, *, tier: str = RAM) -> list[Option]:
    """What it saves: at most one activation's input at a time, so the largest of them. It costs nothing."""
    saved_bytes = _found(model, example)
    if not saved_bytes:
        return []
    return [Option(technique=NAME, block="", choice="inplace", saves_bytes={tier: max(saved_bytes.values())})]


_MARK = "brim_inplace_activations"


def _found(model: nn.Module, example: Any) -> dict[str, int]:
    """Modules that may work in place, with the bytes of the largest input of each."""
    candidates = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "inplace", None) is False and not isinstance(module, _RANDOM) and _gains(module)
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
    """All of ``names`` but those that fail, found by halving."""
    kept: list[str] = []
    pending = [names]
    while pending:
        group = pending.pop()
        if not group:
            continue
        if works([*kept, *group]):
            kept += group
        elif len(group) > 1:
            middle = len(group) // 2
            pending += [group[middle:], group[:middle]]
    return kept


def _set(modules: Sequence[nn.Module], inplace: bool) -> None:
    for module in modules:
        module.inplace = inplace  # type: ignore[assignment]  # a plain attribute of these modules


def _gains(module: nn.Module) -> bool:
    """Whether in place it gives the same bits, forward and backward, and keeps nothing but its output.

    Where a derivative needs the input (SiLU), autograd copies it first and nothing is saved; where it is computed
    from the output instead (ELU), it is rounded another way.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            plain, inplace = (_once(module, dtype, inplace) for inplace in (False, True))
            if not (inplace.keeps_output_only and _same(plain.values, inplace.values)):
                return False
    return True


@dataclass(frozen=True, kw_only=True)
class _Once:
    values: tuple[torch.Tensor, ...]  # output and gradient
    keeps_output_only: bool


def _once(module: nn.Module, dtype: torch.dtype, inplace: bool) -> _Once:
    twin = copy.copy(module)
    vars(twin)["inplace"] = inplace
    start = torch.linspace(-8, 8, 513, dtype=dtype).requires_grad_()
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return tensor

    hidden = start * 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = type(twin).forward(twin, hidden)
    (gradient,) = torch.autograd.grad(output, start, torch.linspace(1, 3, 513, dtype=dtype))
    own = all(tensor.untyped_storage()._cdata == output.untyped_storage()._cdata for tensor in kept)
    return _Once(values=(output.detach(), gradient), keeps_output_only=own)


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- the run on fake tensors


@contextmanager
def _trial(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in one of its modes: dropout, for one, gives back its input itself in evaluation."""
    before = [(module, module.training) for module in model.modules()]
    if not training:
        model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _run(model: nn.Module, example: Any, watch: _Watch | None = None) -> None:
    """Forward and backward on fake tensors; the model's own gradients are left alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with dry_run(model, example) as inputs, ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if watch is not None:
                stack.enter_context(watch.hooked())
                stack.enter_context(watch)
            output = call_with(model, inputs)
            outputs = [value for value in tree_leaves(_parts(output)) if isinstance(value, torch.Tensor)]
            if watch is not None:
                watch.outputs(outputs)
            loss = [value.sum() for value in outputs if value.requires_grad]
            if loss and trained:
                torch.autograd.grad(loss, trained, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"Cannot test {type(model).__name__} with in-place activations.",
            f"It cannot run on fake tensors: {error}",
            "Leave this technique out.",
        ) from error


def _parts(made: Any) -> Any:
    return dict(made) if isinstance(made, Mapping) else made


@dataclass
class _Call:
    """One call of an activation."""

    module: nn.Module
    given: torch.Tensor  # held, so that its storage is not another's later
    node: Any  # of autograd, that made the output
    allowed: bool = True


@dataclass
class _Storages:
    made: set[int] = field(default_factory=set)  # by an operation, in this run
    held: list[torch.Tensor] = field(default_factory=list)
    watched: dict[int, list[_Call]] = field(default_factory=dict)


class _Watch(TorchDispatchMode):
    """Sees who reads what an activation was given, after the activation is done with it."""

    def __init__(self, candidates: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._candidates = list(candidates.values())
        self._calls: list[_Call] = []
        self._storages = _Storages()

    def allows(self, module: nn.Module) -> bool:
        """In all of its calls, and it was called."""
        calls = [call for call in self._calls if call.module is module]
        return bool(calls) and all(call.allowed for call in calls)

    def largest_bytes(self, module: nn.Module) -> int:
        return max(call.given.untyped_storage().nbytes() for call in self._calls if call.module is module)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        hooks = [module.register_forward_hook(self._done) for module in self._candidates]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """What the model gives to its caller is read by the caller."""
        self._read(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func is not torch.ops.prim.device.default:
            self._read(read)
        result = func(*args, **kwargs)
        seen = {_storage(tensor) for tensor in read}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in seen:
                self._storages.made.add(_storage(tensor))
                self._storages.held.append(tensor.detach())
        return result

    def _read(self, tensors: Sequence[torch.Tensor]) -> None:
        # Backward formulas run without gradients; what is computed again for a checkpoint runs with them.
        node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
        for tensor in tensors:
            for call in self._storages.watched.get(_storage(tensor), ()):
                if node is None or node is not call.node:
                    call.allowed = False

    def _done(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        input = args[0] if args else None
        if not isinstance(input, torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        storage = _storage(input)
        call = _Call(module, input, output.grad_fn, allowed=storage in self._storages.made)
        self._calls.append(call)
        self._storages.watched.setdefault(storage, []).append(call)


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
