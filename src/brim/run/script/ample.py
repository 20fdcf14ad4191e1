"""Bounds for models that certainly fit: a program with an ample budget runs without a prediction of its step.

A prediction imports the planner and traces a full step. For a model that is small beside its budget, a forward pass
of a copy without values is enough. The bound counts everything that an operation reads or writes as if it were never
freed: the backward pass of an operation allocates no more than gradients of its inputs. ``_ROOM`` times the bound
must fit, which leaves room for workspaces of kernels and a loss outside of the model.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brim.core.hardware import RAM, VRAM
from brim.errors import UnsupportedError
from brim.measure.capacity import (
    FREE_SHARE,
    amount_bytes,
    free_bytes,
    memory_fraction,
    ram_capacity_bytes,
    ram_room_bytes,
)
from brim.model_inputs import map_tensors, tensors_in
from brim.planning.inference.example_shapes import as_shapes
from brim.run.script.hooks import Call, parameter_bytes
from brim.run.script.isolation import example_of, unseen, without_dynamo
from brim.run.script.needs import living_optimizers, moves_itself, optimizers_of, plain
from brim.run.script.outcome import UNTOUCHED, Outcome
from brim.run.script.settings import Settings

_as_strided = torch.ops.aten.as_strided.default
_META = torch.device("meta")
_ROOM = 8
_DEVICE_BYTES = 256 << 20  # PyTorch's smallest segments on a GPU, and workspaces of libraries
_LARGEST_STATES = 60  # times ``_STATES``: L-BFGS has two hundred states of a parameter
_STATES = 3  # per parameter, the most of PyTorch's optimizers but L-BFGS (Adam with ``amsgrad``)


class Ample:
    """Upper bounds for the models of a program, as long as all of them together certainly fit.

    ``outcomes``: of the models that fit; their bytes are upper bounds, not predictions.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limit_bytes, self._tier = -1, RAM  # not known yet
        self._negligible: set[tuple[Any, ...]] = set()
        self.outcomes: list[Outcome] = []

    def is_negligible(self, call: Call, least_bytes: int) -> bool:
        """True if a call certainly takes less than ``least_bytes``, whichever optimizer trains the model.

        The answer is reused for models of the same class and shapes that are called with the same shapes.
        """
        model = plain(call.model)
        if plain(call.called) is not model or not _is_plain(model, ()):
            return False
        alike = (type(model), *((t.shape, t.dtype) for t in (*_tensors(model), *tensors_in(call.args, call.kwargs))))
        if alike in self._negligible:
            return True
        most = _held_bytes(model, _LARGEST_STATES)
        if most > least_bytes:
            return False
        moved = _moved_bytes_of(model, call)
        if moved is None or most + moved > least_bytes:
            return False
        self._negligible.add(alike)
        return True

    def outcome(self, call: Call) -> Outcome | None:
        """The outcome for a model that certainly fits; None where a prediction is needed."""
        model = plain(call.model)
        optimizers = optimizers_of(model, living_optimizers(call))
        if not self._begin(call, optimizers):
            return None
        room = self._limit_bytes // _ROOM - sum(earlier.untouched_bytes[self._tier] for earlier in self.outcomes)
        most = _held_bytes(model, len(optimizers) if _trains(model, optimizers) else 0)
        if most > room:
            return None  # decided without a forward pass: the case of most models that get a plan
        moved = _moved_bytes_of(model, call)
        if moved is None or most + moved > room:
            return None
        example = example_of(model, call)
        return self._record(model, optimizers, example, most + moved)

    def _begin(self, call: Call, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Begin with a call; False if the memory of the called module cannot be bounded."""
        model = plain(call.model)
        if plain(call.called) is not model or not _is_plain(model, optimizers):
            return False
        self.outcomes = [
            outcome for outcome in self.outcomes if outcome.model is not None and outcome.model() not in (None, model)
        ]
        if self._limit_bytes < 0:
            self._limit_bytes, self._tier = _limit(self._settings)
        return True

    def _record(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], example: Any, most_bytes: int
    ) -> Outcome:
        outcome = Outcome(
            name=type(model).__name__,
            task="train" if _trains(model, optimizers) else "forward",
            choice=UNTOUCHED,
            parameter_bytes=parameter_bytes(model),
            budget_bytes={self._tier: self._limit_bytes},
            untouched_bytes={self._tier: most_bytes},
            model=weakref.ref(model),
            has_optimizer=bool(optimizers),
            example=as_shapes(example, torch.empty, device="meta"),
        )
        self.outcomes.append(outcome)
        return outcome


def _trains(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    return bool(optimizers) or (torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()))


def _limit(settings: Settings) -> tuple[int, str]:
    """(smallest budget, compute tier); the budget is 0 if one of them is more than this machine has."""
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    tier = VRAM if on_gpu else RAM
    amounts = {RAM: settings.ram, VRAM: settings.vram}
    budget_bytes = {
        name: amount_bytes(amount, name if on_gpu else RAM) for name, amount in amounts.items() if amount is not None
    }
    capacity = {RAM: ram_capacity_bytes()}
    if on_gpu:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        capacity[VRAM] = int(total * memory_fraction())
    if any(count > capacity.get(name, capacity[RAM]) for name, count in budget_bytes.items()):
        return 0, tier
    if budget_bytes.get(RAM, 0) > ram_room_bytes():  # the room may exclude RAM that the model has: needs a prediction
        return 0, tier
    if settings.device == "cuda" and not on_gpu:
        return 0, tier
    free = [int(free_bytes(name) * FREE_SHARE) for name in capacity if name not in budget_bytes]
    smallest = min([*budget_bytes.values(), *free, *capacity.values()])
    return max(0, smallest - _DEVICE_BYTES) if on_gpu else smallest, tier


def _is_plain(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """True if memory of model and optimizers can be bounded, and the model can be copied without its values."""
    if moves_itself(model) or any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        return False
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.LBFGS):
            return False
        if any(id(p) not in parameter_ids for group in optimizer.param_groups for p in group["params"]):
            return False
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in _tensors(model)):
        return False
    return not any(isinstance(value, torch.Tensor) for part in model.modules() for value in vars(part).values())


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _held_bytes(model: nn.Module, optimizers: int) -> int:
    """Bytes of weights, gradients, optimizer states and temporaries of an update, in the second step."""
    trained = _bytes([p for p in model.parameters() if p.requires_grad])
    return _bytes(_tensors(model)) + trained * (1 + (_STATES + 1) * optimizers)


def _moved_bytes_of(model: nn.Module, call: Call) -> int | None:
    """Bytes that the operations of a call read and write. None where it cannot be run without values."""
    try:
        example = example_of(model, call)
    except UnsupportedError:
        return None
    return None if example is None else _moved_bytes(model, example)


def _moved_bytes(model: nn.Module, example: Mapping[str, Any] | Sequence[Any]) -> int | None:
    """Bytes that the operations of a forward pass read and write. None where it cannot be run without values."""
    counting = _Counting()  # type: ignore[no-untyped-call]
    try:
        with unseen(model), without_dynamo(), _META:
            twin = copy.deepcopy(model, {id(tensor): _hollow(tensor) for tensor in _tensors(model)})
            inputs = map_tensors(example, _hollow)
            with counting:
                twin(**inputs) if isinstance(inputs, Mapping) else twin(*inputs)
    except Exception:  # the model's own code may raise anything for tensors without values
        return None
    return counting.bytes


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` without values."""
    hollow = torch.empty_like(tensor, device=_META)
    return nn.Parameter(hollow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Counting(TorchDispatchMode):
    """Counts bytes read and written by every operation. Tensors for other devices get no values either."""

    bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch's wrapper around each call would import Dynamo, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        read = tensors_in(args, kwargs)
        if not all(tensor.is_meta for tensor in read):
            raise RuntimeError(
                "An operation uses one of the program's own tensors, which this trial must not change."
            )
        result = func(*args, **kwargs)
        is_view = func.is_view and func is not _as_strided and isinstance(result, torch.Tensor)
        if is_view and result.numel() == read[0].numel():
            return result  # a view of all elements allocates nothing, in the backward pass neither
        self.bytes += _bytes(read) + _bytes(tensors_in(result))
        return result
