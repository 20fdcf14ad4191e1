"""When memory runs out despite a plan: repeat the call with a smaller plan where that is safe, else explain it.

A forward pass is safe to repeat while it has had no side effects: no buffer has been written to, and the random
numbers are put back. A step of the optimizer or a backward pass is not repeated: some of it may have been done.
"""

from __future__ import annotations

import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from brim import accelerator
from brim.errors import FormatError, is_out_of_memory
from brim.printable import write_note
from brim.run.script.copies import has_other_hooks


def explanation(error: BaseException) -> list[str]:
    """The lines of ``brim explain`` for an out-of-memory error; none for another."""
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return []
    from brim.report.oom.reader import primary, read_oom

    try:
        message = primary(read_oom("".join(traceback.format_exception(error))))
    except FormatError:  # PyTorch says it in words that are not known yet
        return ["memory ran out, with a message that brim explain does not know"]
    helpful = [advice for advice in message.advice if advice.helps]
    lines = [f"{number}. {advice.text}" for number, advice in enumerate(helpful, 1)]
    return [f"{message.family} on {message.device}: {message.cause.replace('_', ' ')}", message.why, *lines]


def repeat_when_out_of_memory(model: nn.Module, smaller: Callable[[], bool], example: Any) -> None:
    """Let a call of ``model``, which is fitted, be repeated once ``smaller`` has put a smaller plan into force.

    ``example`` are the inputs that it was planned for; the first call with larger ones is reported on stderr.
    """
    mine = vars(model)
    inner: Callable[..., Any] = mine.get("_call_impl") or types.MethodType(type(model)._call_impl, model)
    mine["_call_impl"] = _Repeating(model, inner, smaller, _numbers(example))


def _numbers(inputs: Any) -> int:
    """The number of elements of all tensors in ``inputs``."""
    return sum(value.numel() for value in tree_leaves(inputs) if isinstance(value, torch.Tensor))


def repeat_no_more(model: nn.Module) -> None:
    """Undo it; nothing where it was not done."""
    call = vars(model).get("_call_impl")
    if isinstance(call, _Repeating):
        del vars(model)["_call_impl"]
        if not isinstance(call.inner, types.MethodType):  # a guard of weight streaming
            vars(model)["_call_impl"] = call.inner


class _Repeating:
    """Replaces the call of a fitted model. It is removed with the fit: ``smaller`` fits anew and installs another."""

    def __init__(
        self, model: nn.Module, inner: Callable[..., Any], smaller: Callable[[], bool], foreseen: int
    ) -> None:
        self._model, self.inner, self._smaller = weakref.ref(model), inner, smaller
        self._foreseen = foreseen  # elements of the inputs that it was planned for; 0: they were not known
        self._torchdynamo_disable = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None, "it is being called"
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        if self._foreseen and (count := _numbers((args, kwargs))) > self._foreseen:
            write_note(
                f"{type(model).__name__} is called with {count:,} numbers and was planned for "
                f"{self._foreseen:,}: activations may go beyond the budget"
            )
            self._foreseen = 0  # reported once
        versions = [buffer._version for buffer in model.buffers()]
        random_states = torch.get_rng_state(), accelerator.random_states()
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
        torch.set_rng_state(random_states[0])
        accelerator.set_random_states(random_states[1])
        return model(*args, **kwargs)

    def _make_room(self, failed: Exception) -> None:
        """Raises ``failed`` where there is no smaller plan."""
        traceback.clear_frames(failed.__traceback__)  # they hold the tensors of the call that failed
        try:
            if self._smaller():
                return
            failed.add_note("brim: the smallest plan was already in force.")
        except Exception as error:  # the program is to see its own error, not one of a search for less
            failed.add_note(f"brim: no smaller plan: {' '.join(str(error).split())}")
        raise failed
