"""A machine's memory tiers, the links between them, and its compute rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from brim.core.codec import Document
from brim.errors import UsageError

VRAM, RAM, DISK = "vram", "ram", "disk"


_TILE = 52  # rows or columns of a product that partly filled tiles cost in each dimension: fitted with the shares


def filled(*sizes: float) -> float:
    """Return the share of the tiles of a product that matrices of these sizes fill."""
    return math.prod(size / (size + _TILE) for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A memory of a machine.

    Attributes:
        name: ``"vram"``, ``"ram"`` or ``"disk"``.
        capacity_bytes: Its size; of a disk, the free space.
        bytes_per_s: The rate at which one kernel reads it. 0: not known.
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
        duplex_bytes_per_s: The rate in this direction while the other direction is busy too.
        latency_s: Seconds that a copy takes in addition to moving its bytes.
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
        """Return the seconds of one copy of ``count`` bytes; a small copy has one request at a time."""
        if self.single_bytes_per_s and count < self.concurrency * self.chunk_bytes:
            filled = min(1.0, count / self.chunk_bytes)  # the rate includes the latency of full requests
            return count / self.single_bytes_per_s + (1 - filled) * self.latency_s
        return self.latency_s + count / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Hardware(Document):
    """A machine as the planner sees it: measured by ``brim.probe``, or a GPU of the catalog.

    Attributes:
        name: The name of the GPU or processor.
        compute: The tier that kernels work in: ``"vram"`` with a GPU, ``"ram"`` without.
        tiers: Its memories.
        links: Paths between them.
        flops_per_s: Floating-point operations per second of matrix products, by dtype as PyTorch writes it
            (``"float32"``, ``"bfloat16"``; also ``"tf32"``).
        source: The origin of the figures.
        shares: The shares of these rates that kernels reach: ``"KIND.flops"`` for products of matrices,
            ``"KIND.bytes"`` for the memory of ``compute``. A kind that is missing has that of ``""``, else 1.
        dispatch_s: The host's seconds to launch an operation in a whole program.
        kernel_s: The device's pause between two kernels.
    """

    _VERSION = 2

    name: str
    compute: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...] = ()
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    dispatch_s: float = 17e-6
    kernel_s: float = 0.9e-6

    def share(self, name: str) -> float:
        """Return a share; without one of the kind, that of kernels that take one element after the other."""
        return self.shares.get(name, self.shares.get(f".{name.rpartition('.')[2]}", 1.0))

    def tier(self, name: str) -> Tier:
        """Return the tier of that name. Raises UsageError if there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise UsageError(f"{self.name} has no tier {name!r}.", f"It has {[t.name for t in self.tiers]}.")

    def link(self, source: str, target: str) -> Link:
        """Return the link between two tiers. Raises UsageError if there is none."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise UsageError(
            f"{self.name} has no link {source} -> {target}.",
            f"It has {[f'{k.source} -> {k.target}' for k in self.links]}.",
        )
