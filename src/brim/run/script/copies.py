"""``copy.deepcopy`` and pickling of a fitted model: they give an ordinary model, with its values in memory.

brim's hooks and attributes are removed from the modules during the copy, and every parameter is copied from its
backing store.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from brim.errors import UnsupportedError
from brim.techniques.base import HANDLE_ATTRIBUTE

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_NUMBERED = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_MARKS = "brim_"  # prefix of attributes that say which plan is in force
_COPIES, _PICKLES = "__deepcopy__", "__reduce_ex__"


def allow_copies(model: nn.Module) -> None:
    """Let the fitted ``model`` and its parts be copied and pickled, also after the fit was removed."""
    for module in model.modules():
        if _COPIES in vars(module) and not _is_own(vars(module)[_COPIES]):
            continue  # the program's own method
        vars(module)[_COPIES] = lambda memo, module=module: unfitted_copy(model, module, memo)
        vars(module)[_PICKLES] = lambda protocol, module=module: unfitted_copy(model, module, {}).__reduce_ex__(
            protocol
        )


def unfitted_copy(model: nn.Module, part: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of ``part`` of the fitted ``model`` as if it had never been fitted."""
    handle = vars(model).get(HANDLE_ATTRIBUTE)
    streaming: Any = getattr(handle, "streaming", handle)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in part.parameters() if streaming is not None else ():
        if id(parameter) not in memo:
            value = streaming.value(names[id(parameter)]).to(parameter.device)
            memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    with _plain(part):
        return copy.deepcopy(part, memo)


def has_other_hooks(model: nn.Module) -> bool:
    """True if ``model`` or its parts have forward hooks that are not brim's."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    return any(
        not _is_own(hook) for module in model.modules() for kind in kinds for hook in vars(module)[kind].values()
    )


@contextlib.contextmanager
def _plain(part: nn.Module) -> Iterator[None]:
    """Remove everything of brim's from the modules of ``part`` while the context is open."""
    before = [(module, dict(vars(module))) for module in part.modules()]
    try:
        for module, values in before:
            _strip(module, values)
        yield
    finally:
        for module, values in before:
            vars(module).clear()
            vars(module).update(values)


def _strip(module: nn.Module, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in _HOOKS:
            others = [(number, hook) for number, hook in value.items() if not _is_own(hook)]
            vars(module)[name] = OrderedDict(others)
        elif name in _NUMBERED:
            numbers = {n for hooks in _HOOKS for n, hook in values.get(hooks, {}).items() if _is_own(hook)}
            vars(module)[name] = OrderedDict((n, flag) for n, flag in value.items() if n not in numbers)
        elif name not in ("_modules", "_parameters", "_buffers") and (name.startswith(_MARKS) or _is_own(value)):
            if name == "forward" and getattr(value, "_before", None) is not None:
                raise UnsupportedError(
                    f"Cannot copy {type(module).__name__} while it is fitted.",
                    "The program had replaced its forward method before.",
                    "Copy it before its first call.",
                )
            del vars(module)[name]


def _is_own(value: Any) -> bool:
    """True if ``value`` is a function, a bound method or an object of brim's."""
    if isinstance(value, types.MethodType):
        return _is_own(value.__self__) or _is_own(value.__func__)
    module = getattr(value, "__module__", None) or ""
    inner = getattr(value, "__wrapped__", None) or getattr(value, "func", None) or getattr(value, "hook", None)
    return str(module).startswith("brim.") or (inner is not None and _is_own(inner))
