"""The cause of an out-of-memory message, by its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum

from brim.report import read_table
from brim.units import GIB, MIB, format_bytes

CONTEXT_BYTES = 600 * MIB  # of a CUDA context, if the message does not say
SHARE_OF_OTHERS = 0.15  # of the device: a desktop or a context takes less
SHARE_OF_FRAGMENTS = 0.2  # of reserved memory: rounding leaves less unallocated, ...
FRAGMENTS_BYTES = GIB  # ... and less than this
UNSET_BYTES = 1 << 50  # more than any machine has: printed for an absent limit or an unknown number
REMAINDER_SHARE = 1 / 64  # of the device: a driver's own reserve when it is full
REMAINDER_BYTES = 256 * MIB
NEARLY_FULL_SHARE = 1 / 16  # of the device: briefly free while others allocate


class Cause(StrEnum):
    EXHAUSTED = "exhausted"  # the run needs more than there is
    TOO_LARGE = "too_large"  # one request is larger than the whole device
    FRAGMENTATION = "fragmentation"  # enough is free, but not in one piece
    OTHER_PROCESS = "other_process"
    MEMORY_FRACTION = "memory_fraction"  # a limit below the device's size
    PRIVATE_POOLS = "private_pools"  # kept for CUDA graphs
    ADDRESS_SPACE = "address_space"  # virtual addresses, not memory
    SPILL = "spill"  # the driver counts system memory as the device's
    MISLEADING_FREE = "misleading_free"  # more is said to be free than was asked
    HOST_MEMORY = "host_memory"  # RAM, not the device's memory
    ALLOCATOR = "allocator"  # a custom allocator said no
    UNKNOWN = "unknown"  # the message is of no known kind


_BY_FAMILY = {
    family: (Cause(cause), text)
    for cause, texts in read_table("advice.toml")["why"].items()
    for family, text in texts.items()
}


def find_cause(family: str, numbers: Mapping[str, int], text: str, device: str) -> tuple[Cause, str]:
    """Return the cause, and a sentence about it. Without numbers only the family, or the ``text``, shows it."""
    if "THCCachingHostAllocator" in text:
        return Cause.HOST_MEMORY, "Pinned host memory could not be allocated: RAM or the limit of locked memory."
    if numbers.get("tried", 0) >= UNSET_BYTES:
        return Cause.TOO_LARGE, (
            f"{format_bytes(numbers['tried'])} were requested, more than any machine has: a shape is wrong, or its "
            "size overflowed."
        )
    if family == "llama.cpp" and device == "cpu":
        return Cause.HOST_MEMORY, _of_ram(numbers)
    if family == "dataloader":
        what = "shared memory (/dev/shm)" if is_shared_memory(text) else "RAM"
        return Cause.HOST_MEMORY, f"The system ended a DataLoader worker, or gave it no memory: {what} ran out."
    if family == "linux-oom-killer":
        return _of_linux(numbers, text)
    if "in memory space vmem" in text or "in memory space smem" in text:
        return (
            Cause.TOO_LARGE,
            "A kernel needs more of a core's own memory than the core has: its blocks are too large.",
        )
    if family in _BY_NUMBERS:
        return _BY_NUMBERS[family](numbers)
    if family in _BY_FAMILY and not (family == "torch-cudaMallocAsync" and "total" in numbers):
        return _BY_FAMILY[family]
    tried, total, free = numbers.get("tried", 0), numbers.get("total", 0), numbers.get("free")
    if family == "vllm" and "wanted" in numbers and free is not None:
        return _at_start(numbers["wanted"], total, free)
    cause = _by_limits(numbers, tried, total, free, text)
    if cause is None and free is not None and total:
        cause = _by_holders(numbers, tried, total, free)
    return cause or _in_pool(numbers, tried) or (Cause.EXHAUSTED, _full(numbers, tried, total, free))


def is_shared_memory(text: str) -> bool:
    """Return whether a DataLoader's message is about the memory that it shares with its workers."""
    return re.search(r"Bus error|shared memory|unable to (?:mmap|open|resize|write)", text) is not None


