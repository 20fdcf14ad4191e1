"""Predict the memory of a training step for callbacks of trainers, and say it on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

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

Example = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named inputs of a step


def predict_step(
    model: nn.Module,
    optimizer: Any,
    example: Example,
    passes: int,
    clip_norm: float | None,
    forward: Callable[..., Any] = nn.Module.__call__,
) -> Timeline | None:
    """Predict and print the memory of two training steps, each of ``passes`` batches; None if that is not possible.

    ``forward`` is called with a copy of the model and the inputs, and returns the loss or what has it.
    """
    try:
        # A second pass adds to gradients, as all further ones.
        predicted = _step_memory(model, optimizer, example, min(2, passes), clip_norm, forward)
        note(_in_words(model, predicted))
    except BrimError as error:
        note_unpredicted(error.reason or error.request)
        return None
    except Exception as error:  # the model's own code may raise anything for tensors without values
        note_unpredicted(f"{type(error).__name__}: {first_line(error)}")
        return None
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return predicted


def note_measured(predicted: Timeline | None) -> None:
    """Print the peaks that PyTorch has measured since the prediction, and those predicted."""
    if predicted is None or not torch.cuda.is_initialized():
        return
    peaks = predicted.peak_bytes
    measured = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    parts = (
        f"{format_bytes(count)} {name} (predicted: {format_bytes(getattr(peaks, name))})"
        for name, count in measured.items()
    )
    note(f"the training's peak on the GPU: {', '.join(parts)}")


def note_explained(error: BaseException) -> None:
    """Print the explanation of ``brim explain`` if memory ran out."""
    from brim.cli.explain.answers import explain

    if is_out_of_memory(error):
        with contextlib.suppress(BrimError):  # a MemoryError has no message
            for line in explain(error).lines:
                note(line)


def note(text: str) -> None:
    tqdm.write(f"brim: {printable(text)}", file=sys.stderr)  # above the training's progress bar


def note_unpredicted(reason: str) -> None:
    note(f"the memory of a step is not predicted: {reason.rstrip('.')}")


def _step_memory(
    model: nn.Module,
    optimizer: Any,
    example: Example,
    passes: int,
    clip_norm: float | None,
    forward: Callable[..., Any],
) -> Timeline:
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
                loss_of(forward(copy, *positional, **by_name)).backward()
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
