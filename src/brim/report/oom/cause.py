"""Why memory ran out, from the numbers of a message."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from brim.units import GIB, MIB, format_bytes

CONTEXT_BYTES = 600 * MIB  # about what a CUDA context takes when the message does not say
SHARE_OF_OTHERS = 0.15  # of the device: what a desktop or a context takes is less
SHARE_OF_FRAGMENTS = 0.2  # of what is reserved: what rounding leaves unallocated is less, ...
FRAGMENTS_BYTES = GIB  # ... and less than this
UNSET_BYTES = 1 << 62  # larger numbers are how an absent limit is printed


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


_BY_FAMILY = {
    "torch-cuda-address-space": (Cause.ADDRESS_SPACE, "Expandable segments have reserved all virtual addresses."),
    "torch-cuda-segment-reserve": (
        Cause.ADDRESS_SPACE,
        "The request is larger than the addresses that one expandable segment may reserve.",
    ),
    "torch-cuda-mempool": (
        Cause.ALLOCATOR,
        "The allocator of a MemPool gave nothing; free memory was not asked for.",
    ),
    "torch-cuda-impossible": (Cause.TOO_LARGE, "More than an exabyte was asked for: a shape is wrong."),
    "torch-cpu": (Cause.HOST_MEMORY, "RAM is exhausted; the GPU has no part in it."),
    "dataloader": (
        Cause.HOST_MEMORY,
        "The system killed a DataLoader worker: RAM or shared memory (/dev/shm) ran out.",
    ),
    "llama.cpp-pinned": (
        Cause.HOST_MEMORY,
        "Pinned host memory could not be allocated: RAM or the limit of locked memory.",
    ),
    "torch-cublas": (
        Cause.EXHAUSTED,
        "The GPU is full: the library asks for its handle or workspace outside PyTorch's allocator, whose cached "
        "memory it cannot use.",
    ),
    "torch-cuda-library": (
        Cause.EXHAUSTED,
        "The GPU is full: the library asks for its workspace outside PyTorch's allocator, whose cached memory it "
        "cannot use.",
    ),
    "torch-cuda-runtime": (
        Cause.EXHAUSTED,
        "The driver had no memory for something outside PyTorch's allocator (a context, a library, pinned memory), "
        "or another process holds it: the message gives no numbers.",
    ),
    "numpy": (Cause.HOST_MEMORY, "RAM is exhausted; the GPU has no part in it."),
    "host": (Cause.HOST_MEMORY, "RAM is exhausted; the GPU has no part in it."),
    "linux-oom-killer": (
        Cause.HOST_MEMORY,
        "Linux ran out of RAM, or the container of its share, and killed the process.",
    ),
    "triton": (
        Cause.TOO_LARGE,
        "A kernel needs more shared memory per block than the GPU has: its tiles are too large, not the model.",
    ),
    "sglang": (
        Cause.EXHAUSTED,
        "The weights leave no room for the KV cache in the share of the device that was given.",
    ),
    "torch-cudnn": (Cause.EXHAUSTED, "The GPU is full: cuDNN's own memory lies outside PyTorch's allocator."),
    "torch-nccl": (Cause.EXHAUSTED, "The GPU is full: NCCL's buffers lie outside PyTorch's allocator."),
}


def find_cause(family: str, numbers: Mapping[str, int], text: str = "") -> tuple[Cause, str]:
    """The cause and one sentence for it. Without numbers only the kind of message, or its ``text``, tells."""
    if "THCCachingHostAllocator" in text:
        return Cause.HOST_MEMORY, "Pinned host memory could not be allocated: RAM or the limit of locked memory."
    if family in _BY_FAMILY:
        return _BY_FAMILY[family]
    tried, total, free = numbers.get("tried", 0), numbers.get("total", 0), numbers.get("free")
    if family == "vllm" and "wanted" in numbers and free is not None:
        return _at_start(numbers["wanted"], total, free)
    if family == "jax-tpu":
        return Cause.EXHAUSTED, "The compiled program needs more memory than one device has."
    cause = _by_limits(numbers, tried, total, free)
    if cause is None and free is not None and total:
        cause = _by_holders(numbers, tried, total, free)
    return cause or (Cause.EXHAUSTED, _full(numbers, free))


def _full(numbers: Mapping[str, int], free: int | None) -> str:
    """What fills the device."""
    own = reserved_bytes(numbers)
    outside = numbers.get("process", 0) - own
    if outside >= max(GIB, own // 4) and own:
        return (
            f"The run needs more memory than is left. {format_bytes(outside)} of the process lie outside PyTorch's "
            "allocator: libraries, NCCL, CUDA graphs or another framework."
        )
    unallocated = unallocated_bytes(numbers)
    if free is not None and numbers.get("allocated"):
        return (
            f"The run needs more memory than is left: {format_bytes(numbers['allocated'])} are in use, only "
            f"{format_bytes(free)} are free and {format_bytes(unallocated)} cached."
        )
    return "The run needs more memory than is left."


def _at_start(wanted: int, total: int, free: int) -> tuple[Cause, str]:
    """A server that takes a share of the device when it starts."""
    if total - free >= SHARE_OF_OTHERS * total:
        return (
            Cause.OTHER_PROCESS,
            f"Before the start others held {format_bytes(total - free)} of the device; {format_bytes(wanted)} were "
            "wanted.",
        )
    return (
        Cause.MEMORY_FRACTION,
        f"The share that was asked for, {format_bytes(wanted)}, is more than is free ({format_bytes(free)}).",
    )


def _by_limits(numbers: Mapping[str, int], tried: int, total: int, free: int | None) -> tuple[Cause, str] | None:
    """Causes that do not depend on who holds the memory."""
    if total and tried > total:
        return (
            Cause.TOO_LARGE,
            f"One request of {format_bytes(tried)} is larger than the device ({format_bytes(total)}).",
        )
    used = max(numbers.get("process", 0), numbers.get("allocated", 0), numbers.get("reserved", 0))
    if total and total < used < UNSET_BYTES:
        return Cause.SPILL, (
            f"{format_bytes(used)} are in use on a device of {format_bytes(total)}: the driver has moved the rest to "
            "system memory, which is slow, and then found no more."
        )
    allowed = numbers.get("allowed", UNSET_BYTES)
    if allowed < UNSET_BYTES and free is not None and free >= tried:
        return Cause.MEMORY_FRACTION, (
            f"The process may use {format_bytes(allowed)} only, while {format_bytes(free)} of the device are free."
        )
    return None


def _by_holders(numbers: Mapping[str, int], tried: int, total: int, free: int) -> tuple[Cause, str] | None:
    """Causes found by adding up who holds what. Of two that would each explain it, the larger."""
    own = reserved_bytes(numbers)
    if tried and free >= tried and (own < total // 2 or free >= 2 * tried):  # else: full except for a little
        return Cause.MISLEADING_FREE, (
            f"{format_bytes(free)} are said to be free and {format_bytes(tried)} were asked for. The driver refused: "
            "its free memory includes what others may claim (Windows, WSL), or one allocation has a limit of its own."
        )
    others = other_processes_bytes(numbers, total, free)
    private, unallocated = numbers.get("private_pools", 0), unallocated_bytes(numbers)
    possible: list[tuple[int, Cause, str]] = []
    if others >= max(tried, int(SHARE_OF_OTHERS * total)):
        text = f"Other processes hold {format_bytes(others)} of the device; the request would fit."
        possible.append((others, Cause.OTHER_PROCESS, text))
    if _is_much(private, own) and private + free >= tried:
        text = f"{format_bytes(private)} lie free in private pools (CUDA graphs), where nothing else may use them."
        possible.append((private, Cause.PRIVATE_POOLS, text))
    if _is_fragmented(unallocated, own, tried, free):
        possible.append((unallocated, Cause.FRAGMENTATION, _fragmented(unallocated, tried, free)))
    if not possible:
        return None
    _, cause, text = max(possible, key=lambda one: one[0])
    return cause, text


def _is_much(count: int, reserved: int) -> bool:
    """More than a healthy run leaves unused."""
    return count > 0 and count >= min(SHARE_OF_FRAGMENTS * reserved, FRAGMENTS_BYTES)


def _is_fragmented(unallocated: int, reserved: int, tried: int, free: int) -> bool:
    """Enough lies in pieces; or a fifth of what is reserved does, and with what is free half of what was tried."""
    if unallocated >= tried:
        return _is_much(unallocated, reserved)
    return unallocated >= max(SHARE_OF_FRAGMENTS * reserved, 1) and unallocated + free >= tried // 2


def _fragmented(unallocated: int, tried: int, free: int) -> str:
    short = tried - unallocated - free
    enough = "" if short <= 0 else f" (in one piece with what is free it would still be {format_bytes(short)} short)"
    return (
        f"{format_bytes(unallocated)} are reserved but unallocated while {format_bytes(tried)} were asked for: free "
        f"pieces, none large enough{enough}."
    )


def reserved_bytes(numbers: Mapping[str, int]) -> int:
    """What PyTorch's allocator holds, in use or not."""
    return unallocated_bytes(numbers) + numbers.get("allocated", 0) + numbers.get("private_pools", 0)


def unallocated_bytes(numbers: Mapping[str, int]) -> int:
    """Reserved by PyTorch and not in use."""
    if "unallocated" in numbers:
        return numbers["unallocated"]
    if "reserved" in numbers:
        return max(numbers["reserved"] - numbers.get("allocated", 0), 0)
    return numbers.get("cached", 0)  # PyTorch before 1.4 printed what is cached and unused


def other_processes_bytes(numbers: Mapping[str, int], total: int, free: int) -> int:
    """What this process does not hold. In a container it cannot tell its own number: it is the one that fits best."""
    own = reserved_bytes(numbers)
    listed = [count for name, count in numbers.items() if name.startswith("process_")]
    if "process" in numbers:
        return max(total - free - numbers["process"], 0)
    if listed:
        mine = min((count for count in listed if count >= own), default=0)
        return sum(listed) - mine
    return max(total - free - own - min(CONTEXT_BYTES, total // 8), 0) if total >= GIB else 0
