"""A deep model's passes, seen on a few of its layers: those that are alike are called alike.

Two models that differ by one layer are looked at; what the second adds, every layer that was left out adds too. Where
a pass holds more in the deeper one, nothing is concluded, and all layers are looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from brim.run.fit.step_memory import Observation
from brim.run.generate.memory import Sizes, cache_shape, watch_generation
from brim.run.timing.block_calls import Call, Calls, Example, calls_of
from brim.run.train.strategy.depth import Stack
from brim.techniques.kv_offload.cache import CacheShape

REGULAR = 2  # layers of the smaller model that are like all that follow: a first and a last one


@dataclass(frozen=True, kw_only=True)
class Shallow:
    """``few`` is the model with the special layers of ``stack`` and ``REGULAR`` others, ``more`` with one more."""

    stack: Stack
    few: nn.Module
    more: nn.Module
    _flat: list[bool] = field(default_factory=list)  # whether a pass takes as much in both, once that was seen

    @property
    def count(self) -> int:
        """Layers of ``few``."""
        return self.stack.special + REGULAR

    def shape(self) -> CacheShape | None:
        """The cache of all layers."""
        small = cache_shape(self.few)
        return None if small is None else _of_all(small, self.stack.layers)

    def watch(self, sizes: Sizes, shape: CacheShape | None) -> Observation | None:
        """As ``watch_generation`` of the deep model; None where that takes more the deeper it is."""
        if self._flat and not self._flat[0]:
            return None
        seen = watch_generation(self.few, sizes, _first(shape, self.count))
        if not self._flat:
            other = watch_generation(self.more, sizes, _first(shape, self.count + 1))
            self._flat.append(other.step_bytes == seen.step_bytes)
            if not self._flat[0]:
                return None
        return replace(seen, uses=dict(self._uses(seen.uses)))

    def _uses(self, uses: Mapping[str, frozenset[frozenset[str]]]) -> dict[str, frozenset[frozenset[str]]]:
        last, found = self.count - 1, dict(uses)
        for name, held in uses.items():
            if self.stack.place(name) != last:
                continue
            for layer in range(last + 1, self.stack.layers):
                active = (frozenset(self._renamed(path, layer) for path in paths) for paths in held)
                found[self._renamed(name, layer)] = frozenset(active)
        return found

    def _renamed(self, name: str, layer: int) -> str:
        """``name`` in the last layer of ``few`` as it is in ``layer``; outside of it, the same."""
        if self.stack.place(name) != self.count - 1:
            return name
        made = self.stack.renamed(name, {self.count - 1: layer})
        assert made is not None, "it is in that layer"
        return made

    def calls(self, paths: Collection[str], example: Example) -> Calls:
        """As ``calls_of`` of the deep model, but for the arguments of the whole, whose cache has fewer layers."""
        seen, other = (
            calls_of(model, self._inside(paths, layers), example)
            for model, layers in ((self.few, self.count), (self.more, self.count + 1))
        )
        mine = [index for index, (path, _) in enumerate(seen.made) if self.stack.place(path) == self.count - 1]
        end = mine[-1] + 1 if mine else len(seen.made)
        made = list(seen.made[:end])
        for layer in range(self.count, self.stack.layers):
            made += [(self._renamed(seen.made[index][0], layer), seen.made[index][1]) for index in mine]
        left = self.stack.layers - self.count
        return Calls(made=[*made, *seen.made[end:]], kinds=seen.kinds, whole=_grown(seen.whole, other.whole, left))

    def _inside(self, paths: Collection[str], layers: int) -> set[str]:
        places = {path: self.stack.place(path) for path in paths}
        return {path for path, layer in places.items() if layer is None or layer < layers}


def _of_all(small: CacheShape, layers: int) -> CacheShape:
    """That of a model whose further layers are like the last one of ``small``."""
    return replace(small, layers=(*small.layers, *[small.layers[-1]] * (layers - len(small.layers))))


def _first(shape: CacheShape | None, layers: int) -> CacheShape | None:
    return None if shape is None else replace(shape, layers=shape.layers[:layers])


def _grown(one: Call, other: Call, layers: int) -> Call:
    def on(name: str) -> Any:
        return getattr(other, name) + (layers - 1) * (getattr(other, name) - getattr(one, name))

    return replace(one, **{name: on(name) for name in ("flops", "bytes", "written_bytes", "kernels")})
