"""Refuse to save a model that has diverged: its values are not finite numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

from brim.errors import ModelError
from brim.run.checkpoint import reading as checkpoint_reading
from brim.run.train.report import StepReport
from brim.techniques.blocks import inner_tensors

_FLOAT8_PIECE = 1 << 20  # elements converted at once: aminmax does not support 8-bit floats


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all values are finite numbers. It reads them once and allocates nothing for it.

    Of a tensor that is split over ranks it checks this rank's part.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):  # also codes and scales of 8 bits
        return all(map(is_finite, inner_tensors(tensor)))
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:
        return all(is_finite(piece.float()) for piece in tensor.reshape(-1).split(_FLOAT8_PIECE))
    least, most = torch.aminmax(tensor)  # NaN if any value is NaN
    return math.isfinite(least.item()) and math.isfinite(most.item())


def finite(
    values: Iterable[tuple[str, torch.Tensor]], names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass ``values`` on; raise ModelError at the first of ``names`` (None: any) that is not finite."""
    for name, value in values:
        if (names is None or name in names) and not is_finite(value):
            raise diverged(name)
        yield name, value


def diverged(name: str) -> ModelError:
    """The error of a training whose weights or optimizer states are not finite."""
    return ModelError(
        "Cannot save the model in its present state.",
        f"{name} has values that are not finite: the training has diverged. Earlier checkpoints are unchanged.",
        "Lower --lr or set --clip-norm 1.0; --resume --change-settings continues from the last checkpoint. "
        "--allow-non-finite saves the model anyway.",
    )


def check_loss(report: StepReport, output: Path) -> None:
    """Raise ModelError for a loss that is not a finite number. Nothing of that step has been saved."""
    if not math.isfinite(report.loss):
        raise _spoilt(report.step, f"Its loss is {report.loss}.", output)


@contextlib.contextmanager
def explain_overflow(step: int, output: Path) -> Iterator[None]:
    """Explain PyTorch's error for an update's factor, of a non-fused optimizer, that overflows the tensors' type."""
    try:
        yield
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        raise _spoilt(step, "A factor of its update is too large for the dtype of the weights.", output) from error


def _spoilt(step: int, problem: str, output: Path) -> ModelError:
    saved = checkpoint_reading.steps(output)
    goes_on = "No checkpoint has been saved yet (--save-every)."
    if saved:
        goes_on = (
            f"--resume continues from step {saved[-1]} (with --change-settings under another rate); if its weights "
            "are already damaged, delete that checkpoint."
        )
    return ModelError(
        f"Cannot train step {step}.",
        problem,
        f"Lower --lr, set --clip-norm 1.0, or check the data of that step. {goes_on}",
    )
