"""The simulated card: a catalog entry, and a process's share of it.

The limits that choose between kernels (shared memory, threads and blocks of a multiprocessor) follow from the compute
capability: "Technical Specifications per Compute Capability" of NVIDIA's CUDA C++ Programming Guide. Sizes of L2
caches are those of the GPUs' whitepapers and data sheets; nothing but tuning reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self

from brim.catalog.gpus import Gpu, gpu
from brim.errors import UnsupportedError, UsageError
from brim.units import format_bytes

VARIABLE = "BRIM_REHEARSAL_DEVICE"
MAX_GPUS = 64
Order = Literal["at_once", "late", "seeded"]

_KIB, _MIB = 1 << 10, 1 << 20

# compute capability: KiB of shared memory of a multiprocessor, of a block (opt-in), threads, blocks of a
# multiprocessor
_MULTIPROCESSORS: Mapping[str, tuple[int, int, int, int]] = {
    "6.0": (64, 48, 2048, 32),
    "6.1": (96, 48, 2048, 32),
    "7.0": (96, 96, 2048, 32),
    "7.5": (64, 64, 1024, 16),
    "8.0": (164, 163, 2048, 32),
    "8.6": (100, 99, 1536, 16),
    **dict.fromkeys(("8.9", "12.0", "12.1"), (100, 99, 1536, 24)),
    **dict.fromkeys(("9.0", "10.0", "10.3"), (228, 227, 2048, 32)),
    "11.0": (228, 227, 1536, 24),
}
# MiB of L2 by architecture, for cards without a figure of their own.
_L2_MIB = {"Pascal": 4, "Volta": 6, "Turing": 4, "Ampere": 6, "Ada": 48, "Hopper": 50, "Blackwell": 64}
_L2_MIB_OF_CAPABILITY = {"8.0": 40, "10.0": 126, "10.3": 126, "11.0": 32, "12.1": 24}


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The simulated GPUs of a rehearsal. ``DeviceSettings.of("H100")`` reads them from the catalog.

    Raises UsageError for a count or an order that is not allowed, and UnsupportedError for a compute capability that
    the device does not simulate.

    Attributes:
        name: The card's name.
        count: The number of GPUs, 1 to 64.
        memory_bytes: The memory of each GPU.
        context_bytes: The CUDA context of a process on each GPU.
        context_source: The source of that figure.
        capability: The compute capability: ``"8.9"``.
        multiprocessors: The number of multiprocessors, which decides the sizes of launches and reductions.
        l2_bytes: The size of the L2 cache, which only autotuning reads.
        copy_limit_bytes: Larger copies to a GPU are skipped, so that weights need no RAM. None: no copy is skipped.
        cudnn_workspace_bytes: The workspace of each cuDNN plan. The real size is not known in general.
        order: The time at which streams execute their work. ``"at_once"``; for tests ``"late"`` (only when the
            program waits for it) or ``"seeded"`` (at random times). The latter two fill memory with invalid values
            until it is valid, and report unordered accesses as hazards.
        seed: The seed of the random times of ``order="seeded"``.
    """

    name: str
    count: int
    memory_bytes: int
    context_bytes: int
    context_source: str
    capability: str
    multiprocessors: int
    l2_bytes: int
    copy_limit_bytes: int | None = None
    cudnn_workspace_bytes: int = 0
    order: Order = "at_once"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_GPUS:
            raise UsageError(f"Cannot rehearse {self.count} GPUs.", f"One process has 1 to {MAX_GPUS}.")
        if self.context_bytes >= self.memory_bytes:
            raise UsageError(
                f"Cannot rehearse a GPU of {format_bytes(self.memory_bytes)}.",
                f"Its context alone takes {format_bytes(self.context_bytes)}.",
                "Give it more memory.",
            )
        if self.capability not in _MULTIPROCESSORS:
            raise UnsupportedError(
                f"Cannot rehearse on {self.name}.",
                f"Its compute capability is {self.capability}.",
                f"The device knows {', '.join(_MULTIPROCESSORS)}.",
            )
        if self.order not in ("at_once", "late", "seeded"):
            raise UsageError(f"Unknown order {self.order!r}.", "Known: at_once, late and seeded.")

    @classmethod
    def of(
        cls,
        card: str | Gpu,
        *,
        gpus: int = 1,
        memory_bytes: int | None = None,
        context_bytes: int | None = None,
        copy_limit_bytes: int | None = None,
        cudnn_workspace_bytes: int = 0,
        order: Order = "at_once",
        seed: int = 0,
        cuda: str = "",
    ) -> Self:
        """Return the settings for a card of the catalog.

        Args:
            card: Its name (``"RTX 4090"``) or its entry; an NVIDIA GPU.
            gpus: The number of GPUs.
            memory_bytes: Memory of each GPU. None: the catalog's.
            context_bytes: The CUDA context on each GPU. None: the catalog's.
            copy_limit_bytes: See the attribute.
            cudnn_workspace_bytes: See the attribute.
            order: See the attribute.
            seed: See the attribute.
            cuda: The CUDA version of the catalog's context: ``"12.8"``. ``""``: the newest that was measured.

        Raises:
            UsageError: The catalog has no such name.
            UnsupportedError: The card is not from NVIDIA.
        """
        entry = gpu(card) if isinstance(card, str) else card
        if entry.vendor != "nvidia" or not entry.compute_capability:
            raise UnsupportedError(
                f"Cannot rehearse on {entry.name}.",
                "The rehearsal device simulates CUDA only.",
                "Name an NVIDIA GPU.",
            )
        context = entry.context(cuda)
        capability = entry.compute_capability
        l2 = _L2_MIB_OF_CAPABILITY.get(capability) or _L2_MIB.get(entry.architecture, 4)
        return cls(
            name=entry.name,
            count=gpus,
            memory_bytes=entry.capacity_bytes if memory_bytes is None else memory_bytes,
            context_bytes=context.bytes if context_bytes is None else context_bytes,
            context_source=context.source if context_bytes is None else "given",
            capability=capability,
            # Unknown only of B300, whose whitepaper names no count: 148 as B200.
            multiprocessors=entry.multiprocessors or 148,
            l2_bytes=l2 * _MIB,
            copy_limit_bytes=copy_limit_bytes,
            cudnn_workspace_bytes=cudnn_workspace_bytes,
            order=order,
            seed=seed,
        )

    def environment(self, libraries: Path, before: Mapping[str, str]) -> dict[str, str]:
        """Return the environment ``before`` with this device; ``libraries`` is the folder of ``build``."""
        paths = [str(libraries), *filter(None, before.get("LD_LIBRARY_PATH", "").split(":"))]
        return {**before, VARIABLE: self._text(), "LD_LIBRARY_PATH": ":".join(dict.fromkeys(paths))}

    def _text(self) -> str:
        """The settings as ``device/settings.c`` reads them."""
        shared, block, threads, blocks = _MULTIPROCESSORS[self.capability]
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        del values["context_source"]
        if self.copy_limit_bytes is None:
            del values["copy_limit_bytes"]
        values |= {
            "name": self.name.replace(";", " "),
            "capability": self.capability.replace(".", ""),
            "shared_per_multiprocessor_bytes": shared * _KIB,
            "shared_per_block_bytes": block * _KIB,
            "threads_per_multiprocessor": threads,
            "blocks_per_multiprocessor": blocks,
        }
        return ";".join(f"{key}={value}" for key, value in values.items())
