"""Memory at the peak, by category and by module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from brim.core import Category, Timeline, Trace
from brim.report.explain import live_at_peak

# The report's names of categories. Buffers count as parameters.
NAMES: Mapping[Category, str] = {
    Category.PARAMETER: "parameters",
    Category.BUFFER: "parameters",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer_state",
    Category.ACTIVATION: "activations",
    Category.TEMPORARY: "temporary",
    Category.OPTIMIZER_TEMPORARY: "temporary",
    Category.KV_CACHE: "kv_cache",
    Category.INPUT: "inputs",
    Category.WORKSPACE: "workspaces",
}
OUTSIDE = "(outside of modules)"


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Bytes of tensors at the peak of allocated memory. Both tables have the same sum.

    ``rounding_bytes`` is added by rounding to blocks: ``peak_bytes.allocated`` is the sum and it.
    """

    by_category: dict[str, int]
    by_module: dict[str, int]
    rounding_bytes: int


def at_peak(trace: Trace, timeline: Timeline) -> Breakdown:
    """Break down the storages that are alive at the (first) peak of allocated memory."""
    categories: dict[str, int] = dict.fromkeys(NAMES.values(), 0)
    modules: dict[str, int] = defaultdict(int)
    storages = {storage.id: storage for storage in trace.storages}
    rounding = 0
    ids, sizes = timeline.column("storage"), timeline.column("bytes")
    for row in live_at_peak(timeline).rows.tolist():
        storage, block_bytes = storages[ids[row]], sizes[row]
        # The simulated GPU may have another workspace than the traced one; it is never rounded.
        bytes = block_bytes if storage.category is Category.WORKSPACE else storage.bytes
        categories[NAMES[storage.category]] += bytes
        modules[storage.module or OUTSIDE] += bytes
        rounding += block_bytes - bytes
    largest_first = sorted(modules.items(), key=lambda entry: (-entry[1], entry[0]))
    return Breakdown(by_category=categories, by_module=dict(largest_first), rounding_bytes=rounding)


def folded(by_module: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Merge modules whose paths differ in a number only: ``model.layers.*.mlp`` -> (bytes, count)."""
    rows: dict[str, list[int]] = {}
    for path, bytes in by_module.items():
        name = ".".join("*" if part.isdigit() else part for part in path.split("."))
        row = rows.setdefault(name, [0, 0])
        row[0] += bytes
        row[1] += 1
    ordered = sorted(rows.items(), key=lambda entry: -entry[1][0])
    return {name: (bytes, count) for name, (bytes, count) in ordered}