def _of_linux(numbers: Mapping[str, int], text: str) -> tuple[Cause, str]:
    if "limit" in numbers:
        return Cause.HOST_MEMORY, (
            f"The container or job had used all of its {format_bytes(numbers['limit'])} of RAM, and Linux killed "
            f"the process."
        )
    if re.search(r"CONSTRAINT_MEMCG|Memory cgroup out of memory", text):
        return (
            Cause.HOST_MEMORY,
            "The container or job had used all of the RAM that it may have: Linux killed the process.",
        )
    if re.search(r"CONSTRAINT_NONE|global_oom", text):
        return Cause.HOST_MEMORY, "The whole machine ran out of RAM, and Linux killed the process."
    return Cause.HOST_MEMORY, "The machine or its container ran out of RAM, and Linux killed the process."


def _of_ray(numbers: Mapping[str, int]) -> tuple[Cause, str]:
    if "used" in numbers and "total" in numbers:
        return Cause.HOST_MEMORY, (
            f"{format_bytes(numbers['used'])} of the node's {format_bytes(numbers['total'])} of RAM were in use, "
            "more than Ray's memory monitor allows: it ended a worker before Linux had to."
        )
    return (
        Cause.HOST_MEMORY,
        "The node's RAM was nearly full: Ray's memory monitor ended a worker before Linux had to.",
    )


def _of_ollama(numbers: Mapping[str, int]) -> tuple[Cause, str]:
    needed, available = numbers.get("needed", 0), numbers.get("available", 0)
    return Cause.HOST_MEMORY, (
        f"The part of the model that does not fit on the GPU needs {format_bytes(needed)} of RAM, and "
        f"{format_bytes(available)} are available."
    )


def _of_lm_studio(numbers: Mapping[str, int]) -> tuple[Cause, str]:
    needs = f" of {format_bytes(numbers['needed'])}" if "needed" in numbers else ""
    return (
        Cause.HOST_MEMORY,
        f"LM Studio did not load the model: its estimate{needs} is more than RAM and GPU have left.",
    )


def _of_tpu(numbers: Mapping[str, int]) -> tuple[Cause, str]:
    """Return the cause on a TPU, whose program needs contiguous memory."""
    tried, free = numbers.get("tried", 0), numbers.get("free")
    if free is None:
        return Cause.EXHAUSTED, "The compiled program needs more memory than one device has."
    if free >= tried > 0:
        piece = f", {format_bytes(numbers['reservable'])} of it in one piece" if "reservable" in numbers else ""
        return Cause.FRAGMENTATION, (
            f"{format_bytes(free)} are free{piece}; {format_bytes(tried)} were requested in one piece: "
            f"arrays are between the free pieces."
        )
    return Cause.EXHAUSTED, f"{format_bytes(tried)} were requested, and {format_bytes(free)} are free on the device."


def _of_mlx(numbers: Mapping[str, int]) -> tuple[Cause, str]:
    tried, largest = numbers.get("tried", 0), numbers.get("largest_buffer", 0)
    if tried > largest > 0:
        return Cause.TOO_LARGE, (
            f"One array of {format_bytes(tried)} is larger than Metal's largest buffer ({format_bytes(largest)})."
        )
    return Cause.EXHAUSTED, "The GPU can take no more of the RAM that it shares with the CPU."


def _of_hami(numbers: Mapping[str, int]) -> tuple[Cause, str]:
    limit = format_bytes(numbers.get("limit", 0))
    if "needed" not in numbers:
        return Cause.MEMORY_FRACTION, (
            f"HAMi lets the container use {limit} of the GPU, and its count of used memory is below zero: the count "
            "is wrong, not the program."
        )
    return Cause.MEMORY_FRACTION, (
        f"HAMi lets the container use {limit} of the GPU; with this request it would have "
        f"{format_bytes(numbers['needed'])}."
    )


def _of_other(numbers: Mapping[str, int]) -> tuple[Cause, str]:
    sizes = "its sizes are those below" if numbers else "it has no sizes"
    return Cause.UNKNOWN, f"An unknown message says that memory ran out; {sizes}."


_BY_NUMBERS: dict[str, Callable[[Mapping[str, int]], tuple[Cause, str]]] = {
    "ray": _of_ray,
    "ollama": _of_ollama,
    "lm-studio": _of_lm_studio,
    "jax-tpu": _of_tpu,
    "mlx": _of_mlx,
    "hami": _of_hami,
    "other": _of_other,
}


def _of_ram(numbers: Mapping[str, int]) -> str:
    tried = numbers.get("tried") or numbers.get("tried_rounded")
    asked = f" {format_bytes(tried)} were requested." if tried else ""
    return f"RAM ran out: the buffer is in host memory, not on the GPU.{asked}"


