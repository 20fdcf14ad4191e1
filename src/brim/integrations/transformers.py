"""A callback of transformers' Trainer, and so of TRL's trainers, that predicts the memory of a step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from brim.core import Timeline
from brim.errors import BrimError, UnsupportedError, first_line, is_out_of_memory
from brim.estimation.simulation import simulate
from brim.model_inputs import map_tensors
from brim.planning.inference.example_shapes import on_host, without_values
from brim.planning.strategy.step import loss_of
from brim.predict.tracer import trace
from brim.printable import printable
from brim.report.explain import summary
from brim.run.script.isolation import unseen
from brim.run.script.needs import moves_itself
from brim.techniques.base import refuse_special_tensors
from brim.techniques.meta_copy import meta_copy, meta_copy_optimizer
from brim.units import format_bytes

_MOST_PARTS = 3  # of a step's memory, in a line

Example = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named inputs of a model


class BrimCallback(TrainerCallback):
    """Predict the memory of a training step before the first step, and explain the error if memory runs out.

    ``Trainer(..., callbacks=[BrimCallback()])`` writes a line to stderr before the first step: the peak of a step
    with the model, optimizer and batch of this training. On a GPU it writes another one after the training: the peak
    that PyTorch measured. If the program ends because memory ran out, the explanation of ``brim explain`` follows the
    traceback. A step that cannot be predicted is trained all the same.

    Attributes:
        predicted: The predicted memory of two steps; None before the first step, and if it cannot be predicted.
    """

    def __init__(self) -> None:
        self.predicted: Timeline | None = None
        self._hook: Any = None
        self._hook_before: Callable[..., Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the first batch: a loader that is asked for one more would give other batches to the training."""
        self._stop()
        self.predicted = None
        self._hook_before, sys.excepthook = sys.excepthook, self._on_exception
        if not state.is_world_process_zero:
            return
        model, optimizer = kwargs["model"], kwargs["optimizer"]

        def before_call(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if model.training and torch.is_grad_enabled():  # an evaluation may come first
                self._hook.remove()
                self._predict(args, model, optimizer, (inputs, named))

        if args.torch_compile or args.n_gpu > 1:
            _note_unpredicted("torch.compile and DataParallel call parts of the model")
        else:
            self._hook = model.register_forward_pre_hook(before_call, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()
        if self.predicted is not None and torch.cuda.is_initialized():
            peaks = self.predicted.peak_bytes
            measured = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            parts = (
                f"{format_bytes(count)} {name} (predicted: {format_bytes(getattr(peaks, name))})"
                for name, count in measured.items()
            )
            _note(f"the training's peak on the GPU: {', '.join(parts)}")

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._hook_before is not None and sys.excepthook == self._on_exception:
            sys.excepthook = self._hook_before
        self._hook = self._hook_before = None

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from brim.cli.explain.answers import explain

        assert self._hook_before is not None
        self._hook_before(kind, error, trace)
        if is_out_of_memory(error):
            with contextlib.suppress(BrimError):  # a MemoryError has no message
                for line in explain(error).lines:
                    _note(line)

    def _predict(self, args: TrainingArguments, model: nn.Module, optimizer: Any, example: Example) -> None:
        try:
            passes = min(2, args.gradient_accumulation_steps)  # a second one adds to gradients, as all further ones
            self.predicted = step_memory(model, optimizer, example, passes, args.max_grad_norm)
            _note(_in_words(model, self.predicted))
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
        except BrimError as error:
            _note_unpredicted(error.reason or error.request)
        except Exception as error:  # the model's own code may raise anything for tensors without values
            _note_unpredicted(f"{type(error).__name__}: {first_line(error)}")


def _note(text: str) -> None:
    tqdm.write(f"brim: {printable(text)}", file=sys.stderr)  # above the training's progress bar


def _note_unpredicted(reason: str) -> None:
    _note(f"the memory of a step is not predicted: {reason.rstrip('.')}")


def step_memory(model: nn.Module, optimizer: Any, example: Example, passes: int, clip_norm: float | None) -> Timeline:
    """Predict the memory of two training steps of a copy of ``model`` without values, each of ``passes`` batches.

    Raises UnsupportedError, and whatever the model's own code raises.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    if not isinstance(optimizer, torch.optim.Optimizer) or moves_itself(model):
        raise UnsupportedError("Cannot predict the step.", "The model or its optimizer moves weights itself.")
    refuse_special_tensors(model)
    example = on_host(example)
    device = torch.device(next(model.parameters()).device.type)

    def build() -> Callable[[], None]:
        copy = meta_copy(model, absent=(), device=device).train()
        copied = meta_copy_optimizer(copy, model, optimizer)
        positional, by_name = map_tensors(without_values(example), lambda value: value.to(device))

        def step() -> None:
            for _ in range(passes):
                loss_of(copy(*positional, **by_name)).backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(copy.parameters(), clip_norm)
            copied.step()
            copied.zero_grad()

        return step

    on_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability() if on_cuda else (8, 0)
    with unseen(model):
        return simulate(trace(build, steps=2, target="cuda" if on_cuda else "cpu", capability=capability))


def _in_words(model: nn.Module, timeline: Timeline) -> str:
    """Return a sentence about the peak and its largest parts."""
    peaks = timeline.peak_bytes
    shares = summary(timeline).by_category[:_MOST_PARTS]
    parts = ", ".join(f"{format_bytes(share.bytes)} {share.name.replace('_', ' ')}" for share in shares)
    takes = f"a step of {type(model).__name__} takes {format_bytes(peaks.allocated)} (predicted): {parts}"
    if not torch.cuda.is_initialized():
        return f"{takes}; tensors in RAM"
    total = torch.cuda.get_device_properties().total_memory
    fits = "fits" if peaks.process <= total else "does not fit"
    return f"{takes}; {format_bytes(peaks.reserved)} reserved, which {fits} in the {format_bytes(total)} of the GPU"
