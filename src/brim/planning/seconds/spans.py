"""Record COMPUTE events of the model and of each of its blocks in a run's Timeline.

On an accelerator the device's clock is read, through events between its kernels; elsewhere the host's. A wait within
a span has an IDLE event of its own (``Recorder.waited``), so a span is not all work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from brim.accelerator import Accelerator, is_capturing, of
from brim.memory.recorder import Recorder
from brim.memory.tiers import Memory

WHOLE, BLOCKS = 0, 1  # the lanes (streams) of the model as a whole, and of its blocks
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
MOST_SPANS = 50_000  # 3.5 MB; then recording stops and takes no more time
_MOST_PENDING = 4_096  # marks whose time the device has not reported yet


class _Clock(Protocol):
    """A clock that marks moments. ``is_over``: ``seconds`` since the recorder's start are known."""

    def mark(self) -> Any: ...
    def is_over(self, mark: Any) -> bool: ...
    def seconds(self, mark: Any) -> float: ...
    def settle(self) -> None: ...


class _HostClock:
    """The host's clock: every moment is known at once."""

    def __init__(self, recorder: Recorder) -> None:
        self.mark = recorder.now_s

    def is_over(self, mark: float) -> bool:
        return True

    def seconds(self, mark: float) -> float:
        return mark

    def settle(self) -> None:
        """Do nothing: nothing is pending."""


class _EventClock:
    """The device's clock: events of the current stream, relative to one whose host time is known."""

    def __init__(self, recorder: Recorder, on: Accelerator) -> None:
        self._on = on
        on.synchronize()
        self._origin = self.mark()
        on.synchronize()
        self._origin_s = recorder.now_s()

    def mark(self) -> Any:
        event = self._on.new_event(timed=True)
        event.record(self._on.current_stream())
        return event

    def is_over(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, mark: Any) -> float:
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1e3

    def settle(self) -> None:
        self._on.synchronize()


class ComputeSpans:
    """A context that records spans: ``forward``, ``backward``, ``update``, and the blocks' forward passes.

    ``blocks`` are paths of modules, or several joined by ``+``.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[str],
        memory: Memory,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._recorder, self._tier = memory.recorder, memory.compute.tier
        self._at_once = memory.device.type == "cpu"
        self._clock: _Clock = (
            _HostClock(memory.recorder) if self._at_once else _EventClock(memory.recorder, of(memory.device))
        )
        self._pending: deque[tuple[Any, Any, str, int]] = deque()
        self._left = MOST_SPANS
        self._hooks: list[RemovableHandle] = []
        modules = dict(model.named_modules())
        for path in dict.fromkeys(part for name in blocks for part in name.split("+")):
            if path and path in modules:
                self._watch(modules[path], path, BLOCKS)
        self._watch(model, FORWARD, WHOLE, self._await_backward)
        if optimizer is not None:
            self._watch_updates(optimizer)

    def _watch(self, module: nn.Module, label: str, lane: int, then: Callable[[Any], None] | None = None) -> None:
        begins: list[Any] = []

        def begin(module: nn.Module, args: object) -> None:
            # Replaces the mark of a call that raised. A graph's replays call no hook.
            begins[:] = [] if is_capturing() else [self._clock.mark()]

        def end(module: nn.Module, args: object, output: Any) -> None:
            if begins:
                self._span(begins.pop(), label, lane)
            if then is not None:
                then(output)
            if self._left <= 0:  # not in an optimizer's hook: torch iterates over those without a copy
                self._unhook()

        self._hooks.append(module.register_forward_pre_hook(begin))
        self._hooks.append(module.register_forward_hook(end))

    def _await_backward(self, output: Any) -> None:
        """Span the backward pass from the loss's gradient to the end of autograd."""
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        begin = self._clock.mark()
        engine = torch.autograd.Variable._execution_engine  # as DDP and FSDP do
        engine.queue_callback(lambda: self._span(begin, BACKWARD, WHOLE))

    def _watch_updates(self, optimizer: torch.optim.Optimizer) -> None:
        begins: list[Any] = []

        def begin(*_: object) -> None:
            begins[:] = [self._clock.mark()]

        def end(*_: object) -> None:
            if begins:
                self._span(begins.pop(), UPDATE, WHOLE)

        self._hooks.append(optimizer.register_step_pre_hook(begin))
        self._hooks.append(optimizer.register_step_post_hook(end))

    def _span(self, begin: Any, label: str, lane: int) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        now = self._clock.mark()
        if self._at_once:
            self._recorder.computed(self._tier, begin, now - begin, label, lane)
        else:
            self._pending.append((begin, now, label, lane))
            if len(self._pending) > _MOST_PENDING:
                self._write()

    def _write(self) -> None:
        while self._pending and self._clock.is_over(self._pending[0][1]):
            begin, end, label, lane = self._pending.popleft()
            begin_s = self._clock.seconds(begin)
            self._recorder.computed(self._tier, begin_s, self._clock.seconds(end) - begin_s, label, lane)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Remove the hooks and write pending spans. A second call does nothing."""
        self._unhook()
        if self._pending:
            self._clock.settle()
            self._write()

    def __enter__(self) -> ComputeSpans:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
