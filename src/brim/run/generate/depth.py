"""A deep model's passes, seen on a few of its layers: those that are alike do alike.

Two models that differ by one layer are looked at; what the second adds, every layer that was left out adds too. Where
a pass holds more in the deeper one, or does more outside of its layers, nothing is concluded, and all are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from brim.estimation.extrapolation import REGULAR, Stack
from brim.run.fit.step_memory import ModuleWork, Observation, PassWork
from brim.run.generate.memory import Sizes, cache_shape, watch_generation
from brim.techniques.kv_offload.cache import CacheShape


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
            self._flat.append(other.step_bytes == seen.step_bytes and self._alike(seen, other))
            if not self._flat[0]:
                return None
        passes = {name: dict(self._deep(work)) for name, work in seen.passes.items()}
        return replace(seen, uses=dict(self._uses(seen.uses)), passes=passes)

    def _alike(self, seen: Observation, other: Observation) -> bool:
        """Whether one layer more does what the one before it does, and nothing else does more for it."""
        for name, work in seen.passes.items():
            more = {path: done for path, done in other.passes[name].items() if done.kernels}
            last = self.count - 1
            expected = dict(work) | {
                self._renamed(path, last + 1): done for path, done in work.items() if self.stack.place(path) == last
            }
            if more != {path: done for path, done in expected.items() if done.kernels}:
                return False
        return True

    def _deep(self, work: PassWork) -> Iterator[tuple[str, ModuleWork]]:
        """``work`` of all layers."""
        for path, done in work.items():
            yield path, done
            if self.stack.place(path) == self.count - 1:
                yield from ((self._renamed(path, layer), done) for layer in range(self.count, self.stack.layers))

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


def _of_all(small: CacheShape, layers: int) -> CacheShape:
    """That of a model whose further layers are like the last one of ``small``."""
    return replace(small, layers=(*small.layers, *[small.layers[-1]] * (layers - len(small.layers))))


def _first(shape: CacheShape | None, layers: int) -> CacheShape | None:
    return None if shape is None else replace(shape, layers=shape.layers[:layers])
