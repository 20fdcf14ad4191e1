"""What a machine has: memory tiers, links between them, compute rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.core import codec
from brim.errors import UsageError

VERSION = 1
VRAM, RAM, DISK = "vram", "ram", "disk"


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One memory: ``vram``, ``ram`` or ``disk``. ``bytes_per_s`` is what one kernel reads from it."""

    name: str
    capacity_bytes: int
    bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """A one-way path between two tiers.

    ``bytes_per_s`` is the best rate: that of requests of ``chunk_bytes``, ``concurrency`` of them in flight (threads,
    for RAM and disk). ``single_bytes_per_s`` is the best with one at a time. ``duplex_bytes_per_s`` is the rate of
    this way while the other way is busy too: both at once are not free. 0: not known.
    """

    source: str
    target: str
    bytes_per_s: float
    duplex_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    single_bytes_per_s: float = 0.0
    chunk_bytes: int = 0
    concurrency: int = 1

    def seconds(self, count: float) -> float:
        """Of one copy of ``count`` bytes. Those of one that is too small for several requests in flight are made one
        after the other."""
        if self.single_bytes_per_s and count < self.concurrency * self.chunk_bytes:
            whole = min(1.0, count / self.chunk_bytes)  # the rate is that of whole requests, with what each waits
            return count / self.single_bytes_per_s + (1 - whole) * self.latency_s
        return self.latency_s + count / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine as the planner sees it. Made by ``measure.probe`` or from the catalog.

    ``compute`` names the tier that kernels work in: VRAM with a GPU, RAM without. ``flops_per_s`` is keyed by
    dtype as PyTorch writes it (``float32``, ``bfloat16``). ``source`` says where the figures come from.
    """

    name: str
    compute: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...] = ()
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def tier(self, name: str) -> Tier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise UsageError(f"Tier {name!r} was asked of {self.name}.", f"It has {[t.name for t in self.tiers]}.")

    def link(self, source: str, target: str) -> Link:
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise UsageError(
            f"The link {source} -> {target} was asked of {self.name}.",
            f"It has {[f'{k.source} -> {k.target}' for k in self.links]}.",
        )

    def to_json(self) -> dict[str, Any]:
        return codec.to_json(self, VERSION)

    @classmethod
    def from_json(cls, document: Any) -> Hardware:
        return codec.from_json(cls, document, VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Hardware:
        return codec.read(cls, path, VERSION)
