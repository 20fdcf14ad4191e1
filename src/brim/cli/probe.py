"""``brim probe``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.options import command, json_field, print_json
from brim.core.options import option
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.core.hardware import Hardware, Link


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The options of ``brim probe``."""

    as_json: bool = json_field()
    device: str = option(
        "auto",
        "The device to measure: cpu, or an accelerator (cuda, xpu, npu, mps); auto takes CUDA if torch sees it.",
    )
    refresh: bool = option(False, "Measure again even if this machine was measured before.")
    directory: Path | None = option(
        None, "Measure the disk of this directory, from which models will be read; by default the cache folder."
    )


@command(ProbeOptions)
def probe(options: ProbeOptions) -> None:
    """Measure this machine: memory, disk, links, matrix rates.

    This takes a few seconds. The result is stored in the cache folder and used by all other commands.
    """
    from brim.cli.console import Console
    from brim.measure.probe import probe as measure

    with Console(stderr=True).status("Measuring this machine"):
        hardware = measure(refresh=options.refresh, device=options.device, directory=options.directory)
    if options.as_json:
        print_json(hardware.to_json())
    else:
        _print(hardware)


def _print(hardware: Hardware) -> None:
    from brim.cli.console import Console

    console = Console(highlight=False)
    console.print(f"{hardware.name}\n{hardware.source}\ncompute tier: {hardware.compute}")
    tiers = ((tier.name, format_bytes(tier.capacity_bytes), _rate(tier.bytes_per_s)) for tier in hardware.tiers)
    console.print_table(("tier", "capacity", "read by one kernel"), tiers)
    links = (
        (
            f"{link.source} -> {link.target}",
            _rate(link.bytes_per_s),
            _rate(link.duplex_bytes_per_s),
            _rate(link.single_bytes_per_s),
            _requests(link),
            format_seconds(link.latency_s) if link.latency_s else "-",
        )
        for link in hardware.links
    )
    console.print_table(("link", "alone", "both ways at once", "one at a time", "best requests", "latency"), links)
    rates = (
        (dtype, f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s")
        for dtype, rate in hardware.flops_per_s.items()
    )
    console.print_table(("dtype", "matrix rate"), rates)


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s" if bytes_per_s else "-"


def _requests(link: Link) -> str:
    size = f" of {format_bytes(link.chunk_bytes)}" if link.chunk_bytes else ""
    return f"{link.concurrency}{size}"
