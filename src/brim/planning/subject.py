"""The model, without its weights, and the machine of a generation plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from brim.estimation.step_memory import Inputs, Observation
from brim.planning.inference.choose import GenerationCase, GenerationRequest
from brim.planning.inference.depth import Shallow
from brim.planning.inference.memory import Sizes, cache_shape, watch_generation
from brim.planning.inference.pass_seconds import PassSeconds
from brim.planning.request import Machine
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.weight_streaming import Weights


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Cached observations of a model, independent of the machine."""

    observations: dict[Sizes, Observation] = field(default_factory=dict)
    shape: list[kv_cache.CacheShape | None] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in a precision. ``module`` has no values; ``spent_bytes`` is the program's own share per tier.

    ``shallow`` is the model with a few of its layers, if they represent it. ``measures``: its blocks can be timed.
    """

    name: str
    module: nn.Module
    precision: str
    weights: Weights
    inputs: Inputs
    machine: Machine
    own_precision: str = "fp32"  # that of the configuration
    host_compute: bool = True
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    shallow: Shallow | None = field(default=None, compare=False)
    measures: bool = True
    seen: Seen = field(default_factory=Seen, compare=False)

    def on(self, machine: Machine) -> Subject:
        """Return the model on another machine."""
        return replace(self, machine=machine)

    @cached_property
    def is_here(self) -> bool:
        """True where the machine is this one."""
        return self._seconds.is_here

    @cached_property
    def _seconds(self) -> PassSeconds:
        return PassSeconds(
            module=self.module, hardware=self.machine.hardware, measures=self.measures, host_compute=self.host_compute
        )

    @property
    def shape(self) -> kv_cache.CacheShape | None:
        """The planned KV cache; None: the model keeps its own."""
        if not self.seen.shape:
            self.seen.shape.append(cache_shape(self.module) if self.shallow is None else self.shallow.shape())
        return self.seen.shape[0]

    @property
    def case(self) -> GenerationCase:
        """The case of ``brim plan``: that of ``brim generate``, but missing measurements of this machine are made."""
        return GenerationCase(
            name=self.name,
            module=self.module,
            weights=self.weights,
            hardware=self.machine.hardware,
            budget_bytes=self.machine.budget_bytes,
            request=GenerationRequest.of(self.inputs, host_compute=self.host_compute),
            shape=self.shape,
            watch=self.watch,
            spent_bytes=lambda: self.spent_bytes,
            seconds=self._seconds,
        )

    def watch(self, sizes: Sizes) -> Observation:
        if sizes not in self.seen.observations:
            seen = None if self.shallow is None else self.shallow.watch(sizes, self.shape)
            self.seen.observations[sizes] = watch_generation(self.module, sizes, self.shape) if seen is None else seen
        return self.seen.observations[sizes]
