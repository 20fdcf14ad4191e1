"""The caching allocator's out-of-memory error, with every number of PyTorch's message."""

from __future__ import annotations

from brim.errors import BrimError
from brim.units import GIB, KIB, MIB


class OutOfMemory(BrimError):
    """The device has no room for a request. The attributes are the numbers of PyTorch's message, in bytes.

    ``tried_bytes`` is the size of the new segment, not of the request. ``private_free_bytes`` is free in private
    pools; PyTorch counts it as allocated.
    """

    def __init__(
        self,
        *,
        tried_bytes: int,
        request_bytes: int,
        total_bytes: int,
        free_bytes: int,
        allowed_bytes: int | None,
        allocated_bytes: int,
        reserved_bytes: int,
        private_free_bytes: int,
    ) -> None:
        self.tried_bytes, self.request_bytes = tried_bytes, request_bytes
        self.total_bytes, self.free_bytes, self.allowed_bytes = total_bytes, free_bytes, allowed_bytes
        self.private_free_bytes = private_free_bytes
        self.allocated_bytes = allocated_bytes + private_free_bytes
        self.unallocated_bytes = reserved_bytes - self.allocated_bytes
        allowed = "" if allowed_bytes is None else f"{torch_size(allowed_bytes)} allowed; "
        private = (
            f"with {torch_size(private_free_bytes)} allocated in private pools (e.g., CUDA Graphs), "
            if private_free_bytes
            else ""
        )
        super().__init__(
            f"CUDA out of memory. Tried to allocate {torch_size(tried_bytes)}.",
            f"GPU 0 has a total capacity of {torch_size(total_bytes)} of which {torch_size(free_bytes)} is free. "
            f"{allowed}Of the allocated memory {torch_size(self.allocated_bytes)} is allocated by PyTorch, {private}"
            f"and {torch_size(self.unallocated_bytes)} is reserved by PyTorch but unallocated.",
        )


def torch_size(count: int) -> str:
    """Write bytes as PyTorch's ``format_size`` does: two decimals, binary units."""
    for limit, unit in ((KIB, "bytes"), (MIB, "KiB"), (GIB, "MiB")):
        if count <= limit:
            return f"{count} bytes" if unit == "bytes" else f"{count / (limit >> 10):.2f} {unit}"
    return f"{count / GIB:.2f} GiB"
