"""The forward hooks that load a block's weights before its module runs and release them afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.optim.optimizer import register_optimizer_step_post_hook

from brim import accelerator
from brim.errors import UnsupportedError
from brim.memory.backing_store import BackingStore, DiskStore
from brim.techniques.base import autocast_cache, refuse_gradients
from brim.techniques.saved_tensor_hooks import Saving
from brim.techniques.streaming.backward_streaming import BackwardStreaming
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.streamed_blocks import StreamedBlocks


@dataclass
class _Call:
    """A call of a module; ``start`` is autograd's sequence number at its begin."""

    start: int
    saving: Saving | None = None
    keeps_casts: bool | None = None  # whether autocast cached its casts of weights


class BlockHooks:
    """The outermost hooks of a module, which bring its blocks and release them.

    So the user's own hooks see the weights in place, whenever they were registered. ``backward`` is given in
    training. ``begin_step`` is called first; it is given where the module is the model itself.
    """

    def __init__(
        self,
        streamed_blocks: StreamedBlocks,
        blocks: list[StreamedBlock],
        module: nn.Module,
        turns: Turns,
        backward: BackwardStreaming | None,
        begin_step: Callable[[], None] | None,
    ) -> None:
        self._streamed_blocks, self._blocks, self._module = streamed_blocks, blocks, module
        self._turns, self._backward, self._begin_step = turns, backward, begin_step
        self._calls: list[_Call] = []
        enter, leave = torch.compiler.disable(self.enter), torch.compiler.disable(self.leave)
        self._first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        self._last = module.register_forward_hook(leave, always_call=True)  # also when the forward raised

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._turns.check_process()
        backward = self._backward
        if backward is None and torch.is_grad_enabled():
            # By the time of backward another block is in the slot.
            refuse_gradients(
                [*args, *kwargs.values(), *module.parameters()],
                f"Cannot compute gradients through {self._blocks[0].block.name}, whose weights are streamed.",
                "This handle streams for inference only.",
                "Run the model under torch.no_grad(), fit it for training, or give a budget that holds it whole.",
            )
        if self._begin_step is not None:
            self._begin_step()
        hooks = self._module._forward_hooks
        if next(reversed(hooks)) != self._last.id:  # PyTorch iterates over a copy of the hooks from before the call
            hooks.move_to_end(self._last.id)  # type: ignore[attr-defined]  # an OrderedDict
        call = _Call(torch._C._autograd._get_sequence_nr())
        self._calls.append(call)
        for streamed in self._blocks:
            self._streamed_blocks.enter(streamed)
        if backward is not None and torch.is_grad_enabled():
            call.saving = backward.saving(call.start)
            call.saving.begin()
        # Autocast would keep a 16-bit copy of every streamed weight until the user's region ends.
        call.keeps_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        call = self._calls.pop() if self._calls else None
        if call is not None and call.keeps_casts is not None:
            torch.set_autocast_cache_enabled(call.keeps_casts)
        if call is not None and call.saving is not None:
            call.saving.end()
            assert self._backward is not None
            self._backward.announce(self._blocks, call.start, output)
        for streamed in reversed(self._blocks):
            self._streamed_blocks.leave(streamed, settle=True)
        hooks = self._module._forward_pre_hooks
        if next(iter(hooks)) != self._first.id:
            hooks.move_to_end(self._first.id, last=False)  # type: ignore[attr-defined]

    def guarded_call(self) -> Callable[..., Any]:
        """A replacement for the module's call that leaves the block even after Ctrl-C, when PyTorch calls no hook.

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
    """The lock of a streamed model: it has one ring, so calls from several threads run one after the other.

    A forked process has none of the threads that move weights: calls are refused there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name, self._process, self.lock = type(model).__name__, os.getpid(), threading.RLock()

    def check_process(self) -> None:
        """Raise UnsupportedError in another process than the one that fitted the model."""
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"{self._name}, fitted by brim in process {self._process}, was used in process {os.getpid()}, a fork "
                "of that one.",
                "The threads that load its weights do not exist in a fork.",
                "Fit or load it in the process that uses it, or start processes by 'spawn'.",
            )

    def taking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement for ``call`` that holds the lock."""

        def locked(*args: Any, **kwargs: Any) -> Any:
            self.check_process()  # first: the lock may have been forked while another thread held it
            if accelerator.is_capturing():
                raise UnsupportedError(
                    f"{self._name}, fitted by brim, was called while a CUDA graph is captured.",
                    "A replay would not load the streamed weights.",
                    "Capture graphs without it, or give a budget that holds all of it.",
                )
            with self.lock, autocast_cache(False):  # of resident weights, too: the budget has no room for casts
                return call(*args, **kwargs)

        return locked


class BlockCompilation:
    """``torch.compile`` of a streamed model, as a graph per block: brim loads the weights between the graphs.

    The compiler, a callback that PyTorch calls for each frame, is off between blocks and on within each.
    """

    def __init__(self) -> None:
        self._compiler: Any = None

    def replacement(self, call: Callable[..., Any], *, is_block: bool) -> Callable[..., Any]:
        """A replacement for ``call``, of a block or of the model."""
        from torch._dynamo.decorators import skip  # imported late: it takes seconds

        def _call_impl(*args: Any, **kwargs: Any) -> Any:
            outer, compiler = self._compiler, set_eval_frame(None)
            if is_block:
                set_eval_frame(compiler or outer)
            else:
                self._compiler = compiler
            try:
                return call(*args, **kwargs)
            finally:
                self._compiler = outer
                set_eval_frame(compiler)

        replacement: Callable[..., Any] = skip(_call_impl)
        return replacement


def without_casts(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` of a model without streamed weights; autocast keeps no 16-bit copies of its weights."""
    without = autocast_cache(False)(call)

    def _call_impl(*args: Any, **kwargs: Any) -> Any:
        return (call if torch.compiler.is_compiling() else without)(*args, **kwargs)

    return _call_impl


