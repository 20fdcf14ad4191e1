"""Measure this machine once, and store the result in the user's cache folder."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import os
import platform
import warnings
from pathlib import Path
from typing import Any

from brim import accelerator
from brim.accelerator import Accelerator
from brim.core.hardware import DISK, RAM, VRAM, Hardware, Link, Tier
from brim.errors import FormatError, UnsupportedError, UsageError
from brim.measure.capacity import disk_free_bytes, ram_capacity_bytes
from brim.measure.user_cache import cache_folder, load_text, store_text

# Incremented when the measurements change, so that stored ones are repeated.
_METHOD = 5


def probe(*, refresh: bool = False, device: str = "auto", directory: Path | None = None) -> Hardware:
    """Measure this machine: memory, disk, links between them, kernels. It takes some seconds the first time.

    The result is stored in the user's cache folder by machine, device, driver, PyTorch and filesystem. Rates are
    medians; capacities are read each time. Measuring briefly takes up to 350 MiB of RAM and 256 MiB of disk, so do
    it before you watch a run's memory. A cache that is damaged or not writable causes only a warning.

    Args:
        refresh: Measure again, even if there is a stored result.
        device: ``"auto"`` (CUDA if torch sees it, else the CPU), ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"npu"`` or
            ``"mps"``; of an accelerator, its current device.
        directory: A folder on the disk from which models will be read. None: the user's cache folder, or that of
            PyTorch's libraries if the cache folder cannot be used.

    Returns:
        Tiers with their bytes, links with bytes per second, and operations per second by dtype. ``compute`` is
        ``"vram"`` with an accelerator, else ``"ram"``.

    Raises:
        UsageError: The directory does not exist, or the device is unknown.
        UnsupportedError: The device is missing, or cannot be measured.
        TransferError: The disk failed.
    """
    on = _accelerator(device)
    place = drive_folder() if directory is None else directory
    if not place.is_dir():
        raise UsageError(f"Cannot measure the disk under {place}.", "There is no such directory.")
    facts = _fingerprint(on, place)
    path = _cache_file(facts)
    stored = None if refresh else _load(path)
    if stored is not None:
        return _with_capacities(stored, place, on)
    hardware = _measure(on, place, facts)
    _store(hardware, path)
    return hardware


def known(device: str) -> Hardware:
    """Return a machine with its present capacities, and with the rates that were measured before."""
    on, place = _accelerator(device), drive_folder()
    facts = _fingerprint(on, place)
    stored = _load(_cache_file(facts))
    names = (RAM, DISK) if on is None else (VRAM, RAM, DISK)
    tiers = tuple(Tier(name=name, capacity_bytes=0) for name in names)
    hardware = stored or Hardware(name=_name(facts), compute=names[0], tiers=tiers)
    return _with_capacities(hardware, place, on)


def _name(facts: dict[str, Any]) -> str:
    return facts["device"] or f"{facts['processor']}, {facts['cores']} cores"


def _cache_file(facts: dict[str, Any]) -> Path:
    return cache_folder() / f"hardware-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def _accelerator(device: str) -> Accelerator | None:
    """Return the accelerator that ``device`` names, None for the processor."""
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


def _measure_disk(directory: Path, instead: Path | None) -> tuple[list[Link], str]:
    """Measure the links of the disk of ``directory``, else of ``instead``; return them and their source."""
    from brim.measure.disk import disk_link, uncached_file, write_link

    with uncached_file(directory, instead=instead) as file:
        links = [disk_link(file), *([write_link(file)] if file.writable else [])]
        method = "O_DIRECT" if file.direct else "dropped page cache"
    return links, f", disk of {file.directory} by {method} on {_today()}"


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _measure(on: Accelerator | None, directory: Path, facts: dict[str, Any]) -> Hardware:
    from brim.measure import bandwidth

    disk, of_disk = _measure_disk(directory, _libraries() if directory == cache_folder() else None)
    tiers = [
        Tier(name=RAM, capacity_bytes=0, bytes_per_s=bandwidth.ram_read_rate()),
        Tier(name=DISK, capacity_bytes=0, bytes_per_s=disk[0].bytes_per_s),
    ]
    links: list[Link] = [*disk, bandwidth.ram_link()]
    kernels: dict[str, Any] = {}
    if on is not None:
        from brim.measure import device_rates

        with device_rates.unnoticed(on):
            device_rates.warm_clocks(on)
            tiers.insert(0, Tier(name=VRAM, capacity_bytes=0, bytes_per_s=device_rates.vram_read_rate(on)))
            links += device_rates.links(on)
            rates = device_rates.matrix_rates(on)
            if on.type == accelerator.CUDA:
                shares = device_rates.kernel_shares(on, rates, tiers[0].bytes_per_s)
                kernels = {"shares": shares, "dispatch_s": device_rates.dispatch_s(on)}
    else:
        rates = bandwidth.cpu_matrix_rates()
    source = f"measured {_today()}, torch {facts['torch']}{of_disk}"
    hardware = Hardware(
        name=_name(facts),
        compute=RAM if on is None else VRAM,
        tiers=tuple(tiers),
        links=tuple(links),
        flops_per_s=rates,
        source=source,
        **kernels,
    )
    return _with_capacities(hardware, directory, on)


def _with_capacities(hardware: Hardware, directory: Path, on: Accelerator | None) -> Hardware:
    """Return ``hardware`` with current capacities: a disk fills up, a container gets another limit."""
    capacities = {RAM: ram_capacity_bytes(), DISK: disk_free_bytes(directory)}
    if on is not None:
        capacities[VRAM] = on.memory_bytes()[1]
    tiers = tuple(dataclasses.replace(tier, capacity_bytes=capacities[tier.name]) for tier in hardware.tiers)
    return dataclasses.replace(hardware, tiers=tiers)


def _fingerprint(on: Accelerator | None, directory: Path) -> dict[str, Any]:
    """Return the facts that the figures depend on; a change of one causes a new measurement."""
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
    """Return type, device and mount point of the filesystem of ``directory``, else its device number."""
    import psutil

    resolved = directory.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)]
    if not mounts:
        return f"device {resolved.stat().st_dev}"
    # Of several mounts on one path, the last listed is visible.
    mount = max(enumerate(mounts), key=lambda pair: (len(Path(pair[1].mountpoint).parts), pair[0]))[1]
    return f"{mount.fstype} {mount.device} {mount.mountpoint}"


def drive_folder() -> Path:
    """Return the folder whose disk is measured by default: the cache folder if it can be created."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.scandir(folder).close()
    except OSError:  # code that writes there will report it
        return _libraries()
    return folder


def _libraries() -> Path:
    """Return the folder of PyTorch's libraries: large files that every machine has."""
    import torch

    return Path(torch.__file__).parent / "lib"


def _load(path: Path) -> Hardware | None:
    """Return the hardware stored at ``path``."""
    try:
        if (content := load_text(path)) is None:
            return None
        hardware = Hardware.from_json(json.loads(content))
        for name in (hardware.compute, RAM, DISK):
            hardware.tier(name)
        rates = [tier.bytes_per_s for tier in hardware.tiers] + [link.bytes_per_s for link in hardware.links]
        rates.append(max(hardware.flops_per_s.values(), default=0.0))
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError("A rate in it is not above zero.")
    except (FormatError, UsageError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"{path} is damaged, so this machine is measured again. {reason}", stacklevel=3)
        return None
    return hardware


def _store(hardware: Hardware, path: Path) -> None:
    store_text(path, json.dumps(hardware.to_json(), indent=1))
