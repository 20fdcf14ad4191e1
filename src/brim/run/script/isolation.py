"""Rehearsing a program's model unnoticed: its random numbers, its output, its hooks and its warnings are its own."""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import UnsupportedError, first_line
from brim.model_inputs import map_tensors

_ASKED = "transformers.utils.import_utils"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextlib.contextmanager
def unseen(model: nn.Module) -> Iterator[None]:
    """Within: ``model`` may be copied and the copy be called without side effects.

    The program's own hooks on modules are removed meanwhile: they would be called with tensors without values.
    """
    with quiet(), _without_hooks(model), _no_transformers(), torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within: nothing is printed and no warning is shown; random states are restored at the end."""
    with same_random_numbers(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the states of all random generators at the end."""
    numpy = sys.modules.get("numpy")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            for name in _HOOKS:
                hooks = vars(module)[name]
                if hooks:
                    before.append((module, name, hooks))
                    kept = [(number, hook) for number, hook in hooks.items() if _is_part_of_model(hook)]
                    vars(module)[name] = OrderedDict(kept)
        yield
    finally:
        for module, name, hooks in before:
            vars(module)[name] = hooks


@contextlib.contextmanager
def _no_transformers() -> Iterator[None]:
    """A program that has not imported transformers has no model of theirs, and importing it takes a second.

    A trace looks for this module of theirs, to replace what models ask of it, and imports it where it is missing.
    """
    if "transformers" in sys.modules or torch.cuda.is_initialized():  # what predicts a GPU's memory imports it
        yield
        return
    sys.modules[_ASKED] = types.ModuleType(_ASKED)
    try:
        yield
    finally:
        del sys.modules[_ASKED]


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Within, functions that PyTorch hides from Dynamo are called without importing it, which takes a second.

    Their wrappers (torch/_compile.py) import it at their first call; until then nothing is compiled. What a wrapper
    caches of it is removed at the end. Nothing is done while another thread could see it.
    """
    if "torch._dynamo" in sys.modules or threading.active_count() > 1:
        yield
        return
    called: list[Any] = []

    def disable(function: Any, recursive: bool = True, *, wrapping: bool = True) -> Any:
        called.append(function)
        return function

    stand_in: Any = types.ModuleType("torch._dynamo")
    stand_in.disable = disable
    sys.modules["torch._dynamo"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torch._dynamo"]
        vars(torch).pop("_dynamo", None)
        for function in called:
            vars(function).pop("__dynamo_disable", None)


def _is_part_of_model(hook: Any) -> bool:
    """PyTorch's own hooks compute (``weight_norm`` makes the weight in one)."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")


def example_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Mapping[str, Any] | Sequence[Any] | None:
    """The arguments of a call in the form of ``brim.fit``'s example; None if they are unknown or not of one kind.

    Raises UnsupportedError for arguments that cannot be copied: a prediction must not write to the program's own.
    """
    if kwargs is None:
        return None
    try:
        args, kwargs = map_tensors((args, dict(kwargs)), torch.Tensor.detach)
    except Exception as error:  # whatever an object of the program's raises when it is copied
        raise UnsupportedError(
            f"Cannot copy what {type(model).__name__} is called with.", first_line(error)
        ) from error
    if not kwargs:
        return tuple(args)
    if not args:
        return dict(kwargs)
    try:
        parameters = inspect.signature(model.forward).parameters
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the program's mistake, which its own call will report
        return None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return None
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named
