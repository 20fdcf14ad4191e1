"""A deep model is traced with a few of its layers, and one of them is repeated, where that is the same.

Layers are the same when the modules that a configuration makes are: their classes, settings and weights' shapes, all
compared. What a model's loop over them might do with their numbers is seen in three traces (``layer_extrapolation``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brim.core import Trace
from brim.estimation.layer_extrapolation import Template, deepened
from brim.estimation.models import Source, class_of, transformers_config
from brim.estimation.steps import Job

_FEWEST_LAYERS = 10  # with fewer, three traces of a few layers are as much work as one of all
_REGULAR = 2  # layers of the first trace that are like all that follow: one first, one last
# Settings by which a model does something at every n-th layer.
_EVERY_NTH = re.compile(r"every|interval|freq|period|pattern|sparse_step")
_SIMPLE = (bool, int, float, str, type(None), torch.dtype, tuple)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The list of a model's layers; the first ``special`` are not like the others."""

    path: str
    layers: int
    special: int

    def place(self, name: str) -> int | None:
        """The number of the layer that ``name`` is in; None outside of them."""
        if not name.startswith(f"{self.path}."):
            return None
        return int(name[len(self.path) + 1 :].partition(".")[0])

    def renamed(self, name: str, places: Mapping[int, int]) -> str | None:
        """``name`` with its layer's number in ``places``; None where that layer is left out."""
        layer = self.place(name)
        if layer is None:
            return name
        if layer not in places:
            return None
        _, _, rest = name[len(self.path) + 1 :].partition(".")
        return f"{self.path}.{places[layer]}" + (f".{rest}" if rest else "")


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The layers of a model, and the ``field`` of its configuration that sets their number."""

    field: str
    stack: Stack


def repeated(job: Job, traced: Callable[[Job], Trace]) -> tuple[Trace, Template] | None:
    """The trace of a deep model from three of a few layers; None where its layers differ or too few are left out."""
    depth = depth_of(job.source)
    if depth is None:
        return None
    few = depth.stack.special + _REGULAR
    shallow_jobs = [job.with_layers(depth.field, few + more) for more in range(3)]
    traces = [traced(shallow) for shallow in shallow_jobs]
    deep = deepened(traces, depth.stack.layers - few)
    if deep is None:
        return None
    job.adopt(shallow_jobs[0])
    return deep.trace, Template(field=depth.field, layers=few + 1, trace=traces[1], storages=deep.templates)


def find_stack(model: nn.Module) -> Stack | None:
    """The one list of many layers that are alike; None where there is none, or more than one."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    lists = [(path, m) for path, m in lists if len(m) >= _FEWEST_LAYERS]
    outer = [(p, m) for p, m in lists if not any(p.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        return None
    path, stack = outer[0]
    special = next((n for n in range(len(stack) - 1) if alike(stack, n)), len(stack))
    if len(stack) - special < _FEWEST_LAYERS:
        return None
    return Stack(path=path, layers=len(stack), special=special)


def depth_of(source: Source, model: nn.Module | None = None) -> Depth | None:
    """How many layers there are and from which one on they are alike; None where a trace of all is the way.

    ``model`` is what ``source`` makes, where that is made already.
    """
    if source.library != "transformers":
        return None
    config = transformers_config(source)
    field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    layers = getattr(config, field, None)
    if not isinstance(layers, int) or layers < _FEWEST_LAYERS or config.is_encoder_decoder:
        return None
    if not _is_even(source.config, layers):
        return None
    model = on_meta(source, config) if model is None else model
    stack = None if model is None else find_stack(model)
    if stack is None or stack.layers != layers:
        return None
    if 3 * (stack.special + _REGULAR + 1) > layers:  # no less work than a trace of all
        return None
    return Depth(field=field, stack=stack)


def _is_even(config: Mapping[str, Any], layers: int) -> bool:
    """No setting speaks of single layers."""
    for name, value in config.items():
        parts = isinstance(value, dict) and name.endswith("_config")  # of several models in one
        if parts or (isinstance(value, list) and len(value) == layers):
            return False
        if _EVERY_NTH.search(name) and isinstance(value, int) and value > 1:
            return False
    return True


def on_meta(source: Source, config: Any) -> nn.Module | None:
    """The model without memory; None where its configuration makes none."""
    from transformers.initialization import no_init_weights

    kind = class_of(config, [source.architecture], ("AutoModelForCausalLM", "AutoModel"))
    if kind is None:
        return None
    try:
        with no_init_weights(), torch.device("meta"):
            model: nn.Module = kind._from_config(config)
    except Exception:  # what is wrong with the configuration the trace will tell
        return None
    return model


def alike(stack: nn.ModuleList, first: int) -> bool:
    """Whether all layers from ``first`` on are alike."""
    first_settings = settings_of(stack[first])
    return all(
        same_settings(first_settings, settings_of(stack[n]), first, n) for n in range(len(stack) - 1, first, -1)
    )


def settings_of(layer: nn.Module) -> dict[str, Any]:
    """By path: classes of modules, shapes and dtypes of tensors, and plain attributes."""
    settings: dict[str, Any] = {}
    for path, module in layer.named_modules():
        settings[path] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, _SIMPLE):
                settings[f"{path}.{name}"] = value
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            settings[f"{path}.{name}"] = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    return settings


def same_settings(one: Mapping[str, Any], other: Mapping[str, Any], first: int, second: int) -> bool:
    """Equal except for numbers that say which layer it is."""
    if one.keys() != other.keys():
        return False
    return all(
        value == other[key] or (type(value) is int and (value, other[key]) == (first, second))
        for key, value in one.items()
    )
