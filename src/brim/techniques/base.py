"""What every technique has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from brim.errors import UnsupportedError, UsageError

HANDLE_ATTRIBUTE = "brim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One thing that a technique could do to one block ("" is the whole model): a column for the planner.

    ``saves_bytes`` is by tier, at the peak of a step; negative where it takes some. ``compute_s`` is what it adds to
    the step's compute, ``moves_bytes`` what it sends over each link, (source, target) -> bytes a step.
    """

    technique: str
    block: str
    choice: str
    saves_bytes: Mapping[str, int] = field(default_factory=dict)
    compute_s: float = 0.0
    moves_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    lossless: bool = True


class Handle(Protocol):
    """A technique in force on a module."""

    def remove(self) -> None:
        """Give the module back exactly as it was. A second call does nothing."""


def refuse_second(model: nn.Module) -> None:
    """Raise UsageError when ``model``, or any part of it, is fitted already."""
    for path, module in model.named_modules():
        if HANDLE_ATTRIBUTE in vars(module):
            where = f"its part {path!r}" if path else "it"
            raise UsageError(
                f"Cannot fit {type(model).__name__}.",
                f"{where} is fitted already.".capitalize(),
                "Call .brim.remove() on that module first.",
            )


# A parameter class with one of these of its own is more than its bytes: moved as those, it would lose the rest.
_OWN_WAYS = ("__torch_function__", "__torch_dispatch__", "to", "cuda", "cpu")
_LOAD_PLAIN = (
    "Give the model in float32, bfloat16 or float16; brim.load(folder, quantization='int8') (int4, fp8) quantizes it."
)


def refuse_special_tensors(model: nn.Module) -> None:
    """Raise UnsupportedError when the bytes of a parameter are not its values: others' quantized or sharded classes,
    sparse ones, and those without values or shape."""
    for name, parameter in model.named_parameters():
        special = _special(model, parameter)
        if special is not None:
            reason, todo = special
            raise UnsupportedError(f"Cannot fit {type(model).__name__}.", f"{name!r} {reason}", todo)


def _special(model: nn.Module, parameter: nn.Parameter) -> tuple[str, str] | None:
    """What a parameter is, and what to do; None for an ordinary one."""
    kind = type(parameter)
    if is_lazy(parameter):
        return "has no shape yet.", "Call the model once."
    if kind not in (nn.Parameter, FakeTensor) and any(_has_own(kind, way) for way in _OWN_WAYS):
        package = kind.__module__.partition(".")[0]
        if kind.__name__ == "DTensor":
            return "is sharded over ranks (DTensor).", "Fit the model before it is sharded."
        return f"is a {kind.__name__} of {package}: brim moves bytes and would not move its other data.", (
            _LOAD_PLAIN
        )
    if parameter.is_inference():
        return "was made in inference mode: nothing may change it outside of that.", "Make it under torch.no_grad()."
    if parameter.layout != torch.strided:
        return f"is sparse ({parameter.layout}).".replace("torch.", ""), "Make it dense (to_dense()), or a buffer."
    if parameter.is_meta:
        if any(hasattr(module, "_hf_hook") for module in model.modules()):
            return "is on the meta device: accelerate keeps its values elsewhere and loads them itself.", (
                "Load the model without device_map and offloading: brim.load(folder) respects a budget."
            )
        return "is on the meta device: it has no values.", (
            "Load them first (to_empty and load_state_dict), or use brim.load(folder)."
        )
    return None


def _has_own(kind: type, way: str) -> bool:
    return getattr(kind, way, None) is not getattr(nn.Parameter, way, None)
