"""How many bytes each tier has and how many are free now, within what a memory cgroup allows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

from brim import accelerator
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UnsupportedError, UsageError
from brim.units import is_share, parse_bytes

_PROC = Path("/proc")
# What files the two versions of the memory controller keep: limit, usage, and statistics of reclaimable page cache.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def ram_capacity_bytes(proc: Path = _PROC) -> int:
    """Bytes of RAM that this process may use: the machine's, or a memory cgroup's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for limit, _ in _cgroup_limits(proc))])


def resident_bytes() -> int:
    """The resident set of this process now."""
    return int(psutil.Process().memory_info().rss)


def disk_free_bytes(directory: Path) -> int:
    """Bytes that a user without privileges can still write on the disk of ``directory``."""
    return shutil.disk_usage(directory).free


def free_bytes(tier: str, *, directory: Path | None = None, proc: Path = _PROC) -> int:
    """Bytes of a tier that nobody uses at this moment.

    RAM: MemAvailable, or what is left below a cgroup's limit where that is less (page cache counts as free: the
    kernel drops it before anything fails). VRAM: what the driver says is free on the current device of CUDA, or
    of the accelerator that torch has instead, up to the memory fraction that the program has set, plus what PyTorch
    holds reserved but unused. Disk: of ``directory``, or the current one. Raises UsageError for any other name,
    UnsupportedError for VRAM without an accelerator, or one that does not tell.
    """
    if tier == RAM:
        return min([int(psutil.virtual_memory().available), *(room for _, room in _cgroup_limits(proc))])
    if tier == DISK:
        return disk_free_bytes(directory or Path.cwd())
    if tier == VRAM:
        device = accelerator.available()
        if device is None:
            raise UnsupportedError(
                "Cannot measure the free bytes of VRAM.", "torch sees no accelerator on this machine."
            )
        return device_free_bytes(device)
    raise UsageError(f"Cannot measure the free bytes of tier {tier!r}.", f"Tiers are {VRAM}, {RAM} and {DISK}.")


def total_bytes(tier: str, *, directory: Path | None = None) -> int:
    """What a percentage of a tier is of: all RAM that this process may use, all VRAM of the current CUDA device (of
    RAM where torch sees none, as that is where a model computes then), of a disk what is free in ``directory``.
    """
    if tier != VRAM:
        return ram_capacity_bytes() if tier == RAM else free_bytes(tier, directory=directory)
    device = accelerator.available(accelerator.CUDA)
    return device.memory_bytes()[1] if device is not None else ram_capacity_bytes()


def amount_bytes(amount: str | int, tier: str, *, directory: Path | None = None) -> int:
    """``"8GiB"`` or ``"80%"`` of a tier in bytes. Raises UsageError for what is neither."""
    return parse_bytes(amount, total_bytes(tier, directory=directory) if is_share(amount) else None)


def device_free_bytes(device: accelerator.Accelerator) -> int:
    """``free_bytes`` of its current device."""
    free, total = device.memory_bytes()
    if not device.counts_memory():
        return free
    reserved = device.reserved_bytes()
    allowed = int(total * device.memory_fraction()) - reserved
    return max(0, min(free, allowed)) + reserved - device.allocated_bytes()


def memory_fraction() -> float:
    """How much of the current CUDA device the program lets PyTorch's allocator have; 1 where it has another one."""
    device = accelerator.available(accelerator.CUDA)
    return 1.0 if device is None else device.memory_fraction()


def _cgroup_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) in bytes for every memory cgroup above this process that sets one."""
    for folder, version in cgroup_folders(proc):
        limit_name, usage_name, cache_keys = _FILES[version]
        limit_text = _text(folder / limit_name).strip()
        if not limit_text.isdigit() or int(limit_text) >= 1 << 60:  # "max", or what version 1 writes for no limit
            continue
        limit = int(limit_text)
        statistics = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
        cache = sum(int(statistics.get(key, 0)) for key in cache_keys)
        usage = int(_text(folder / usage_name).strip() or 0)
        yield limit, min(limit, max(0, limit - usage + cache))


def cgroup_folders(proc: Path) -> Iterator[tuple[Path, str]]:
    """This process's memory cgroup and its ancestors, as far up as they are mounted, with the version's name."""
    paths: dict[str, PurePosixPath] = {}
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            paths["cgroup2"] = PurePosixPath(place)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(place)
    for line in _text(proc / "self/mountinfo").splitlines():
        fields, _, tail = line.partition(" - ")
        version, _, options = tail.partition(" ")
        if version not in paths or (version == "cgroup" and "memory" not in options.split(" ")[-1].split(",")):
            continue
        root, mount = PurePosixPath(fields.split(" ")[3]), Path(fields.split(" ")[4])
        path = paths[version]
        # In a container the path may name a place of the host's that is not below what is mounted here.
        inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for depth in range(len(inside.parts) + 1):
            yield mount.joinpath(*inside.parts[:depth]), version


def _text(path: Path) -> str:
    """The file's text, or nothing where the kernel (or the operating system) has no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
