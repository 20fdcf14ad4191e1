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
    """One memory of a machine.

    Attributes:
        name: ``"vram"``, ``"ram"`` or ``"disk"``.
        capacity_bytes: How much it holds; of a disk, what is free.
        bytes_per_s: What one kernel reads from it. 0: not known.
    """

    name: str
    capacity_bytes: int
    bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """A one-way path between two tiers. 0: not known.

    Attributes:
        source: The tier that is read.
        target: The tier that is written.
        bytes_per_s: The best rate: that of requests of ``chunk_bytes``, ``concurrency`` of them in flight.
        duplex_bytes_per_s: The rate of this way while the other way is busy too.
        latency_s: Seconds that a copy takes beside its bytes.
        single_bytes_per_s: The best rate with one request at a time.
        chunk_bytes: The size of a request at the best rate.
        concurrency: Requests in flight at the best rate (threads, for RAM and disk).
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
        """Seconds of one copy of ``count`` bytes. The requests of a copy that is too small for several in flight are
        made one after the other.
        """
        if self.single_bytes_per_s and count < self.concurrency * self.chunk_bytes:
            whole = min(1.0, count / self.chunk_bytes)  # the rate is that of whole requests, with what each waits
            return count / self.single_bytes_per_s + (1 - whole) * self.latency_s
        return self.latency_s + count / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine as the planner sees it: measured by ``brim.probe``, or a card of the catalog.

    Attributes:
        name: The GPU's or processor's.
        compute: The tier that kernels work in: ``"vram"`` with a GPU, ``"ram"`` without.
        tiers: Its memories.
        links: Paths between them.
        flops_per_s: Floating-point operations per second of matrix products, by dtype as PyTorch writes it
            (``"float32"``, ``"bfloat16"``; also ``"tf32"``).
        source: Where the figures come from.
    """

    name: str
    compute: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...] = ()
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises UsageError where there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise UsageError(f"{self.name} has no tier {name!r}.", f"It has {[t.name for t in self.tiers]}.")

    def link(self, source: str, target: str) -> Link:
        """The link between two tiers. Raises UsageError where there is none."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise UsageError(
            f"{self.name} has no link {source} -> {target}.",
            f"It has {[f'{k.source} -> {k.target}' for k in self.links]}.",
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, with kind and format version."""
        return codec.to_json(self, VERSION)

    @classmethod
    def from_json(cls, document: Any) -> Hardware:
        """Back from ``to_json``. Raises FormatError for another kind or version, and for unknown or missing keys."""
        return codec.from_json(cls, document, VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Hardware:
        """Read it from a JSON file. Raises FormatError for anything else, a missing file included."""
        return codec.read(cls, path, VERSION)
