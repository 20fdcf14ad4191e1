"""Models that certainly fit: a program whose budget is ample is left alone without predicting its step.

A prediction imports what plans and traces a whole step. For a model that is small beside its budget, a forward pass
of a copy without values is enough, counted as if nothing that an operation reads or writes were ever freed: an
operation's backward makes no more than gradients of what it read. That many times ``_ROOM`` must have room, so that
kernels may take space of their own and a loss outside of the model as well.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brim.core.hardware import RAM, VRAM
from brim.errors import UnsupportedError
from brim.measure.capacity import amount_bytes, free_bytes, memory_fraction, ram_capacity_bytes, ram_room_bytes
from brim.model_inputs import map_tensors
from brim.planning.inference.example_shapes import as_shapes
from brim.run.script.hooks import Call, parameter_bytes
from brim.run.script.isolation import example_of, unseen, without_dynamo
from brim.run.script.needs import living_optimizers, moves_itself, optimizers_of, plain
from brim.run.script.outcome import UNTOUCHED, Outcome
from brim.run.script.settings import Settings

_as_strided = torch.ops.aten.as_strided.default
_META = torch.device("meta")
_ROOM = 8
_FREE_SHARE = 0.9
_DEVICE_BYTES = 256 << 20  # PyTorch's smallest segments on a GPU, and workspaces of libraries
_LARGEST_STATES = 60  # times those of ``_STATES``: L-BFGS keeps two hundred
_STATES = 3  # of a parameter in any of PyTorch's optimizers but L-BFGS (Adam with ``amsgrad`` has three)


class Ample:
    """Tells that models fit, as long as all of them together certainly do.

    ``outcomes``: of those models; their bytes are an upper bound, not a prediction.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limit_bytes, self._tier = -1, RAM  # not known yet
        self._negligible: set[tuple[Any, ...]] = set()
        self.outcomes: list[Outcome] = []

    def is_negligible(self, call: Call, least_bytes: int) -> bool:
        """Whether a call certainly takes less than ``least_bytes``, whatever trains the model.

        Of many models alike, called alike, one is looked at.
        """
        model = plain(call.model)
        if plain(call.called) is not model or not _is_plain(model, ()):
            return False
        alike = (type(model), *((t.shape, t.dtype) for t in (*_tensors(model), *_inputs(call))))
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
        """None where only a prediction can tell whether the model fits."""
        model = plain(call.model)
        optimizers = optimizers_of(model, living_optimizers(call))
        if not self._begin(call, optimizers):
            return None
        room = self._limit_bytes // _ROOM - sum(earlier.untouched_bytes[self._tier] for earlier in self.outcomes)
        most = _held_bytes(model, len(optimizers) if _trains(model, optimizers) else 0)
        if most > room:
            return None  # the case of most models that get a plan: nothing has been run yet
        moved = _moved_bytes_of(model, call)
        if moved is None or most + moved > room:
            return None
        example = example_of(model, call.args, call.kwargs)
        return self._record(model, optimizers, example, most + moved)

    def _begin(self, call: Call, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the needs of what is called can be bounded."""
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
    """The smallest budget, and the tier that computes; 0 where a budget is more than this machine has."""
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
    if budget_bytes.get(RAM, 0) > ram_room_bytes():  # it may be the model's already: the budget is looked at closely
        return 0, tier
    if settings.device == "cuda" and not on_gpu:
        return 0, tier
    free = [int(free_bytes(name) * _FREE_SHARE) for name in capacity if name not in budget_bytes]
    smallest = min([*budget_bytes.values(), *free, *capacity.values()])
    return max(0, smallest - _DEVICE_BYTES) if on_gpu else smallest, tier


def _is_plain(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether the needs of model and optimizers can be bounded, and the model can be copied without its values."""
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
    """Bytes held in the second step: values, gradients, optimizer states and the temporaries of an update."""
    trained = _bytes([p for p in model.parameters() if p.requires_grad])
    return _bytes(_tensors(model)) + trained * (1 + (_STATES + 1) * optimizers)


def _inputs(call: Call) -> list[torch.Tensor]:
    return [value for value in tree_leaves((call.args, call.kwargs)) if isinstance(value, torch.Tensor)]


def _moved_bytes_of(model: nn.Module, call: Call) -> int | None:
    """Bytes that the operations of a call read and write. None where it cannot be run without values."""
    try:
        example = example_of(model, call.args, call.kwargs)
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
    except Exception:  # whatever the model's own code raises for tensors without values
        return None
    return counting.bytes


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without values."""
    hollow = torch.empty_like(tensor, device=_META)
    return nn.Parameter(hollow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Counting(TorchDispatchMode):
    """Counts what every operation reads and writes. Tensors for other devices are made without values too."""

    bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch's wrapper around each call would import Dynamo, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if not all(tensor.is_meta for tensor in read):
            raise RuntimeError("An operation takes one of the program's own tensors, which must not be written to.")
        result = func(*args, **kwargs)
        whole = func.is_view and func is not _as_strided and isinstance(result, torch.Tensor)
        if whole and result.numel() == read[0].numel():
            return result  # a view of the whole tensor: nothing is allocated, not in the backward pass either
        self.bytes += _bytes(read) + _bytes(v for v in tree_leaves(result) if isinstance(v, torch.Tensor))
        return result
