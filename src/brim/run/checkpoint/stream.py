"""Ring buffer between the training and the thread that writes a checkpoint, and the pieces that pass through it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from brim.memory.pool import round_up

_ALIGNMENT_BYTES = 8  # the word size of the checksum
_PIECE_BYTES = 4 << 20


def pieces(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """The bytes of ``tensor`` in row-major order as flat uint8 tensors of at most ``limit_bytes`` (8 or more).

    Views if the tensor is contiguous, otherwise copies of one piece at a time.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1).view(torch.uint8)
        yield from flat.split(limit_bytes)
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes > limit_bytes:
        for row in tensor:
            yield from pieces(row, limit_bytes)
        return
    for rows in tensor.split(limit_bytes // row_bytes):
        yield rows.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Window:
    """Room in a Ring: ``tensor`` is to be filled; ``cost_bytes`` are released with it."""

    tensor: torch.Tensor
    cost_bytes: int


class Ring:
    """A first-in, first-out buffer for one producer and one consumer; the producer waits for room."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._at, self._used_bytes = buffer, 0, 0
        self._given: queue.SimpleQueue[int] = queue.SimpleQueue()  # lock-free: an interrupted producer holds no lock
        # Half of the buffer: a piece that does not fit before the end starts at the beginning and wastes the rest.
        self.piece_bytes = min(_PIECE_BYTES, buffer.numel() // 2 // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES)
        assert self.piece_bytes >= _ALIGNMENT_BYTES, f"{buffer.numel()} bytes are too few"

    def take(self, bytes: int, abandoned: Callable[[], bool]) -> Window | None:
        """Room for ``bytes`` (at most ``piece_bytes``), as soon as it is free; None once ``abandoned()``."""
        length, end = round_up(bytes, _ALIGNMENT_BYTES), self._buffer.numel()
        begin = self._at if self._at + length <= end else 0
        skipped = 0 if begin == self._at else end - self._at
        while self._used_bytes + skipped + length > end and not abandoned():
            self._used_bytes -= self._given.get()
        if abandoned():
            return None
        self._used_bytes += skipped + length
        self._at = begin + length
        return Window(self._buffer[begin : begin + bytes], skipped + length)

    def give(self, window: Window) -> None:
        """Release ``window``. Windows are released in the order in which they were taken."""
        self._given.put(window.cost_bytes)

    def wake(self) -> None:
        """Make a waiting producer check ``abandoned`` again."""
        self._given.put(0)
