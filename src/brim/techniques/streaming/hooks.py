"""The forward hooks that bring a block's weights before its module runs and let them go after."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from brim import accelerator
from brim.errors import UnsupportedError
from brim.memory.backing_store import BackingStore, DiskStore
from brim.techniques.precision import autocast_cache
from brim.techniques.saved_tensor_hooks import Saving
from brim.techniques.streaming.backward_streaming import BackwardStreaming
from brim.techniques.streaming.block_state import Streamed
from brim.techniques.streaming.streamed_blocks import StreamedBlocks


@dataclass
class _Call:
    """One call of a module: ``start`` is autograd's sequence number when it began."""

    start: int
    saving: Saving | None = None
    keeps_casts: bool | None = None  # whether autocast was asked to keep its casts of weights


class BlockHooks:
    """The hooks of one trigger: its blocks come before everything else in its call and go after everything else.

    So the user's own hooks see the weights in place, whenever they were registered. ``backward`` is given in
    training. ``begin_step`` is called first, if given: where the module is the whole model.
    """

    def __init__(
        self,
        streamed_blocks: StreamedBlocks,
        held: list[Streamed],
        module: nn.Module,
        turns: Turns,
        backward: BackwardStreaming | None,
        begin_step: Callable[[], None] | None,
    ) -> None:
        self._streamed_blocks, self._held, self._module = streamed_blocks, held, module
        self._turns, self._backward, self._begin_step = turns, backward, begin_step
        self._calls: list[_Call] = []
        enter, leave = torch.compiler.disable(self.enter), torch.compiler.disable(self.leave)
        self._first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        self._last = module.register_forward_hook(leave, always_call=True)  # also when the forward raised

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._turns.check_process()
        backward = self._backward
        if backward is None and torch.is_grad_enabled():
            _refuse_gradients(module, self._held, args, kwargs)
        if self._begin_step is not None:
            self._begin_step()
        hooks = self._module._forward_hooks
        if next(reversed(hooks)) != self._last.id:  # not walked through right now: those before the call are
            hooks.move_to_end(self._last.id)  # type: ignore[attr-defined]  # an OrderedDict
        call = _Call(torch._C._autograd._get_sequence_nr())
        self._calls.append(call)
        for streamed in self._held:
            self._streamed_blocks.enter(streamed)
        if backward is not None and torch.is_grad_enabled():
            call.saving = backward.saving(call.start)
            call.saving.begin()
        # A copy in 16 bits of each weight that comes by, until the user's region ends: all of the model once more.
        call.keeps_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        call = self._calls.pop() if self._calls else None
        if call is not None and call.keeps_casts is not None:
            torch.set_autocast_cache_enabled(call.keeps_casts)
        if call is not None and call.saving is not None:
            call.saving.end()
            assert self._backward is not None
            self._backward.announce(self._held, call.start, output)
        for streamed in reversed(self._held):
            self._streamed_blocks.leave(streamed, settle=True)
        hooks = self._module._forward_pre_hooks
        if next(iter(hooks)) != self._first.id:
            hooks.move_to_end(self._first.id, last=False)  # type: ignore[attr-defined]

    def guarded_call(self) -> Callable[..., Any]:
        """The module's call, left in any case: PyTorch calls no hook after Ctrl-C.

        Saved-tensor hooks that stayed would be in the way of all others.
        """
        call: Callable[..., Any] = type(self._module)._call_impl

        def _call_impl(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._calls)
            try:
                return call(self._module, *args, **kwargs)
            finally:
                while len(self._calls) > depth:
                    self.leave(self._module, None, None)

        return _call_impl

    def remove(self) -> None:
        self._first.remove()
        self._last.remove()


class Turns:
    """Whose turn it is: a streamed model has one ring, so calls from several threads come one after the other.

    A forked process has none of the threads that move weights: there it is refused before it would wait for them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name, self._process, self.lock = type(model).__name__, os.getpid(), threading.RLock()

    def check_process(self) -> None:
        """Raise UnsupportedError in another process than the one that fitted the model."""
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"{self._name}, fitted by brim in process {self._process}, was used in process {os.getpid()}, a fork "
                "of that one.",
                "The threads that load its weights do not exist there.",
                "Fit or load it in the process that uses it, or start processes by 'spawn'.",
            )

    def _check_capture(self) -> None:
        if accelerator.is_capturing():
            raise UnsupportedError(
                f"{self._name}, fitted by brim, was called while a CUDA graph is captured.",
                "A replay would not load the streamed weights.",
                "Capture graphs without it, or give a budget that holds all of it.",
            )

    def taking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, in turn. What a compiler makes of it takes none: it knows no locks."""

        def _call_impl(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(*args, **kwargs)
            self.check_process()  # first: the lock may have been forked while another thread held it
            self._check_capture()
            with self.lock, autocast_cache(False):  # of what stays, too: the budget is for weights as they are
                return call(*args, **kwargs)

        return _call_impl


def without_casts(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` of a model without streamed weights; autocast keeps no 16-bit copies of its weights."""

    def _call_impl(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with autocast_cache(False):
            return call(*args, **kwargs)

    return _call_impl


class Recover:
    """The first pre-hook of the whole model: it releases what an interrupted step left."""

    def __init__(self, begin_step: Callable[[], None]) -> None:
        self._begin_step = begin_step

    def __call__(self, module: nn.Module, args: object) -> None:
        self._begin_step()


def check_rows(table: nn.Module, store: DiskStore, streamed: Streamed) -> torch.utils.hooks.RemovableHandle:
    """Before rows of ``table``, an embedding, are looked up in its file: make sure that they can be read."""
    assert isinstance(table, nn.Embedding)
    count = table.num_embeddings
    index = next(i for i, parameter in enumerate(streamed.parameters) if parameter is table.weight)

    def check(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        ids = args[0] if args else kwargs.get("input")
        if isinstance(ids, torch.Tensor):
            store.check_rows(index, [row for row in ids.unique().tolist() if 0 <= row < count])

    return table.register_forward_pre_hook(torch.compiler.disable(check), with_kwargs=True)


def settle_first(table: nn.Module, store: BackingStore) -> torch.utils.hooks.RemovableHandle:
    """Before rows of ``table`` are looked up where it rests: let what was saved arrive there."""

    def wait(module: nn.Module, args: object) -> None:
        store.settle()

    return table.register_forward_pre_hook(torch.compiler.disable(wait))


def note_steps(
    ids: set[int], written_back: Mapping[torch.optim.Optimizer, set[int]]
) -> torch.utils.hooks.RemovableHandle:
    """After a step of any optimizer, the versions of these parameters tell that they were written to.

    Fused optimizers do not see to that, and a block that looks unchanged would not be written back. Those that the
    optimizer offload has written back itself are left alone: they would be read and written once more for nothing.
    """

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        to_note = ids - written_back.get(optimizer, set())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.autograd.graph.increment_version([p for p in parameters if id(p) in to_note and p.grad is not None])

    return register_optimizer_step_post_hook(note)


def _refuse_gradients(
    module: nn.Module, held: list[Streamed], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Autograd would keep a slot's bytes for backward, and they are another block's by then."""
    tensors = [*args, *kwargs.values(), *module.parameters()]
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise UnsupportedError(
            f"Cannot compute gradients through {held[0].block.name}, whose weights are streamed.",
            "This handle streams for inference only.",
            "Run the model under torch.no_grad(), fit it for training, or give a budget that holds it whole.",
        )