def check_rows(table: nn.Module, store: DiskStore, streamed: StreamedBlock) -> torch.utils.hooks.RemovableHandle:
    """Hook ``table``, an embedding in a file: before a look-up check that the rows can be read."""
    assert isinstance(table, nn.Embedding)
    count = table.num_embeddings
    index = next(i for i, parameter in enumerate(streamed.parameters) if parameter is table.weight)
    takes_ids = type(table).forward is nn.Embedding.forward

    def check(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        ids = args[0] if args else kwargs.get("input")
        if not takes_ids:  # tables of positions take a mask, or shift the rows: a shortened file lacks the last one
            store.check_rows(index, [count - 1])
        elif isinstance(ids, torch.Tensor):
            store.check_rows(index, [row for row in ids.unique().tolist() if 0 <= row < count])

    return table.register_forward_pre_hook(torch.compiler.disable(check), with_kwargs=True)


def settle_first(table: nn.Module, store: BackingStore) -> torch.utils.hooks.RemovableHandle:
    """Hook ``table``: before a look-up at rest wait for pending saves."""

    def wait(module: nn.Module, args: object) -> None:
        store.settle()

    return table.register_forward_pre_hook(torch.compiler.disable(wait))


def note_steps(
    ids: set[int], written_back: Mapping[torch.optim.Optimizer, set[int]]
) -> torch.utils.hooks.RemovableHandle:
    """Raise the versions of these parameters after a step of any optimizer.

    Fused optimizers do not, and a block that looks unchanged would not be written back. Parameters that the optimizer
    offload has ``written_back`` are left out: they would be read and written once more.
    """

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        to_note = ids - written_back.get(optimizer, set())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.autograd.graph.increment_version([p for p in parameters if id(p) in to_note and p.grad is not None])

    return register_optimizer_step_post_hook(note)
