"""GPUs by name, and the machines they are sold in: memory, rates, links, library defaults, each with its source.

The figures are in ``gpus.json``, ``shares.json`` (of peak rates, by kind of kernel), ``nodes.json`` (host RAM) and
``links.json`` (between GPUs; NCCL's buffers).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from brim.catalog import names
from brim.core.hardware import RAM, VRAM, Hardware, Link, Tier
from brim.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Context:
    """The CUDA context: driver state and lazily loaded kernels that a process holds before its first tensor.

    ``cuda`` and ``torch`` are the versions that it was measured with; empty for the general figure.
    """

    cuda: str
    torch: str
    bytes: int
    source: str


_FASTEST = 1.07  # of the measured rate: H200's products in models


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as PyTorch sees it. None: no source is known; nothing is estimated here.

    ``memory_bytes`` is nvidia-smi's total, ``usable_bytes`` what ``torch.cuda`` can hand out (less than that),
    ``marketing_bytes`` the size on the box with its GB read as GiB. ``flops_per_s`` holds the dense peaks by dtype as
    PyTorch writes it, plus ``tf32``, with float32 accumulation: what cuBLAS uses for PyTorch.
    ``measured_flops_per_s`` and ``measured_bytes_per_s`` are the best published measurements.
    ``shares_ram``: CUDA or ROCm computes in the host's RAM (GB10, Thor, Radeon 8060S), so no link leads to it.
    ``nvlink_bytes_per_s`` is the sum of both directions, as vendors state it.
    ``sources`` maps each field (``flops_per_s.bfloat16``) to a text.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    compute_capability: str | None
    multiprocessors: int | None
    marketing_bytes: int | None
    memory_bytes: int | None
    usable_bytes: int | None
    bytes_per_s: float | None
    measured_bytes_per_s: float | None
    flops_per_s: Mapping[str, float]
    measured_flops_per_s: Mapping[str, float]
    pcie_bytes_per_s: float | None
    nvlink_bytes_per_s: float | None
    cublas_workspace_bytes: int | None
    contexts: tuple[Context, ...]
    sources: Mapping[str, str]
    shares_ram: bool = False

    @property
    def capacity_bytes(self) -> int:
        """The best known size: usable, else nvidia-smi's total, else the one on the box."""
        for size in (self.usable_bytes, self.memory_bytes, self.marketing_bytes):
            if size is not None:
                return size
        raise UsageError(f"The memory of {self.name} is unknown.", "The catalog does not state it.")

    def context(self, cuda: str = "") -> Context:
        """Return the context of that CUDA version (``"12.8"``), else of the newest known, else the general one."""
        contexts = sorted(self.contexts, key=lambda context: tuple(map(int, context.cuda.split("."))))
        return next((c for c in contexts if c.cuda == cuda), contexts[-1] if contexts else _catalog()[1])

    def hardware(
        self,
        *,
        ram_bytes: int = 0,
        ram_bytes_per_s: float = 0.0,
        link_bytes_per_s: float | None = None,
        measured: bool = True,
    ) -> Hardware:
        """Return this GPU as a Hardware; with ``ram_bytes``, in a host of that much memory.

        ``link_bytes_per_s`` is the rate of the link to the host if it is not PCIe. ``measured`` prefers measured
        rates to the vendor's peaks, and applies the shares that kernels reach.
        """
        rates, bandwidth = dict(self.flops_per_s), self.bytes_per_s or 0.0
        if measured:
            rates |= self._measured_rates()
            bandwidth = self.measured_bytes_per_s or bandwidth
        tiers: tuple[Tier, ...] = (Tier(name=VRAM, capacity_bytes=self.capacity_bytes, bytes_per_s=bandwidth),)
        links: tuple[Link, ...] = ()
        if ram_bytes:
            tiers += (Tier(name=RAM, capacity_bytes=ram_bytes, bytes_per_s=ram_bytes_per_s),)
            rate = link_bytes_per_s or self.pcie_bytes_per_s or 0.0
            links = (
                Link(source=RAM, target=VRAM, bytes_per_s=rate),
                Link(source=VRAM, target=RAM, bytes_per_s=rate),
            )
        return Hardware(
            name=self.name, compute=VRAM, tiers=tiers, links=links, flops_per_s=rates, source="catalog/gpus.json",
            **(self._kernels() if measured else {}),
        )  # fmt: skip

    def _kernels(self) -> dict[str, Any]:
        """Return this generation's shares, of the measured rates where there are any, and its seconds per kernel."""
        facts, measured = read_facts("shares.json"), self.measured_flops_per_s.get("bfloat16")
        generation = facts["like"].get(self.compute_capability, self.compute_capability)
        entry = facts["generations"].get(generation, facts["generations"]["general"])
        more = {
            "flops": self.flops_per_s["bfloat16"] / measured if measured else 1.0,
            "bytes": (self.bytes_per_s or 0.0) / self.measured_bytes_per_s if self.measured_bytes_per_s else 1.0,
        }
        shares = {name: share * more[name.rpartition(".")[2]] for name, share in entry["shares"].items()}
        if measured:  # another product is hardly faster than the best that was measured
            shares = {name: min(share, _FASTEST) for name, share in shares.items()}
        return {"shares": shares, "kernel_s": entry["kernel_s"], "dispatch_s": entry["dispatch_s"]}

    def _measured_rates(self) -> dict[str, float]:
        """Return the measured rates; float16 runs on the units of bfloat16 and takes its measurement."""
        rates = dict(self.measured_flops_per_s)
        if "bfloat16" in rates and self.flops_per_s.get("float16") == self.flops_per_s.get("bfloat16"):
            rates.setdefault("float16", rates["bfloat16"])
        return rates


