"""Repeat a call with a smaller plan when memory runs out despite a plan, or explain the error.

A forward pass can be repeated while it has had no side effects: no buffer was written to, and the random state can be
restored. A step of the optimizer or a backward pass is never repeated: a part of it may be done already.
"""

from __future__ import annotations

import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from brim import accelerator
from brim.errors import FormatError, is_out_of_memory
from brim.model_inputs import tensors_in
from brim.printable import write_note
from brim.random_numbers import default_generators, set_state, state_of
from brim.run.script.copies import has_other_hooks


def explanation(error: BaseException) -> list[str]:
    """The lines of ``brim explain`` for an out-of-memory error; an empty list for other errors."""
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return []
    from brim.report.oom.reader import primary, read_oom

    try:
        message = primary(read_oom("".join(traceback.format_exception(error))))
    except FormatError:  # the wording of another PyTorch
        return ["memory ran out, with a message that brim explain does not know"]
    helpful = [advice for advice in message.advice if advice.helps]
    lines = [f"{number}. {advice.text}" for number, advice in enumerate(helpful, 1)]
    return [f"{message.family} on {message.device}: {message.cause.replace('_', ' ')}", message.why, *lines]


def repeat_when_out_of_memory(model: nn.Module, shrink: Callable[[], bool], example: Any) -> None:
    """Repeat a call of the fitted ``model`` that runs out of memory, after ``shrink`` has enforced a smaller plan.

    ``example`` are the inputs that it was planned for; the first call with larger ones is reported on stderr.
    """
    mine = vars(model)
    inner: Callable[..., Any] = mine.get("_call_impl") or types.MethodType(type(model)._call_impl, model)
    mine["_call_impl"] = _Repeating(model, inner, shrink, _elements(example))


def _elements(inputs: Any) -> int:
    """The number of elements of all tensors in ``inputs``."""
    return sum(tensor.numel() for tensor in tensors_in(inputs))


def repeat_no_more(model: nn.Module) -> None:
    """Undo ``repeat_when_out_of_memory``; does nothing if it was not called."""
    call = vars(model).get("_call_impl")
    if isinstance(call, _Repeating):
        del vars(model)["_call_impl"]
        if not isinstance(call.inner, types.MethodType):  # a guard of weight streaming
            vars(model)["_call_impl"] = call.inner


class _Repeating:
    """The call of a fitted model. It is removed with the fit; ``shrink`` fits again and installs a new one."""

    def __init__(
        self, model: nn.Module, inner: Callable[..., Any], shrink: Callable[[], bool], planned_elements: int
    ) -> None:
        self._model, self.inner, self._shrink = weakref.ref(model), inner, shrink
        self._planned_elements = planned_elements  # of the inputs; 0 if they were unknown
        self._torchdynamo_disable = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None, "it is being called"
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        if self._planned_elements and (count := _elements((args, kwargs))) > self._planned_elements:
            write_note(
                f"{type(model).__name__} was called with {count:,} numbers and planned for "
                f"{self._planned_elements:,}: activations may exceed the budget"
            )
            self._planned_elements = 0  # reported once
        versions = [buffer._version for buffer in model.buffers()]
        drawn = [(generator, state_of(generator)) for generator in default_generators()]
        random_states = accelerator.random_states()
        try:
            return self.inner(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if versions != [buffer._version for buffer in model.buffers()] or has_other_hooks(model):
                error.add_note("brim: not repeated with less memory, because the call has already had side effects.")
                raise
            failed = error
            self._make_room(failed)
        write_note(f"memory ran out in {type(model).__name__}: a smaller plan is in force")
        for generator, state in drawn:
            set_state(generator, state)
        accelerator.set_random_states(random_states)
        return model(*args, **kwargs)

    def _make_room(self, failed: Exception) -> None:
        """Enforce a smaller plan; raises ``failed`` if there is none."""
        traceback.clear_frames(failed.__traceback__)  # they refer to the tensors of the failed call
        try:
            if self._shrink():
                return
            failed.add_note("brim: the smallest plan was already in force.")
        except Exception as error:  # the program must see its own error, not one of the search for a smaller plan
            failed.add_note(f"brim: no smaller plan: {' '.join(str(error).split())}")
        raise failed
