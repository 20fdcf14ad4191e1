"""The transfer engine of devices that have streams, and host memory that CUDA has pinned."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from brim.accelerator import Accelerator, of, page_lock, page_unlock, pci_address
from brim.core.hardware import RAM
from brim.errors import BrimError
from brim.memory.checkpoint_files import Extent
from brim.memory.direct_io import OpenFiles
from brim.memory.layout import Move, ReadRun
from brim.memory.numa import near
from brim.memory.pool import PAGE_BYTES, Buffer, HostSource, private_mapping, round_up
from brim.memory.recorder import Recorder
from brim.memory.transfer import Settled, ThreadEngine, Ticket, Waitable, _Lane, copied_bytes, whole
from brim.units import format_bytes

# A copy engine does one copy after another: between pieces of a block, activations of other streams can go.
_PIECE_BYTES = 32 << 20
# Of Linux: a child finds zeros. Locked pages would be copied at each fork, once per worker of a DataLoader.
_MADV_WIPEONFORK = 18


class PinnedSource(HostSource):
    """Page-locked host memory by ``cudaHostRegister`` on our own mapping, unregistered before the mapping is removed.

    ``Tensor.pin_memory`` rounds up to the next power of two: up to twice the RAM that was asked for. Where the system
    locks no more pages (WSL2 limits them), memory is pageable: the driver copies it through buffers of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._warned = device, False

    def make(self, bytes: int) -> torch.Tensor:
        if not bytes:
            return super().make(0)
        mapped, start = private_mapping(round_up(bytes, PAGE_BYTES), _Locked)
        error = mapped.lock(start, bytes, self._device)
        if error and not self._warned:
            self._warned = True
            warnings.warn(
                f"{format_bytes(bytes)} of RAM could not be page-locked (cudaHostRegister gave error {error}): what "
                "is not is copied through the driver's buffers, which is slower. Lock less (a smaller --ram); under "
                "WSL2 about half of the RAM that it was given can be locked (memory= in .wslconfig).",
                stacklevel=2,
            )
        with torch.inference_mode(False):  # threads that know nothing of the mode will write to it
            return torch.frombuffer(mapped, dtype=torch.uint8, count=bytes, offset=start)

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        """Each in a mapping of its own: the driver unlocks the same ranges that it locked."""
        return [self.make(bytes) for _ in range(count)]


class _Locked(mmap.mmap):
    """A mapping whose pages are locked for a device until the last tensor in it is gone.

    Pages that are given back while they are registered would leave the driver with an address that means something
    else: the next registration there fails, and copies of what lies there later go to the old pages.
    """

    _address: int | None = None

    def lock(self, start: int, bytes: int, device: torch.device) -> int:
        """Lock ``bytes`` from ``start`` on and return 0; where that is refused, its error: they stay pageable."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self)) + start
        with contextlib.suppress(OSError):  # an old kernel: a fork copies them
            self.madvise(_MADV_WIPEONFORK)
        with of(device).current(), near(pci_address(device)):  # pages are touched as they are locked
            error = page_lock(address, bytes)
        if error:
            return error
        self._address, self._device, self._process = address, device, os.getpid()
        return 0

    def __del__(self) -> None:
        if self._address is None or self._process != os.getpid():  # a child has neither the device nor the lock
            return
        if sys.is_finalizing():  # the process takes all of it along
            return
        of(self._device).synchronize()  # a copy from or to this memory may still be under way
        page_unlock(self._address)


class StreamPoint:
    """A point in a stream of a device. Waiting makes the device's current stream wait, not the host."""

    def __init__(self, event: Any, on: Accelerator) -> None:
        self.event, self._on = event, on

    def wait(self) -> None:
        self._on.current_stream().wait_event(self.event)

    @property
    def done(self) -> bool:
        return bool(self.event.query())


class _IssuedLater:
    """A copy that a thread hands to the stream once its data has come from disk."""

    def __init__(self, on: Accelerator) -> None:
        self._on = on
        self.ticket: Ticket | None = None
        self.event = on.new_event()

    def wait(self) -> None:
        assert self.ticket is not None
        self.ticket.wait()  # until the copy is in the stream
        self._on.current_stream().wait_event(self.event)

    def synchronize(self) -> None:
        assert self.ticket is not None
        self.ticket.wait()
        self.event.synchronize()

    @property
    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done and bool(self.event.query())


