"""How fast GPUs talk to one another, and what NCCL takes for it, each figure with its source (``links.json``)."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from brim.catalog.gpus import Gpu
from brim.errors import UsageError

# A host that nobody measured. One socket with two channels of DDR4-3200 reads at 51.2 GB/s at most (JEDEC JESD79-4);
# four fifths of it are usual.
HOST_BYTES_PER_S = 40e9


@dataclass(frozen=True, kw_only=True)
class Network:
    """What collectives of one GPU get: bytes per second of one direction within a node, and out of it.

    ``node_bytes_per_s`` is NVLink's, or PCIe's where there is none. ``network_bytes_per_s`` is one GPU's share of its
    node's network. ``all_to_all_share`` is what an all-to-all within a node gets of a ring's rate. ``latency_s`` is
    the time of a collective of next to nothing. ``sources`` names where each is from.
    """

    node_bytes_per_s: float
    network_bytes_per_s: float
    all_to_all_share: float
    latency_s: float
    sources: tuple[str, ...]

    def bytes_per_s(self, per_node: int, *, crosses: bool) -> float:
        """The rate of a ring, per GPU: a ring that leaves its nodes takes the links of all ``per_node`` members."""
        if not crosses:
            return self.node_bytes_per_s
        return min(self.node_bytes_per_s, self.network_bytes_per_s * per_node)


def network(gpu: Gpu) -> Network:
    """The links of a GPU in the machines that it is sold in. Raises UsageError where no source is known."""
    facts = _facts()
    share, wires = facts["nvlink_share"].get(gpu.architecture), facts["network_bytes_per_s"]
    wire = wires.get(gpu.name, wires.get(gpu.architecture))
    if gpu.nvlink_bytes_per_s and share is not None:
        node, source = gpu.nvlink_bytes_per_s / 2 * share["value"], _title(share)
    elif gpu.pcie_bytes_per_s:
        node, source = float(gpu.pcie_bytes_per_s), gpu.sources.get("pcie_bytes_per_s", "")
    else:
        raise UsageError(
            f"The links between several {gpu.name} are unknown.", "The catalog has none.", "Name another GPU."
        )
    if wire is None:  # no such machine is sold: it leaves its node over the network as fast as over PCIe
        wire = {"value": float(gpu.pcie_bytes_per_s or node), "source": "dgx-network"}
    shares = (facts["network_share"], facts["all_to_all_share"], facts["collective_latency_s"])
    sources = (source, _title(wire), *(_title(fact) for fact in shares))
    return Network(
        node_bytes_per_s=node,
        network_bytes_per_s=wire["value"] * facts["network_share"]["value"],
        all_to_all_share=facts["all_to_all_share"]["value"],
        latency_s=facts["collective_latency_s"]["value"],
        sources=sources,
    )


def nccl_bytes(group: int) -> int:
    """What one communicator of ``group`` ranks takes on each GPU, outside of PyTorch's allocator; 0 for one rank."""
    if group < 2:
        return 0
    return int(_facts()["nccl_communicator_bytes"]["two" if group == 2 else "more"]["value"])


def nccl_source() -> str:
    """Where ``nccl_bytes`` is from."""
    return _title(_facts()["nccl_communicator_bytes"]["more"])


def training_rate(gpu: Gpu) -> tuple[float, str] | None:
    """Products per second in bfloat16 that this GPU holds over whole training steps, and the source; None:
    unknown."""
    fact = _facts()["training_flops_per_s"].get(gpu.name)
    return (float(fact["value"]), _title(fact)) if fact else None


def _title(fact: dict[str, Any]) -> str:
    return str(_facts()["sources"][fact["source"]]["title"])


@functools.cache
def _facts() -> dict[str, Any]:
    text = resources.files("brim.catalog").joinpath("links.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
