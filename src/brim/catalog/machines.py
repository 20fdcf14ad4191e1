"""The machines that GPUs are sold in: host RAM, links between GPUs, and NCCL's buffers, with their sources.

The figures are in ``nodes.json`` and ``links.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim.catalog.gpus import Gpu, read_facts
from brim.errors import UsageError

_LINKS = "links.json"
# A host without measurements. One socket with two channels of DDR4-3200 reads at 51.2 GB/s at most (JEDEC JESD79-4);
# four fifths of it are usual.
HOST_BYTES_PER_S = 40e9
_RAM_BYTES = 64 << 30


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of a GPU. Its ``gpus`` share it evenly; None: any number of GPUs shares all of it.

    ``link_bytes_per_s`` is of one GPU and one direction; None if no source is known. ``sources`` maps fields to
    texts, and is empty for an assumed host.
    """

    name: str
    gpus: int | None
    ram_bytes: int
    ram_bytes_per_s: float
    link_bytes_per_s: float | None
    sources: Mapping[str, str]

    def ram_of(self, gpus: int) -> int:
        """Return the bytes of RAM that belong to so many of its GPUs."""
        return self.ram_bytes if self.gpus is None else self.ram_bytes * min(gpus, self.gpus) // self.gpus

    def rate_of(self, gpus: int) -> float:
        """Return the bytes per second of RAM that so many of its GPUs have together."""
        return self.ram_bytes_per_s if self.gpus is None else self.ram_bytes_per_s * min(gpus, self.gpus) / self.gpus


def host_of(gpu: Gpu) -> Host:
    """Return the server that ``gpu`` is sold in, else an assumed desktop of 64 GiB."""
    facts = read_facts("nodes.json")
    node = next((node for node in facts["nodes"] if node["gpu"] == gpu.name), None)
    if node is None:
        return Host(
            name="", gpus=None, ram_bytes=_RAM_BYTES, ram_bytes_per_s=HOST_BYTES_PER_S,
            link_bytes_per_s=gpu.pcie_bytes_per_s, sources={},
        )  # fmt: skip
    figures = {field: node[field] for field in ("ram_bytes", "ram_bytes_per_s", "link_bytes_per_s") if node[field]}
    link = node["link_bytes_per_s"]
    return Host(
        name=node["name"], gpus=node["gpus"], ram_bytes=node["ram_bytes"]["value"],
        ram_bytes_per_s=float(node["ram_bytes_per_s"]["value"]),
        link_bytes_per_s=float(link["value"]) if link else gpu.pcie_bytes_per_s,
        sources={field: str(facts["sources"][figure["source"]]["title"]) for field, figure in figures.items()},
    )  # fmt: skip


def node_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs whose servers are known."""
    return tuple(node["gpu"] for node in read_facts("nodes.json")["nodes"])


@dataclass(frozen=True, kw_only=True)
class Network:
    """The rates of one GPU's collectives, in one direction, within a node and out of it.

    ``node_bytes_per_s`` is NVLink's, else PCIe's. ``network_bytes_per_s`` is one GPU's share of its node's network.
    ``all_to_all_share`` is the share of a ring's rate that an all-to-all within a node gets. ``latency_s`` is the
    time of a nearly empty collective. ``sources`` names the source of each.
    """

    node_bytes_per_s: float
    network_bytes_per_s: float
    all_to_all_share: float
    latency_s: float
    sources: tuple[str, ...]

    def bytes_per_s(self, per_node: int, *, crosses: bool) -> float:
        """Return a ring's rate per GPU; a ring that crosses nodes uses the links of all ``per_node`` members."""
        if not crosses:
            return self.node_bytes_per_s
        return min(self.node_bytes_per_s, self.network_bytes_per_s * per_node)


def network(gpu: Gpu) -> Network:
    """Return the links of a GPU in the machines that it is sold in. Raises UsageError if no source is known."""
    facts = read_facts(_LINKS)
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
    if wire is None:  # no such server is sold: assume a network as fast as PCIe
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
    """Return the bytes of a communicator of ``group`` ranks on each GPU, outside of PyTorch's allocator."""
    if group < 2:
        return 0
    return int(read_facts(_LINKS)["nccl_communicator_bytes"]["two" if group == 2 else "more"]["value"])


def nccl_source() -> str:
    """Return the source of ``nccl_bytes``."""
    return _title(read_facts(_LINKS)["nccl_communicator_bytes"]["more"])


def training_rate(gpu: Gpu) -> tuple[float, str] | None:
    """Return the bfloat16 operations per second that this GPU sustains in training, and the source; None: unknown."""
    fact = read_facts(_LINKS)["training_flops_per_s"].get(gpu.name)
    return (float(fact["value"]), _title(fact)) if fact else None


def _title(fact: dict[str, Any]) -> str:
    return str(read_facts(_LINKS)["sources"][fact["source"]]["title"])
