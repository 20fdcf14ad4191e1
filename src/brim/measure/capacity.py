"""Total and free bytes of each tier, within memory cgroups and ulimits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

from brim import accelerator
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UnsupportedError, UsageError
from brim.units import format_bytes, is_share, parse_bytes

FREE_SHARE = 0.9  # of free memory that budgets take: a single block too many makes a run swap
_PROC = Path("/proc")
# Files of the memory controller's two versions: limit, usage, and the statistics of reclaimable page cache.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
# Limits of ``ulimit`` (-v, -d, -m) in ``resource``, and the field of their use in ``/proc/self/status``.
_ULIMITS = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData", "RLIMIT_RSS": "VmRSS"}


def ram_capacity_bytes(proc: Path = _PROC) -> int:
    """Return the bytes of RAM that this process may use: the machine's, or the limit of a cgroup or ulimit."""
    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for limit, _ in _limits(proc))])


def ram_room_bytes(proc: Path = _PROC) -> int:
    """Return the bytes of RAM that this process may still take before it reaches a limit.

    Memory of other programs counts in a cgroup only; elsewhere they may end or be swapped out.
    """
    total = int(psutil.virtual_memory().total) - resident_bytes()
    return min([total, *(room for _, room in _limits(proc))])


def check_room(budget_bytes: int, held_bytes: int = 0) -> None:
    """Raise UsageError for a budget of RAM with which the process would exceed a limit and be killed.

    ``held_bytes`` of the budget are allocated already.
    """
    room_bytes = ram_room_bytes() + held_bytes
    if budget_bytes > room_bytes:
        raise UsageError(
            f"A budget of {format_bytes(budget_bytes)} of RAM was given.",
            f"This process may use {format_bytes(ram_capacity_bytes())} in all (the machine's RAM, or a limit of "
            f"its cgroup or ulimit), and {format_bytes(room_bytes)} of that are free.",
            f"Give {format_bytes(room_bytes)} or less, or raise the limit.",
        )


def resident_bytes() -> int:
    """Return the resident set of this process."""
    return int(psutil.Process().memory_info().rss)


def disk_free_bytes(directory: Path) -> int:
    """Return the bytes that an unprivileged user can still write on the disk of ``directory``."""
    return shutil.disk_usage(directory).free


def free_bytes(tier: str, *, directory: Path | None = None, proc: Path = _PROC) -> int:
    """Return the free bytes of a tier.

    RAM: MemAvailable, or less below the limit of a cgroup or ulimit (page cache counts as free: the kernel drops it
    before anything fails). VRAM: the driver's free memory on the current CUDA device, or on torch's other
    accelerator, up to the program's memory fraction, plus PyTorch's cached memory. Disk: of ``directory``, or the
    current one. Raises UsageError for any other name, UnsupportedError for VRAM without an accelerator that reports
    it.
    """
    if tier == RAM:
        return min([int(psutil.virtual_memory().available), *(room for _, room in _limits(proc))])
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
    """Return the bytes that a percentage of a tier refers to.

    RAM: all that this process may use. VRAM: all of the current CUDA device, or RAM without one, as models compute
    there then. Disk: the free space of ``directory``.
    """
    if tier != VRAM:
        return ram_capacity_bytes() if tier == RAM else free_bytes(tier, directory=directory)
    device = accelerator.available(accelerator.CUDA)
    return device.memory_bytes()[1] if device is not None else ram_capacity_bytes()


def amount_bytes(amount: str | int, tier: str, *, directory: Path | None = None) -> int:
    """Parse ``"8GiB"`` or ``"80%"`` of a tier to bytes. Raises UsageError for anything else."""
    return parse_bytes(amount, total_bytes(tier, directory=directory) if is_share(amount) else None)


def device_free_bytes(device: accelerator.Accelerator) -> int:
    """Return the free bytes of the current device, as ``free_bytes`` defines them."""
    free, total = device.memory_bytes()
    if not device.counts_memory():
        return free
    reserved = device.reserved_bytes()
    allowed = int(total * device.memory_fraction()) - reserved
    return max(0, min(free, allowed)) + reserved - device.allocated_bytes()


def memory_fraction() -> float:
    """Return the share of the current CUDA device that PyTorch's allocator may take; 1 without a limit."""
    device = accelerator.available(accelerator.CUDA)
    return 1.0 if device is None else device.memory_fraction()


def _limits(proc: Path) -> Iterator[tuple[int, int]]:
    """Iterate over (limit, remaining) bytes of all limits of this process's memory."""
    yield from _cgroup_limits(proc)
    try:
        import resource
    except ImportError:  # Windows
        return
    status = dict(line.split(":", 1) for line in _text(proc / "self/status").splitlines() if ":" in line)
    for name, used in _ULIMITS.items():
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            used_bytes = int(status.get(used, "0").split()[0]) * 1024  # proc_pid_status(5)
            yield limit, max(0, limit - used_bytes)


def _cgroup_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """Iterate over (limit, remaining) bytes of the memory cgroups above this process that set one."""
    for folder, version in cgroup_folders(proc):
        limit_name, usage_name, cache_keys = _FILES[version]
        limit_text = _text(folder / limit_name).strip()
        if not limit_text.isdigit() or int(limit_text) >= 1 << 60:  # "max", or version 1's number for no limit
            continue
        limit = int(limit_text)
        statistics = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
        cache = sum(int(statistics.get(key, 0)) for key in cache_keys)
        usage = int(_text(folder / usage_name).strip() or 0)
        yield limit, min(limit, max(0, limit - usage + cache))


def cgroup_folders(proc: Path) -> Iterator[tuple[Path, str]]:
    """Iterate over this process's memory cgroup and its mounted ancestors, with the version's name."""
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
        # In a container the path may be one of the host, outside the mounted part.
        inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for depth in range(len(inside.parts) + 1):
            yield mount.joinpath(*inside.parts[:depth]), version


def _text(path: Path) -> str:
    """Return the file's text, "" if the kernel has no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