class StreamEngine:
    """Copies on streams of their own, one each way; disk reads and writes on the thread engine's lanes."""

    def __init__(
        self, recorder: Recorder, files: OpenFiles, make_bounce: Callable[[int], Buffer], device: torch.device
    ) -> None:
        self.recorder = recorder
        self._on = of(device)
        self._threads = ThreadEngine(recorder, files, make_bounce)
        self._there = _Lane("issue"), self._on.new_stream()
        self._back = _Lane("issue-back"), self._on.new_stream()
        self._filled: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Ticket:
        # The slot that is read into may be the source of a copy still in the stream: that needs the host to wait.
        return self._threads.read(runs, target, label, [_HostWait(condition) for condition in after])

    def copy(
        self,
        source: torch.Tensor,
        target: Buffer,
        label: str,
        after: Sequence[Waitable],
        way: tuple[str, str],
        moves: Sequence[Move] = (),
    ) -> Waitable:
        lane, stream = self._back if way[1] == RAM else self._there
        if way[1] != RAM and target not in self._filled:
            # Its memory may have been freed by compute that is still queued: the caching allocator orders the
            # uses on one stream, and this is another.
            after = [*after, self.mark()]
            self._filled.add(target)
        later = _IssuedLater(self._on)
        # Not an event yet: a stream cannot wait for it, and the caller should not.
        if any(_is_pending_on_host(condition) for condition in after):
            later.ticket = lane.submit(
                lambda: self._enqueue(source, target, label, after, way, moves, stream, later.event)
            )
            return later
        error = lane.outcome(lambda: self._enqueue(source, target, label, after, way, moves, stream, later.event))
        if error is None:
            return StreamPoint(later.event, self._on)
        later.ticket = Ticket()
        later.ticket.finish(error)
        return later

    def _enqueue(
        self,
        source: torch.Tensor,
        target: Buffer,
        label: str,
        after: Sequence[Waitable],
        way: tuple[str, str],
        moves: Sequence[Move],
        stream: Any,
        event: Any,
    ) -> None:
        begin_s = self.recorder.now_s()
        with self._on.current(), self._on.in_stream(stream):
            for condition in after:
                condition.wait()
            for move in moves or whole(source):
                for begin in range(0, move.bytes, _PIECE_BYTES):
                    piece = source[move.source + begin : move.source + min(begin + _PIECE_BYTES, move.bytes)]
                    into = move.target + begin
                    target.tensor[into : into + piece.numel()].copy_(piece, non_blocking=True)
            event.record(stream)
        self.recorder.copied(*way, copied_bytes(source, moves), begin_s, label)

    def cross(self, source: torch.Tensor, target: torch.Tensor, label: str, way: tuple[str, str]) -> None:
        begin_s = self.recorder.now_s()
        target.copy_(source, non_blocking=True)  # on the current stream: after what makes it, before what needs it
        self.recorder.copied(*way, source.numel(), begin_s, label)

    def write(self, source: torch.Tensor, extent: Extent, label: str, after: Sequence[Waitable]) -> Ticket:
        return self._threads.write(source, extent, label, [_HostWait(condition) for condition in after])

    def mark(self) -> StreamPoint:
        event = self._on.new_event()
        event.record(self._on.current_stream())
        return StreamPoint(event, self._on)

    def finish(self, condition: Waitable) -> None:
        _HostWait(condition).wait()

    def close(self) -> None:
        self._threads.close()
        for lane, stream in (self._there, self._back):
            lane.close()
            stream.synchronize()


def _is_pending_on_host(condition: Waitable) -> bool:
    waited = condition.condition if isinstance(condition, Settled) else condition
    if isinstance(waited, _IssuedLater):
        return waited.ticket is not None and not waited.ticket.done
    return isinstance(waited, Ticket) and not waited.done


class _HostWait:
    """Makes the host wait for what would otherwise make only a stream wait."""

    def __init__(self, condition: Waitable) -> None:
        self._condition = condition

    def wait(self) -> None:
        settled = isinstance(self._condition, Settled)
        condition = self._condition.condition if isinstance(self._condition, Settled) else self._condition
        with contextlib.suppress(BrimError) if settled else contextlib.nullcontext():
            if isinstance(condition, StreamPoint):
                condition.event.synchronize()
            elif isinstance(condition, _IssuedLater):
                condition.synchronize()
            else:
                condition.wait()

    @property
    def done(self) -> bool:
        return self._condition.done
