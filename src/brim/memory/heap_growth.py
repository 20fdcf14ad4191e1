"""Simulate the growth of a process's resident set by tensors on the CPU.

Follows glibc's malloc (malloc/malloc.c) as set by ``heap.return_freed_memory``. Blocks below the threshold come from
one heap by best fit; free neighbours are merged; the heap grows at its top and shrinks when enough of the top is
free; holes stay resident. Larger blocks have their own mappings, which are returned at once.
"""

from __future__ import annotations

import bisect

from brim.memory.heap import MAPPING_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES
from brim.memory.pool import PAGE_BYTES, round_up

_ALIGNMENT_BYTES = 64  # of PyTorch's CPU allocator (c10/core/alignment.h)
_HEADER_BYTES = 16


class HeapGrowth:
    """Simulates allocations and frees by name; ``peak_bytes`` is the peak of their resident size."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._mapped_bytes = 0
        self._blocks: dict[int, tuple[int, int]] = {}  # name -> (begin, length); begin -1: a mapping
        self._free: list[tuple[int, int]] = []  # (length, begin)
        self._begins: dict[int, int] = {}  # of free runs: begin -> length
        self._ends: dict[int, int] = {}  # end -> begin
        self._top = self._resident = 0  # the ends of used and of resident memory

    def alloc(self, name: int, bytes: int) -> None:
        length = round_up(bytes + _HEADER_BYTES, _ALIGNMENT_BYTES)
        if length >= MAPPING_THRESHOLD_BYTES:
            length = round_up(length, PAGE_BYTES)
            self._mapped_bytes += length
            self._blocks[name] = -1, length
        else:
            self._blocks[name] = self._take(length), length
        self.peak_bytes = max(self.peak_bytes, self._resident + self._mapped_bytes)

    def free(self, name: int) -> None:
        begin, length = self._blocks.pop(name)
        if begin < 0:
            self._mapped_bytes -= length
        else:
            self._give(begin, length)

    def _take(self, length: int) -> int:
        index = bisect.bisect_left(self._free, (length, 0))
        if index == len(self._free):
            begin = self._top
            self._top += length
            self._resident = max(self._resident, self._top)
            return begin
        free_length, begin = self._free[index]
        self._forget(begin, free_length)
        if free_length > length:
            self._note(begin + length, free_length - length)
        return begin

    def _give(self, begin: int, length: int) -> None:
        if begin in self._ends:  # the run before it
            before = self._ends[begin]
            self._forget(before, begin - before)
            begin, length = before, length + begin - before
        if begin + length in self._begins:
            after = self._begins[begin + length]
            self._forget(begin + length, after)
            length += after
        if begin + length < self._top:
            self._note(begin, length)
            return
        self._top = begin
        if self._resident - self._top > TRIM_THRESHOLD_BYTES:
            self._resident = self._top

    def _note(self, begin: int, length: int) -> None:
        bisect.insort(self._free, (length, begin))
        self._begins[begin], self._ends[begin + length] = length, begin

    def _forget(self, begin: int, length: int) -> None:
        del self._free[bisect.bisect_left(self._free, (length, begin))]
        del self._begins[begin], self._ends[begin + length]
