"""Cache the observed passes of a generation for other processes with the same model.

A pass on fake tensors takes as long as many a real one, and its result depends only on the model's code and
configuration, its tensors' shapes and dtypes, the libraries' versions and the sizes of the passes.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from brim.estimation import step_memory
from brim.estimation.step_memory import ModuleWork, Observation
from brim.measure.user_cache import cache_folder, fingerprint, load_text, store_text
from brim.planning.inference import memory
from brim.planning.inference.memory import Sizes, cache_shape, watch_generation
from brim.predict import dispatch, recorder
from brim.techniques.kv_offload import cache as kv_cache
from brim.version import __version__

_METHOD = 2  # raised when the observation or its stored format changes
_KEPT = 32  # the most sizes of a model; the oldest are dropped
_WATCHING = (dispatch, kv_cache, memory, recorder, step_memory)  # the modules that an observation depends on


class RememberedPasses:
    """``cache_shape`` and ``watch_generation`` of a model, cached in the user's cache folder.

    A file that is damaged or cannot be written only causes a warning.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._path = cache_folder() / f"passes-{fingerprint_of(module)}.json"
        self._known = self._read()

    def shape(self) -> kv_cache.CacheShape | None:
        if "shape" not in self._known:
            shape = cache_shape(self._module)
            self._keep({"shape": None if shape is None else _shape_to_json(shape)})
            return shape
        stored = self._known["shape"]
        return None if stored is None else _shape_of(stored)

    def watch(self, sizes: Sizes) -> Observation:
        name, seen = json.dumps(asdict(sizes)), self._known.get("seen", {})
        if name not in seen:
            observation = watch_generation(self._module, sizes, self.shape())
            uses = _uses_to_json(observation.uses)
            tables = [*self._known.get("uses", ())]
            if uses not in tables:  # passes of most sizes read the same parameters
                tables.append(uses)
            passes = {
                which: {path: [*done] for path, done in work.items()} for which, work in observation.passes.items()
            }
            seen = {
                **seen,
                name: {"step_bytes": observation.step_bytes, "uses": tables.index(uses), "passes": passes},
            }
            last = dict([*seen.items()][-_KEPT:])
            self._keep({"uses": tables, "seen": last})
            return observation
        return _observed(seen[name], _uses_of(self._known["uses"][seen[name]["uses"]]))

    def _keep(self, entries: Mapping[str, Any]) -> None:
        self._known = {**self._known, **entries}
        store_text(self._path, json.dumps(self._known))

    def _read(self) -> dict[str, Any]:
        try:
            text, _ = load_text(self._path) or ("{}", 0.0)
            return _checked(json.loads(text))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            warnings.warn(f"{self._path} is damaged and is made again: {error!r:.200}", stacklevel=4)
            return {}


def _checked(document: dict[str, Any]) -> dict[str, Any]:
    """Parse all entries of ``document``, and return it if that raised no error."""
    if document.get("shape") is not None:
        _shape_of(document["shape"])
    tables = [_uses_of(table) for table in document.get("uses", ())]
    for each in document.get("seen", {}).values():
        _observed(each, tables[each["uses"]])
    return document


def _observed(document: Mapping[str, Any], uses: Mapping[str, frozenset[frozenset[str]]]) -> Observation:
    def work(flops: int, moved: int, kernels: int, dtype: str) -> ModuleWork:
        if not min(flops, moved, kernels) >= 0:
            raise ValueError(f"work of {flops} FLOPs, {moved} bytes and {kernels} kernels")
        return ModuleWork(flops=int(flops), bytes=int(moved), kernels=int(kernels), dtype=str(dtype))

    passes = {name: {path: work(*done) for path, done in parts.items()} for name, parts in document["passes"].items()}
    if not document["step_bytes"] > 0:
        raise ValueError(f"a pass that holds {document['step_bytes']} bytes")
    return Observation(step_bytes=int(document["step_bytes"]), uses=uses, passes=passes)


def fingerprint_of(module: nn.Module) -> str:
    """Return a hash of everything that the passes of ``module`` depend on."""
    config: Any = module.config
    kinds = {type(part) for part in module.modules()}
    sources = {inspect.getfile(watching) for watching in _WATCHING}
    sources |= {str(sys.modules[kind.__module__].__file__) for kind in kinds}
    tensors: Iterable[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return fingerprint(
        sorted(map(Path, sources)),
        _METHOD,
        (__version__, torch.__version__, transformers.__version__),
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        [(name, getattr(config, name, None)) for name in ("_attn_implementation", "_experts_implementation")],
        [(name, type(part).__qualname__, part.training) for name, part in module.named_modules()],
        [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors],
    )


def _shape_to_json(shape: kv_cache.CacheShape) -> dict[str, Any]:
    layers = [
        layer and [layer.heads, layer.key_dim, layer.value_dim, str(layer.dtype).removeprefix("torch.")]
        for layer in shape.layers
    ]
    return {"layers": layers, "only_attention": shape.only_attention, "shared": shape.shared}


def _shape_of(document: Mapping[str, Any]) -> kv_cache.CacheShape:
    return kv_cache.CacheShape(
        layers=tuple(None if layer is None else _layer_of(*layer) for layer in document["layers"]),
        only_attention=bool(document["only_attention"]),
        shared=bool(document["shared"]),
    )


def _layer_of(heads: int, key_dim: int, value_dim: int, dtype: str) -> kv_cache.LayerShape:
    if not min(heads, key_dim, value_dim) > 0:
        raise ValueError(f"{heads} heads of {key_dim} and {value_dim} numbers")
    return kv_cache.LayerShape(
        heads=int(heads), key_dim=int(key_dim), value_dim=int(value_dim), dtype=getattr(torch, dtype)
    )


def _uses_to_json(uses: Mapping[str, frozenset[frozenset[str]]]) -> dict[str, Any]:
    """Store modules by number, as their paths recur."""
    paths = sorted({path for active_sets in uses.values() for active in active_sets for path in active})
    number = {path: index for index, path in enumerate(paths)}
    read = {
        name: sorted(sorted(number[path] for path in active) for active in active_sets)
        for name, active_sets in sorted(uses.items())
    }
    return {"paths": paths, "read": read}


def _uses_of(document: Mapping[str, Any]) -> dict[str, frozenset[frozenset[str]]]:
    paths = document["paths"]
    return {
        name: frozenset(frozenset(paths[index] for index in active) for active in active_sets)
        for name, active_sets in document["read"].items()
    }