def gpu(name: str) -> Gpu:
    """Return the GPU of a name in any common spelling: ``rtx 4090``, ``4090``, ``A100 80GB``, ``h100``.

    Raises UsageError with the candidates if the name fits several GPUs or none.
    """
    cards, asked_key = _cards(), names.key(name)
    exact = [card for card in cards if asked_key in {names.key(n) for n in (card.name, *card.aliases)}]
    if len(exact) == 1:
        return exact[0]
    parts = names.tokens(name)
    fitting = [card for card in cards if _fits(parts, card)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(
            f"The GPU name {name!r} is ambiguous.",
            f"{len(fitting)} GPUs match it.",
            f"Name one of them: {', '.join(card.name for card in fitting[:8])}{', ...' if len(fitting) > 8 else '.'}",
        )
    raise names.unknown("GPU", name, [card.name for card in cards])


def gpu_names() -> tuple[str, ...]:
    """Return the names of all GPUs, as ``torch.cuda.get_device_name`` gives them if known."""
    return tuple(card.name for card in _cards())


def general_context() -> Context:
    """Return the context of a GPU without measurements."""
    return _catalog()[1]


def known_contexts() -> tuple[Context, ...]:
    """Return the measured contexts of all GPUs, and the general one."""
    return (*(context for card in _cards() for context in card.contexts), general_context())


def _fits(parts: frozenset[str], card: Gpu) -> bool:
    """True if all words are in the GPU's names or size (``RTX 3060 12GB``), a number of the name among them."""
    size = names.tokens(f"{(card.marketing_bytes or 0) >> 30} gb")
    named = frozenset().union(*map(names.tokens, (card.name, *card.aliases)))
    return parts <= named | size and any(part.isdigit() for part in parts - size)


def _cards() -> tuple[Gpu, ...]:
    return _catalog()[0]


@functools.cache
def _catalog() -> tuple[tuple[Gpu, ...], Context]:
    """Return all GPUs, and the context of a GPU without measurements."""
    document = read_facts("gpus.json")
    titles = {name: source["title"] for name, source in document["sources"].items()}
    return tuple(_card(entry, titles) for entry in document["gpus"]), _context(document["general_context"], titles)


@functools.cache
def read_facts(name: str) -> dict[str, Any]:
    """Return the content of a JSON file of the catalog."""
    facts: dict[str, Any] = json.loads(resources.files("brim.catalog").joinpath(name).read_text(encoding="utf-8"))
    return facts


def _context(entry: dict[str, Any], titles: Mapping[str, str]) -> Context:
    return Context(**entry | {"source": titles[entry["source"]]})


def _card(entry: dict[str, Any], titles: Mapping[str, str]) -> Gpu:
    values: dict[str, Any] = {"flops_per_s": {}, "measured_flops_per_s": {}}
    sources = {}
    for field, figure in entry["figures"].items():
        group, _, dtype = field.partition(".")
        value = figure and figure["value"]
        if dtype:
            values[group][dtype] = float(value)
        else:
            values[field] = value
        if figure:
            sources[field] = titles[figure["source"]]
    contexts = tuple(_context(context, titles) for context in entry["contexts"])
    texts = {field: entry[field] for field in ("name", "vendor", "architecture")}
    return Gpu(
        **texts, **values, aliases=tuple(entry["aliases"]), contexts=contexts, sources=sources,
        shares_ram=entry.get("shares_ram", False),
    )  # fmt: skip


_LINKS = "links.json"
# A host without measurements. One socket with two channels of DDR4-3200 reads at 51.2 GB/s at most (JEDEC JESD79-4);
# four fifths of it are usual.
HOST_BYTES_PER_S = 40e9
_RAM_BYTES = 64 << 30
HOST_SHARE = 1 / 8  # of a memory that CPU and GPU share: for the system, the process and what it keeps in RAM


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
    if gpu.shares_ram:
        rate = gpu.measured_bytes_per_s or gpu.bytes_per_s or 0.0
        return Host(
            name=gpu.name, gpus=1, ram_bytes=int(gpu.capacity_bytes * HOST_SHARE), ram_bytes_per_s=rate,
            link_bytes_per_s=rate / 2, sources={},  # a copy reads and writes the one memory
        )  # fmt: skip
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
        ram_bytes_per_s=node["ram_bytes_per_s"]["value"],
        link_bytes_per_s=float(link["value"]) if link else gpu.pcie_bytes_per_s,
        sources={field: facts["sources"][figure["source"]]["title"] for field, figure in figures.items()},
    )  # fmt: skip


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
