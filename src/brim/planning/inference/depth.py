"""Observe a deep model's passes on a few of its layers.

Two models that differ by one layer are observed; each layer left out does the same work as the additional one. If a
pass needs more memory in the deeper model, or does more outside of its layers, all layers are observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from brim.estimation.extrapolation import Stack
from brim.estimation.step_memory import ModuleWork, Observation, PassWork
from brim.planning.inference.memory import Sizes, cache_shape, watch_generation
from brim.techniques.kv_offload.cache import CacheShape


@dataclass(frozen=True, kw_only=True)
class Shallow:
    """``few`` is the model with the fewest layers that represent ``stack``, ``more`` has one more."""

    stack: Stack
    few: nn.Module
    more: nn.Module
    _flat: list[bool] = field(default_factory=list)  # true if a pass needs the same memory in both; empty at first

    def shape(self) -> CacheShape | None:
        """Return the cache shape of all layers: further ones equal the last one of ``few``."""
        small = cache_shape(self.few)
        if small is None:
            return None
        return replace(small, layers=(*small.layers, *[small.layers[-1]] * (self.stack.layers - len(small.layers))))

    def watch(self, sizes: Sizes, shape: CacheShape | None) -> Observation | None:
        """Observe the deep model as ``watch_generation`` does; None if a pass's memory grows with depth."""
        if self._flat == [False]:
            return None
        few = _watched(self.few, sizes, shape, self.stack.fewest)
        if not self._flat:
            more = _watched(self.more, sizes, shape, self.stack.fewest + 1)
            alike = all(
                _kernels(self._deep(work, self.stack.fewest + 1)) == _kernels(more.passes[name])
                for name, work in few.passes.items()
            )
            self._flat.append(alike and more.step_bytes == few.step_bytes)
            if not self._flat[0]:
                return None
        passes = {name: self._deep(work, self.stack.layers) for name, work in few.passes.items()}
        return replace(few, uses=self._uses(few.uses), passes=passes)

    def _further(self, name: str, layers: int) -> range:
        """Return the layers of a model with ``layers`` that ``few`` lacks if ``name`` is in its last; else none."""
        return range(
            self.stack.fewest, layers if self.stack.place(name) == self.stack.fewest - 1 else self.stack.fewest
        )

    def _renamed(self, name: str, layer: int) -> str:
        """Rename a path in the last layer of ``few`` to the one in ``layer``; other paths stay."""
        return self.stack.renamed(name, {self.stack.fewest - 1: layer}) or name

    def _deep(self, work: PassWork, layers: int) -> dict[str, ModuleWork]:
        """Extend ``work`` to a model with ``layers``."""
        return {
            name: done
            for path, done in work.items()
            for name in (path, *(self._renamed(path, layer) for layer in self._further(path, layers)))
        }

    def _uses(self, uses: Mapping[str, frozenset[frozenset[str]]]) -> dict[str, frozenset[frozenset[str]]]:
        return dict(uses) | {
            self._renamed(name, layer): frozenset(
                frozenset(self._renamed(path, layer) for path in paths) for paths in active
            )
            for name, active in uses.items()
            for layer in self._further(name, self.stack.layers)
        }


def _watched(model: nn.Module, sizes: Sizes, shape: CacheShape | None, layers: int) -> Observation:
    return watch_generation(model, sizes, None if shape is None else replace(shape, layers=shape.layers[:layers]))


def _kernels(work: PassWork) -> dict[str, ModuleWork]:
    """Return the work of modules that run kernels."""
    return {path: done for path, done in work.items() if done.kernels}
