"""Pieces of a few large buffers: what comes and goes often must not be allocated, let alone page-locked, anew."""

from __future__ import annotations

import bisect

from brim.errors import BudgetError
from brim.memory.pool import PAGE_BYTES, Buffer, Pool, round_up

_SLAB_BYTES = 64 << 20


class Arena:
    """Cuts pieces out of slabs, each slab one allocation of ``pool``. Slabs are kept until ``trim``.

    First fit: what is freed in the reverse order of its making, as a backward pass does it, leaves no holes, and the
    next step finds every piece where the last one had it.
    """

    def __init__(self, pool: Pool, label: str, *, slab_bytes: int | None = None) -> None:
        self._pool, self._label = pool, label
        # A sixteenth: the unused end of the last slab must not be what a small budget lacks.
        self._slab_bytes = slab_bytes or min(_SLAB_BYTES, round_up(pool.limit_bytes // 16, PAGE_BYTES))
        self._slabs: list[_Slab] = []

    @property
    def used_bytes(self) -> int:
        return sum(slab.used_bytes for slab in self._slabs)

    def take(self, bytes: int) -> Piece:
        """Whole pages, at least ``bytes`` long. Raises BudgetError when the pool has no room for another slab."""
        length = round_up(bytes, PAGE_BYTES)
        for slab in self._slabs:
            at = slab.take(length)
            if at is not None:
                return Piece(slab, at, length)
        slab = _Slab(self._allocate(length))
        self._slabs.append(slab)
        at = slab.take(length)
        assert at is not None, "it is new and large enough"
        return Piece(slab, at, length)

    def _allocate(self, length: int) -> Buffer:
        if length < self._slab_bytes:
            try:
                return self._pool.allocate(self._slab_bytes, self._label)
            except BudgetError:  # no room for what the next pieces would take
                return self._pool.allocate(length, self._label)
        return self._pool.allocate(length, self._label)

    def trim(self) -> None:
        """Give slabs without pieces back to the pool."""
        for slab in self._slabs:
            if not slab.used_bytes:
                slab.buffer.free()
        self._slabs = [slab for slab in self._slabs if slab.used_bytes]


class _Slab:
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.used_bytes = 0
        self._free = [(0, buffer.bytes)]  # (begin, end), by address, never touching one another

    def take(self, length: int) -> int | None:
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= length:
                self._free[index : index + 1] = [(begin + length, end)] if end - begin > length else []
                self.used_bytes += length
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        self.used_bytes -= end - begin
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            begin, index = self._free.pop(index - 1)[0], index - 1
        self._free.insert(index, (begin, end))


class Piece(Buffer):
    """A run of pages of a slab. ``free`` gives it back to the arena."""

    def __init__(self, slab: _Slab, at: int, length: int) -> None:
        whole = slab.buffer
        super().__init__(whole.pool, whole.tensor[at : at + length], length, whole.storage, whole.label)
        self._slab, self._at = slab, at

    def free(self) -> None:
        if self._tensor is not None:
            self._tensor = None
            self._slab.give(self._at, self._at + self.bytes)
