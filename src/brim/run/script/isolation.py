"""Predict with a program's model without side effects on its random numbers, output, hooks and warnings."""

from __future__ import annotations

import contextlib
import inspect
import io
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
from brim.random_numbers import all_generators, restored
from brim.run.script.hooks import Call

_ASKED = "transformers.utils.import_utils"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextlib.contextmanager
def unseen(model: nn.Module) -> Iterator[None]:
    """While the context is open, ``model`` may be copied and the copy called without side effects.

    The program's own hooks on modules are removed: they would be called with tensors without values.
    """
    with quiet(), _without_hooks(model), _no_transformers(), torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print nothing and show no warning while the context is open; restore random states at the end."""
    with restored(all_generators()), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            for name in _HOOKS:
                hooks = vars(module)[name]
                if hooks:
                    before.append((module, name, hooks))
                    # PyTorch's own hooks compute (``weight_norm`` computes the weight in one).
                    vars(module)[name] = OrderedDict(
                        (number, hook)
                        for number, hook in hooks.items()
                        if str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")
                    )
        yield
    finally:
        for module, name, hooks in before:
            vars(module)[name] = hooks


@contextlib.contextmanager
def _no_transformers() -> Iterator[None]:
    """Avoid importing transformers, which takes a second: a program without it has none of its models.

    A trace patches this module of transformers, and imports it where it is missing.
    """
    if "transformers" in sys.modules or torch.cuda.is_initialized():  # predicting a GPU's memory imports it
        yield
        return
    sys.modules[_ASKED] = types.ModuleType(_ASKED)
    try:
        yield
    finally:
        del sys.modules[_ASKED]


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Call functions that PyTorch hides from Dynamo without importing it, which takes a second.

    Their wrappers (torch/_compile.py) import Dynamo at their first call; until then nothing is compiled. The
    wrappers' caches are cleared at the end. Nothing is done while another thread could see the stand-in.
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


def example_of(model: nn.Module, call: Call) -> Mapping[str, Any] | Sequence[Any] | None:
    """The arguments of a call in the form of ``brim.fit``'s example; None if they are unknown or mixed in kind.

    Raises UnsupportedError for arguments that cannot be copied: a prediction must not write to the program's own.
    """
    if call.kwargs is None:
        return None
    try:
        args, kwargs = map_tensors((call.args, dict(call.kwargs)), torch.Tensor.detach)
    except Exception as error:  # the program's objects may raise anything when they are copied
        raise UnsupportedError(f"Cannot copy the inputs of {type(model).__name__}.", first_line(error)) from error
    if not kwargs:
        return tuple(args)
    if not args:
        return dict(kwargs)
    try:
        parameters = inspect.signature(model.forward).parameters
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # an error of the program, which its own call will raise
        return None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return None
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named
