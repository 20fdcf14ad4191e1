"""What this machine does, measured once and remembered in the user's cache folder."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import time
import warnings
from pathlib import Path
from typing import Any

from brim import accelerator
from brim.accelerator import Accelerator
from brim.core.hardware import DISK, RAM, VRAM, Hardware, Link, Tier
from brim.errors import FormatError, TransferError, UnsupportedError, UsageError
from brim.measure.capacity import disk_free_bytes, ram_capacity_bytes
from brim.measure.user_cache import cache_folder, keep, kept

# Raised when what is measured, or how, changes: what was remembered before is measured again.
_METHOD = 4
# Processors and memory stay what they are. A drive fills up, wears, and has others who use it.
_DISK_GOOD_FOR_S = 24 * 3600.0
_OF_DISK = ", disk of "  # begins what a source says of it
# When this process measured a disk again, by its own clock: the age of a file depends on the clocks of the system
# and of the server.
_disks_of_today: dict[Path, float] = {}


def probe(*, refresh: bool = False, device: str = "auto", directory: Path | None = None) -> Hardware:
    """Measure what this machine does: memory, disk, links between them, matrix rates. A few seconds the first time.

    The result is remembered in the user's cache folder, by machine, device, driver, PyTorch and filesystem, and the
    disk's part of it for a day. Rates are medians; capacities are read afresh each time. Measuring takes up to 350
    MiB of RAM and 256 MiB of disk for a moment: do it before a run's own memory is watched. A cache that is damaged
    or cannot be written causes a warning and nothing else.

    Args:
        refresh: Measure all again.
        device: ``"auto"`` (CUDA where torch sees it, else the CPU), ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"npu"`` or
            ``"mps"``; of an accelerator, its current device.
        directory: A folder on the disk that models will be read from. None: the user's cache folder, or that of
            PyTorch's libraries where the cache folder cannot be used.

    Returns:
        Tiers with their bytes, links with bytes per second, and operations per second by dtype. ``compute`` is
        ``"vram"`` with an accelerator, else ``"ram"``.

    Raises:
        UsageError: The directory does not exist, or the device is unknown.
        UnsupportedError: The device is not there, or cannot be measured.
        TransferError: The disk failed.
    """
    on = _accelerator(device)
    place = drive_folder() if directory is None else directory
    if not place.is_dir():
        raise UsageError(f"Cannot measure the disk under {place}.", "There is no such directory.")
    facts = _fingerprint(on, place)
    path = _remembered_at(facts)
    remembered = None if refresh else _remembered(path)
    if remembered is not None:
        return _with_capacities(_with_the_disk_of_today(*remembered, path, place), place, on)
    hardware = _measured(on, place, facts)
    _remember(hardware, path)
    return hardware


def _remembered_at(facts: dict[str, Any]) -> Path:
    return cache_folder() / f"hardware-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def _accelerator(device: str) -> Accelerator | None:
    """What ``device`` names; None: the processor. "auto" is what models are computed on."""
    if device == "cpu":
        return None
    import torch

    kinds = accelerator.kinds()
    if device not in ("auto", *kinds):
        raise UsageError(f"Cannot measure device {device!r}.", f"Devices are auto, {', '.join(kinds)} and cpu.")
    accelerator_in_use = accelerator.available(accelerator.CUDA if device == "auto" else device)
    if accelerator_in_use is None and device != "auto":
        name = accelerator.NAMES.get(device, device)
        raise UnsupportedError(
            f"Cannot measure a {name} device.",
            f"torch {torch.__version__} sees none on this machine.",
            f"Use device auto or cpu, or install a build of torch for {name}.",
        )
    return accelerator_in_use


def _with_the_disk_of_today(hardware: Hardware, age_s: float, path: Path, directory: Path) -> Hardware:
    """``hardware`` as it is remembered at ``path``, its disk measured again where that is too long ago.

    One that cannot be measured now (it is full) stays as it is known, with a warning.
    """
    looked_s = _disks_of_today.get(path)
    if 0 <= age_s <= _DISK_GOOD_FOR_S or (looked_s is not None and time.monotonic() - looked_s < _DISK_GOOD_FOR_S):
        return hardware
    _disks_of_today[path] = time.monotonic()
    try:
        links, source = _disk(directory)
    except (TransferError, UsageError) as error:
        warnings.warn(f"The disk's rates are older than a day. {' '.join(str(error).split())}", stacklevel=3)
        return hardware
    others = [link for link in hardware.links if DISK not in (link.source, link.target)]
    tiers = (
        dataclasses.replace(tier, bytes_per_s=links[0].bytes_per_s) if tier.name == DISK else tier
        for tier in hardware.tiers
    )
    source = hardware.source.partition(_OF_DISK)[0] + source
    updated = dataclasses.replace(hardware, tiers=tuple(tiers), links=(*links, *others), source=source)
    _remember(updated, path)
    return updated


def _disk(directory: Path, instead: Path | None = None) -> tuple[list[Link], str]:
    """The links from and to the disk of ``directory``, else from that of ``instead``, and how they were measured."""
    from brim.measure.disk import disk_link, uncached_file, write_link

    with uncached_file(directory, instead=instead) as file:
        links = [disk_link(file), *([write_link(file)] if file.writable else [])]
        way = "O_DIRECT" if file.direct else "dropped page cache"
    return links, f"{_OF_DISK}{file.directory} by {way} on {_today()}"


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _measured(on: Accelerator | None, directory: Path, facts: dict[str, Any]) -> Hardware:
    from brim.measure import bandwidth

    disk, of_disk = _disk(directory, _libraries() if directory == cache_folder() else None)
    tiers = [
        Tier(name=RAM, capacity_bytes=0, bytes_per_s=bandwidth.ram_read_rate()),
        Tier(name=DISK, capacity_bytes=0, bytes_per_s=disk[0].bytes_per_s),
    ]
    links: list[Link] = [*disk, bandwidth.ram_link()]
    if on is not None:
        from brim.measure import device_rates

        with device_rates.unnoticed(on):
            device_rates.warm_clocks(on)
            tiers.insert(0, Tier(name=VRAM, capacity_bytes=0, bytes_per_s=device_rates.vram_read_rate(on)))
            links += device_rates.links(on)
            rates = device_rates.matrix_rates(on)
    else:
        rates = bandwidth.cpu_matrix_rates()
    source = f"measured {_today()}, torch {facts['torch']}{of_disk}"
    hardware = Hardware(
        name=facts["device"] or f"{facts['processor']}, {facts['cores']} cores",
        compute=RAM if on is None else VRAM,
        tiers=tuple(tiers),
        links=tuple(links),
        flops_per_s=rates,
        source=source,
    )
    return _with_capacities(hardware, directory, on)


def _with_capacities(hardware: Hardware, directory: Path, on: Accelerator | None) -> Hardware:
    """The same rates with what the tiers hold today: the disk fills up, a container gets another limit."""
    capacities = {RAM: ram_capacity_bytes(), DISK: disk_free_bytes(directory)}
    if on is not None:
        capacities[VRAM] = on.memory_bytes()[1]
    tiers = tuple(dataclasses.replace(tier, capacity_bytes=capacities[tier.name]) for tier in hardware.tiers)
    return dataclasses.replace(hardware, tiers=tiers)


def _fingerprint(on: Accelerator | None, directory: Path) -> dict[str, Any]:
    """What the figures depend on. Measured again when any of it changes."""
    import psutil
    import torch

    device = driver = ""
    if on is not None:
        from brim.measure.nvml import driver_version

        device, driver = on.name, driver_version() if on.type == accelerator.CUDA else ""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
        "device": device,
        "driver": driver,
        "torch": str(torch.__version__),
        "filesystem": _filesystem(directory),
        "method": _METHOD,
    }


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _filesystem(directory: Path) -> str:
    """Type, device and mount point of the filesystem that holds ``directory``; its device number where not known."""
    import psutil

    resolved = directory.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)]
    if not mounts:
        return f"device {resolved.stat().st_dev}"
    # Of mounts on one place the last listed is the one that is seen.
    mount = max(enumerate(mounts), key=lambda pair: (len(Path(pair[1].mountpoint).parts), pair[0]))[1]
    return f"{mount.fstype} {mount.device} {mount.mountpoint}"


def drive_folder() -> Path:
    """The folder whose disk stands for this machine's where nobody names one: the cache folder, if it can be made."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.scandir(folder).close()
    except OSError:  # code that writes there will report it
        return _libraries()
    return folder


def _libraries() -> Path:
    """PyTorch's: large files that can be read on every machine, also where nothing can be written."""
    import torch

    return Path(torch.__file__).parent / "lib"


def _remembered(path: Path) -> tuple[Hardware, float] | None:
    """What is kept at ``path``, and its age in seconds."""
    try:
        if (content_and_age := kept(path)) is None:
            return None
        hardware = Hardware.from_json(json.loads(content_and_age[0]))
        for name in (hardware.compute, RAM, DISK):
            hardware.tier(name)
    except (FormatError, UsageError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"{path} is damaged, so this machine is measured again. {reason}", stacklevel=3)
        return None
    return hardware, content_and_age[1]


def _remember(hardware: Hardware, path: Path) -> None:
    keep(path, json.dumps(hardware.to_json(), indent=1))
