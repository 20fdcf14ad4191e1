"""A callback of transformers' Trainer, and so of TRL's trainers, that predicts the memory of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from brim.core import Timeline
from brim.integrations.training_step import note_explained, note_measured, note_unpredicted, predict_step


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
                passes = args.gradient_accumulation_steps
                self.predicted = predict_step(model, optimizer, (inputs, named), passes, args.max_grad_norm)

        if args.torch_compile or args.n_gpu > 1:
            note_unpredicted("torch.compile and DataParallel call parts of the model")
        else:
            self._hook = model.register_forward_pre_hook(before_call, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()
        note_measured(self.predicted)

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._hook_before is not None and sys.excepthook == self._on_exception:
            sys.excepthook = self._hook_before
        self._hook = self._hook_before = None

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        assert self._hook_before is not None
        self._hook_before(kind, error, trace)
        note_explained(error)
