"""How a step is split between a link and a processor that reads its weights where they rest, by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

from brim.core import Plan
from brim.errors import UsageError
from brim.techniques.blocks import Partition
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_RAM, NAME, computable


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Of weights that do not fit: what the CPU computes, what the link brings, and the seconds of both at once."""

    host_bytes: int
    link_bytes: int
    seconds: float


def split(overflow_bytes: int, *, link_bytes_per_s: float, host_bytes_per_s: float) -> Split:
    """The split at which link and CPU are done at once: overflow / (link + RAM).

    ``host_bytes_per_s`` is what the CPU's kernels read from RAM at batch 1 while the link reads beside them. Where
    the two share one memory bus, that is what the bus has left over.
    """
    if min(link_bytes_per_s, host_bytes_per_s) < 0 or link_bytes_per_s + host_bytes_per_s == 0:
        raise UsageError("Cannot split a step.", f"The rates are {link_bytes_per_s} and {host_bytes_per_s} bytes/s.")
    both = link_bytes_per_s + host_bytes_per_s
    host = int(overflow_bytes * host_bytes_per_s / both)
    return Split(host_bytes=host, link_bytes=overflow_bytes - host, seconds=overflow_bytes / both)


def compute_some_in_ram(plan: Plan, partition: Partition, share: float) -> Plan:
    """``plan`` with about ``share`` of what streams from RAM computed there instead.

    Evenly spread among the streamed blocks: while the CPU has one, the link brings the next. ``step_s`` is left as it
    is: it is for whoever knows the rates (see ``split``).
    """
    able, choices = computable(partition), plan.choices(NAME)
    sizes = {block.name: block.bytes for block in partition.blocks}
    streamed = [name for name, choice in choices.items() if choice == FROM_RAM]
    taken: set[str] = set()
    credit = 0.0
    for name in streamed:
        credit += share * sizes[name]
        if name in able and credit >= sizes[name] / 2:
            taken.add(name)
            credit -= sizes[name]
    decisions = tuple(
        replace(d, choice=COMPUTE_RAM) if d.technique == NAME and d.block in taken else d for d in plan.decisions
    )
    return replace(plan, decisions=decisions)