def _in_pool(numbers: Mapping[str, int], tried: int) -> tuple[Cause, str] | None:
    """Return fragmentation if the pool of XLA's or TensorFlow's allocator has enough free bytes."""
    limit, allocated = numbers.get("limit", 0), numbers.get("allocated")
    if allocated is None or not 0 < tried <= limit - allocated:
        return None
    return Cause.FRAGMENTATION, (
        f"{format_bytes(limit - allocated)} of the pool are free, but in pieces, all smaller than the requested "
        f"{format_bytes(tried)}."
    )


def _full(numbers: Mapping[str, int], tried: int, total: int, free: int | None) -> str:
    """Return a sentence about the users of the device's memory."""
    own = reserved_bytes(numbers)
    process = numbers.get("process", 0)
    outside = process - own
    if outside >= max(GIB, own // 4) and own:
        return (
            f"The run needs more memory than is left. {format_bytes(outside)} of the process lie outside PyTorch's "
            "allocator: libraries, NCCL, CUDA graphs or another framework."
        )
    if numbers.get("allocated") == 0 and (held := sum(_listed(numbers)) or process):
        return (
            f"PyTorch has allocated nothing: {format_bytes(held)} are used outside of its allocator, by the "
            "process's libraries or by another process."
        )
    if "other_allocations" in numbers and "allowed" in numbers:
        return (
            f"PyTorch may use {format_bytes(numbers['allowed'])}, and it uses "
            f"{format_bytes(numbers.get('allocated', 0))} and other programs "
            f"{format_bytes(numbers['other_allocations'])}."
        )
    unmapped = ""
    if numbers.get("allocated", 0) > total > 0:
        unmapped = (
            f" PyTorch counts {format_bytes(numbers['allocated'])} as allocated on a device of "
            f"{format_bytes(total)}: some of it was unmapped, as by the sleep mode of vLLM and SGLang, but PyTorch "
            "still counts it."
        )
    if free is not None and numbers.get("allocated"):
        in_use = min(numbers["allocated"], process or numbers["allocated"]) if unmapped else numbers["allocated"]
        left = (
            f"only {format_bytes(free)} are free"
            if free < tried or not tried
            else f"{format_bytes(free)} are free, of which the driver keeps a part for itself"
        )
        return (
            f"The run needs more memory than is left: {format_bytes(in_use)} are in use, {left}, and "
            f"{format_bytes(unallocated_bytes(numbers))} cached.{unmapped}"
        )
    return f"The run needs more memory than is left.{unmapped}"


def _at_start(wanted: int, total: int, free: int) -> tuple[Cause, str]:
    """Return the cause for a server that reserves a share of the device when it starts."""
    if total - free >= SHARE_OF_OTHERS * total:
        return (
            Cause.OTHER_PROCESS,
            f"Other processes used {format_bytes(total - free)} of the device before the start; "
            f"{format_bytes(wanted)} were requested.",
        )
    return (
        Cause.MEMORY_FRACTION,
        f"The requested share, {format_bytes(wanted)}, is more than is free ({format_bytes(free)}).",
    )


# Allocators that map and unmap memory below PyTorch's, and programs that use them.
_UNMAPS = re.compile(r"cumem|CuMemAllocator|sleep[_ ]mode|wake_up|torch_memory_saver|release_memory_occupation")


def _by_limits(
    numbers: Mapping[str, int], tried: int, total: int, free: int | None, text: str
) -> tuple[Cause, str] | None:
    """Return a cause that does not depend on the owners of the memory."""
    if total and tried > total:
        return (
            Cause.TOO_LARGE,
            f"One request of {format_bytes(tried)} is larger than the device ({format_bytes(total)}).",
        )
    used = max(numbers.get("process", 0), numbers.get("allocated", 0), numbers.get("reserved", 0))
    # What the driver counts is there; what PyTorch counts may have been unmapped below it.
    counted = numbers.get("process") or sum(_listed(numbers))
    if total and used > total and (counted > total or (not counted and not _UNMAPS.search(text))):
        return Cause.SPILL, (
            f"{format_bytes(used)} are in use on a device of {format_bytes(total)}: the driver has moved the rest to "
            "system memory, which is slow, and then found no more."
        )
    if (allowed := numbers.get("allowed")) is not None and free is not None and free >= tried:
        return Cause.MEMORY_FRACTION, (
            f"The process may use {format_bytes(allowed)} only, while {format_bytes(free)} of the device are free."
        )
    return None


def _by_holders(numbers: Mapping[str, int], tried: int, total: int, free: int) -> tuple[Cause, str] | None:
    """Return the cause by the owners of the memory; of several, the one with most bytes."""
    own = reserved_bytes(numbers)
    others = other_processes_bytes(numbers, total, free)
    remainder = min(REMAINDER_BYTES, int(REMAINDER_SHARE * total))
    filled_by_others = others >= SHARE_OF_OTHERS * total and free < NEARLY_FULL_SHARE * total
    is_free = own < total // 2 or free - tried > remainder  # else: full except for a little
    if tried and free >= tried and is_free and not filled_by_others:
        return Cause.MISLEADING_FREE, (
            f"The message says that {format_bytes(free)} are free, but {format_bytes(tried)} were refused: the free "
            "memory is in pieces, or includes memory that others may claim (Windows, WSL, GPUs that share the RAM), "
            "or the process has its own limit (a share of the GPU, a container's RAM)."
        )
    private, unallocated = numbers.get("private_pools", 0), unallocated_bytes(numbers)
    possible: list[tuple[int, Cause, str]] = []
    if others >= max(tried, int(SHARE_OF_OTHERS * total)):
        known = "process" in numbers or _listed(numbers)
        who = "Other processes" if known else "Others (processes, or what lies in RAM that the GPU shares)"
        text = f"{who} hold {format_bytes(others)} of the device; without them the request would fit."
        possible.append((others, Cause.OTHER_PROCESS, text))
    if _is_much(private, own) and private + free >= tried:
        text = f"{format_bytes(private)} are free in private pools (CUDA graphs), which nothing else may use."
        possible.append((private, Cause.PRIVATE_POOLS, text))
    if _is_fragmented(unallocated, own, tried, free):
        possible.append((unallocated, Cause.FRAGMENTATION, _fragmented(unallocated, tried, free)))
    if not possible:
        return None
    _, cause, text = max(possible, key=lambda cause: cause[0])
    return cause, text


def _is_much(count: int, reserved: int) -> bool:
    """Return whether ``count`` is more than a healthy run leaves unused."""
    return count > 0 and count >= min(SHARE_OF_FRAGMENTS * reserved, FRAGMENTS_BYTES)


def _is_fragmented(unallocated: int, reserved: int, tried: int, free: int) -> bool:
    """Return whether free pieces suffice, or are a fifth of the reserve and, with free memory, half the request."""
    if unallocated >= tried:
        return _is_much(unallocated, reserved)
    return unallocated >= max(SHARE_OF_FRAGMENTS * reserved, 1) and unallocated + free >= tried // 2


def _fragmented(unallocated: int, tried: int, free: int) -> str:
    short = tried - unallocated - free
    enough = "" if short <= 0 else f" (together with the free memory still {format_bytes(short)} too few)"
    return (
        f"{format_bytes(unallocated)} are reserved but unallocated, in pieces smaller than the requested "
        f"{format_bytes(tried)}{enough}."
    )


def reserved_bytes(numbers: Mapping[str, int]) -> int:
    """Return the bytes reserved by PyTorch's allocator."""
    return unallocated_bytes(numbers) + numbers.get("allocated", 0) + numbers.get("private_pools", 0)


def unallocated_bytes(numbers: Mapping[str, int]) -> int:
    """Return the bytes reserved by PyTorch and not in use."""
    if "unallocated" in numbers:
        return numbers["unallocated"]
    if "reserved" in numbers:
        return max(numbers["reserved"] - numbers.get("allocated", 0), 0)
    return numbers.get("cached", 0)  # PyTorch before 1.4 printed the unused cache


def other_processes_bytes(numbers: Mapping[str, int], total: int, free: int) -> int:
    """Return the bytes of other processes. In a container, this one is the listed process that fits best."""
    own = reserved_bytes(numbers)
    if "process" in numbers:
        return max(total - free - numbers["process"], 0)
    if listed := _listed(numbers):
        mine = min((count for count in listed if count >= own), default=max(listed) if own > total else 0)
        return sum(listed) - mine
    return max(total - free - own - min(CONTEXT_BYTES, total // 8), 0) if total >= GIB else 0


def _listed(numbers: Mapping[str, int]) -> list[int]:
    """Return the driver's bytes of each process."""
    return [count for name, count in numbers.items() if name.startswith("process_")]
