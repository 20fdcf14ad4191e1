"""The models of a diffusers pipeline as one module, and their calls, recorded on fake tensors."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from brim.errors import UnsupportedError, UsageError
from brim.model_inputs import map_tensors
from brim.techniques.dry_run import dry_run, not_predictable

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

    def forward(self, *calls: tuple[str, str, Any, Any]) -> Any:
        """Run calls one after another: the name of a model, that of its method, and the arguments."""
        output = None
        for name, method, args, kwargs in calls:
            part: Any = self.get_submodule(name)
            output = part(*args, **kwargs) if method == "forward" else getattr(part, method)(*args, **kwargs)
        return output

    def recorded(self, pipe: Any, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, float]]:
        """Call ``pipe`` with the models on fake tensors, which return zeros.

        Returns the calls of the models, without repeated ones of the same shapes, and by the models' names how often
        they are called, as a share of the most called one's calls. Raises UnsupportedError where a model needs
        values.
        """
        calls = _Calls()
        with ExitStack() as stack, torch.no_grad():
            for name, part in self.named_children():
                for method in _METHODS:
                    if hasattr(part, method):
                        recording = calls.recording(name, part, method, getattr(part, method))
                        stack.enter_context(mock.patch.object(part, method, recording))
            try:
                pipe(**arguments)
            except (RuntimeError, UnsupportedError) as error:  # fake kernels raise RuntimeError and subclasses
                raise not_predictable(f"a call of {type(pipe).__name__}", error) from error
        most = max(calls.counts.values(), default=1)
        return tuple(calls.first.values()), {name: count / most for name, count in calls.counts.items()}


class _Calls:
    """The calls of models: the first of each shape, its output, and counts by model."""

    def __init__(self) -> None:
        self.first: dict[Any, tuple[str, str, Any, Any]] = {}
        self.counts: Counter[str] = Counter()
        self._outputs: dict[Any, Any] = {}
        self._is_inside = False  # a model's method may call another one

    def recording(self, name: str, part: nn.Module, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            self.counts[name] += 1
            shapes = [tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            key = (name, method, *shapes)
            if key not in self.first:
                self.first[key] = name, method, args, kwargs
                self._is_inside = True
                try:
                    with dry_run(part, [args, kwargs]) as (fake_args, fake_kwargs):
                        output = original(*fake_args, **fake_kwargs)
                    self._outputs[key] = map_tensors(output, _zeros)
                finally:
                    self._is_inside = False
            return map_tensors(self._outputs[key], torch.clone)

        return call


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


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
