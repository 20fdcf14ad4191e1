"""The models of a diffusers pipeline as one module, and their calls, recorded on fake tensors."""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from brim.errors import UnsupportedError, UsageError
from brim.model_inputs import map_tensors, tensors_in
from brim.planning.inference.example_shapes import keeps_values
from brim.techniques.dry_run import dry_run, not_predictable

_MOST_REPEATS = 4  # of a call: two steps with and without the prompt, as the second finds the first's results
_METHODS = ("forward", "encode", "decode")  # that a pipeline calls; an autoencoder's second and third


class PipelineModels(nn.Module):
    """The models of a diffusers pipeline by their names in it, as one module: one plan serves all of them.

    They run one after another; a forward pass takes what ``recorded`` returns.
    """

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        self.__class__ = type(type(pipe).__name__, (PipelineModels,), {})  # the name that plans and errors give
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and part not in self.children():
                self.add_module(name, part)

    def forward(self, like: torch.Tensor, *events: Any) -> list[torch.Tensor]:
        """Repeat a recorded call on the device of ``like``; return the tensors that are left at its end."""
        live: dict[int, torch.Tensor] = {}
        for event in events:
            if isinstance(event, _Call):
                method = getattr(
                    self.get_submodule(event.model), "__call__" if event.method == "forward" else event.method
                )
                args, kwargs = tree_map_only(_View, lambda view: view.of(live), event.arguments)
                live.update(zip(event.outputs, tensors_in(method(*args, **kwargs)), strict=True))
                del args, kwargs
            elif isinstance(event, int):
                del live[event]
            else:
                number, size = event
                live[number] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return list(live.values())

    def recorded(self, pipe: Any, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, float]]:
        """Call ``pipe`` with the models on fake tensors, which return zeros.

        Returns what ``forward`` takes: the models' calls, at most four of the same shapes, and between them memory
        that the pipeline itself creates (a number and bytes) and frees (the number); and by the models' names how
        often they are called, as a share of the most called one's calls. Raises UnsupportedError where a model needs
        values.
        """
        recording = _Recording()
        with ExitStack() as stack, torch.no_grad():
            for name, part in self.named_children():
                for method in _METHODS:
                    if hasattr(part, method):
                        wrapped = recording.wrap(name, part, method, getattr(part, method))
                        stack.enter_context(mock.patch.object(part, method, wrapped))
            try:
                with recording:
                    result = pipe(**arguments)
                    events = tuple(recording.events)
                    del result
            except (RuntimeError, UnsupportedError) as error:  # fake kernels raise RuntimeError and subclasses
                raise not_predictable(f"a call of {type(pipe).__name__}", error) from error
        most = max(recording.counts.values(), default=1)
        return (torch.zeros(()), *events), {name: count / most for name, count in recording.counts.items()}


@dataclass(frozen=True)
class _View:
    """A tensor in recorded memory."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, live: Mapping[int, torch.Tensor]) -> torch.Tensor:
        memory = live[self.number]
        if memory.dtype != self.dtype:
            memory = memory.view(self.dtype)
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Call:
    """A call of a model; ``outputs`` are the numbers of its results."""

    model: str
    method: str
    arguments: Any
    outputs: Sequence[int]


class _Recording(TorchDispatchMode):
    """The calls of models, four of each shape, and the memory of the pipeline's own tensors between them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Any] = []
        self.counts: Counter[str] = Counter()
        self._numbers: dict[int, tuple[int, Any]] = {}  # by storage
        self._next_number = itertools.count()
        self._outputs: dict[Any, Any] = {}
        self._repeats: Counter[Any] = Counter()
        self._is_inside = False  # a model's method may call another one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside:
            for tensor in tensors_in(result):
                self._number(tensor)
        return result

    def _number(self, tensor: torch.Tensor, *, is_created: bool = True) -> int:
        """Return the number of a tensor's memory; ``is_created``: it is an event of its own where it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            number = next(self._next_number)

            def freed(_: Any) -> None:
                self._numbers.pop(key)
                self.events.append(number)

            self._numbers[key] = number, weakref.ref(storage, freed)
            if is_created:
                self.events.append((number, storage.nbytes()))
        return self._numbers[key][0]

    def _argument(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        if keeps_values(tensor):
            return tensor.clone()
        return _View(
            self._number(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def wrap(self, name: str, part: nn.Module, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that replaces ``original``: it records the call and returns zeros."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            self.counts[name] += 1
            shapes = [tuple(tensor.shape) for tensor in tensors_in(args, kwargs)]
            key = (name, method, *shapes)
            self._repeats[key] += 1
            runs = self._repeats[key] <= _MOST_REPEATS
            self._is_inside = True
            try:
                if runs:
                    arguments = tree_map_only(torch.Tensor, self._argument, (args, kwargs))
                if key not in self._outputs:
                    with dry_run(part, [args, kwargs]) as (fake_args, fake_kwargs):
                        output = original(*fake_args, **fake_kwargs)
                    self._outputs[key] = map_tensors(
                        output, lambda fake: torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
                    )
                output = map_tensors(self._outputs[key], torch.clone)
            finally:
                self._is_inside = False
            numbers = [self._number(tensor, is_created=not runs) for tensor in tensors_in(output)]
            if runs:
                self.events.append(_Call(name, method, arguments, numbers))
            return output

        return call


def is_pipeline(model: object) -> bool:
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(model, diffusers.DiffusionPipeline)


def pipeline_arguments(pipe: Any, example: Any) -> dict[str, Any]:
    """Return the arguments of the call to plan for. Raises UsageError where they are not named."""
    if example is None and "prompt" in inspect.signature(pipe.__call__).parameters:
        return {"prompt": ""}
    if not isinstance(example, Mapping):
        raise UsageError(
            f"Cannot use example={example!r} for {type(pipe).__name__}.",
            "It must be a dictionary of the arguments of the pipeline's call.",
            "For instance example={'prompt': 'a lake', 'height': 1024, 'width': 1024}.",
        )
    return dict(example)
