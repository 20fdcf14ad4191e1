"""Types that techniques share, replacements of ``forward``, and the models that techniques refuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from brim.errors import UnsupportedError, UsageError

HANDLE_ATTRIBUTE = "brim"


@contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Let autocast cache the casts of weights within only if it did before and ``enabled`` is set."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A choice of a technique for a block ("" is the model): a column for the planner.

    ``saves_bytes`` is at the peak of a step, in the compute tier; ``compute_s`` is added to the step's compute.
    """

    block: str
    choice: str
    saves_bytes: int
    compute_s: float


class Handle(Protocol):
    """A technique in force on a module."""

    def remove(self) -> None:
        """Give the module back exactly as it was. A second call does nothing."""


def refuse_second(model: nn.Module) -> None:
    """Raise UsageError if ``model``, or any part of it, is fitted already."""
    for path, module in model.named_modules():
        if HANDLE_ATTRIBUTE in vars(module):
            where = f"its part {path!r}" if path else "it"
            raise UsageError(
                f"Cannot fit {type(model).__name__}.",
                f"{where} is fitted already.".capitalize(),
                "Call .brim.remove() on that module first.",
            )


def refuse_gradients(tensors: Iterable[object], *problem: str) -> None:
    """Raise UnsupportedError with the texts of ``problem`` if any of ``tensors`` needs a gradient."""
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise UnsupportedError(*problem)


# A parameter class that defines one of these has further data, which moving its bytes would lose.
_OVERRIDES = ("__torch_function__", "__torch_dispatch__", "to", "cuda", "cpu")
_LOAD_PLAIN = (
    "Give the model in float32, bfloat16 or float16; brim.load(folder, quantization='int8') (or 'int4') quantizes it."
)


def refuse_special_tensors(model: nn.Module) -> None:
    """Raise UnsupportedError for parameters whose bytes are not their values: quantized or sharded classes of other
    libraries, sparse tensors, and those without values or shape."""
    for name, parameter in model.named_parameters():
        special = _special(model, parameter)
        if special is not None:
            reason, todo = special
            raise UnsupportedError(f"Cannot fit {type(model).__name__}.", f"{name!r} {reason}", todo)


def _special(model: nn.Module, parameter: nn.Parameter) -> tuple[str, str] | None:
    """The reason why a parameter is refused, and what to do; None for an ordinary one."""
    kind = type(parameter)
    if is_lazy(parameter):
        return "has no shape yet.", "Call the model once."
    if kind not in (nn.Parameter, FakeTensor) and any(
        getattr(kind, name, None) is not getattr(nn.Parameter, name, None) for name in _OVERRIDES
    ):
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


class StandIn:
    """A replacement for the ``forward`` of a module's instance, inside of the module's hooks.

    ``_before`` is an earlier replacement, or None for the ``forward`` of the class.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, vars(module).get("forward")
        self._active = True
        vars(module)["forward"] = self

    def remove(self) -> None:
        """Restore ``forward``; below a replacement of another technique only pass calls on until that is removed."""
        self._active = False
        while isinstance(top := vars(self._module).get("forward"), StandIn) and not top._active:
            if top._before is None:
                del vars(self._module)["forward"]
            else:
                vars(self._module)["forward"] = top._before

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def in_force(module: nn.Module) -> Iterator[StandIn]:
    """The active replacements of ``module``, outermost first."""
    stand_in = vars(module).get("forward")
    while isinstance(stand_in, StandIn):
        if stand_in._active:
            yield stand_in
        stand_in = stand_in._before
