"""The transfer engine of devices with streams, and pinned host memory on the GPU's NUMA node."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from brim.accelerator import Accelerator, of, page_lock, page_unlock, pci_address
from brim.core.hardware import RAM
from brim.errors import BrimError
from brim.memory.checkpoint_files import Extent
from brim.memory.direct_io import OpenFiles
from brim.memory.layout import ReadRun
from brim.memory.pool import PAGE_BYTES, Buffer, HostSource, private_mapping, round_up
from brim.memory.recorder import Recorder
from brim.memory.transfer import Copy, Engine, Settled, ThreadEngine, Ticket, Waitable, _Lane
from brim.units import format_bytes

# A copy engine does one copy at a time; between pieces of a block, it can copy activations of other streams.
_PIECE_BYTES = 32 << 20
# Linux: a child sees zeros. Locked pages would be copied at each fork, once per worker of a DataLoader.
_MADV_WIPEONFORK = 18
_SYSTEM = Path("/sys")


class PinnedSource(HostSource):
    """Allocates host memory page-locked by ``cudaHostRegister``, unregistered before its mapping is removed.

    ``Tensor.pin_memory`` would round up to the next power of two. If the system locks no more pages (WSL2 limits
    them), memory is pageable, and the driver copies it through its own buffers.
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
                f"{format_bytes(bytes)} of RAM could not be page-locked (cudaHostRegister gave error {error}), so it "
                "is copied through the driver's buffers, which is slower. Give a smaller --ram. WSL2 can page-lock "
                "about half of its RAM (memory= in .wslconfig).",
                stacklevel=2,
            )
        with torch.inference_mode(False):  # other threads, outside the mode, write to it
            return torch.frombuffer(mapped, dtype=torch.uint8, count=bytes, offset=start)

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        """Allocate separate mappings: the driver unlocks the same ranges that it locked."""
        return [self.make(bytes) for _ in range(count)]


class _Locked(mmap.mmap):
    """A mapping whose pages are locked for a device until its last tensor is freed.

    If registered pages were unmapped, the next registration at their address would fail, and copies from and to that
    address would use the old pages.
    """

    _address: int | None = None

    def lock(self, start: int, bytes: int, device: torch.device) -> int:
        """Lock ``bytes`` from ``start`` on. Return 0, or CUDA's error if they stay pageable."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self)) + start
        with contextlib.suppress(OSError):  # an old kernel
            self.madvise(_MADV_WIPEONFORK)
        with of(device).current(), near(pci_address(device)):  # locking touches the pages
            error = page_lock(address, bytes)
        if error:
            return error
        self._address, self._device, self._process = address, device, os.getpid()
        return 0

    def __del__(self) -> None:
        if self._address is None or self._process != os.getpid():  # a child has neither the device nor the lock
            return
        if sys.is_finalizing():  # the exit of the process frees everything
            return
        of(self._device).synchronize()  # a copy may still use this memory
        page_unlock(self._address)


@contextlib.contextmanager
def near(pci_address: str | None, system: Path = _SYSTEM) -> Iterator[None]:
    """Run this thread on the NUMA node of the device at ``pci_address`` (``"0000:3b:00.0"``) within the block.

    Linux puts a page on the node of the thread that touches it first (mm/numa_memory_policy.rst, "local allocation"),
    and copies to another node share the link between the nodes. Does nothing if the node is unknown, or none of its
    processors is allowed.
    """
    before = _allowed()
    beside = set() if pci_address is None else before & processors_near(pci_address, system)
    if not beside or beside == before:
        yield
        return
    os.sched_setaffinity(0, beside)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processors_near(pci_address: str, system: Path) -> set[int]:
    """Return the processors of a device's NUMA node; none if unknown."""
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
        return {number for part in listed.strip().split(",") if part for number in _numbers(part)}
    except (OSError, ValueError):
        return set()


def _numbers(part: str) -> range:
    """Parse ``"4"`` or ``"0-3"``."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@dataclass(eq=False)
class StreamPoint:
    """A point in a device's stream. ``wait`` makes the device's current stream wait, not the host."""

    event: Any
    _on: Accelerator

    def wait(self) -> None:
        self._on.current_stream().wait_event(self.event)

    @property
    def done(self) -> bool:
        return bool(self.event.query())


class _IssuedLater:
    """A copy that a thread puts into the stream once its data has been read from disk."""

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


class StreamEngine(Engine):
    """Copies on one stream per direction; reads and writes files by the threads of a ThreadEngine."""

    def __init__(
        self, recorder: Recorder, files: OpenFiles, make_bounce: Callable[[int], Buffer], device: torch.device
    ) -> None:
        super().__init__(recorder)
        self._on = of(device)
        self._threads = ThreadEngine(recorder, files, make_bounce)
        self._there = _Lane("issue"), self._on.new_stream()
        self._back = _Lane("issue-back"), self._on.new_stream()
        self._filled: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Ticket:
        # The target may be the source of a copy still in a stream, for which the host has to wait.
        return self._threads.read(runs, target, label, [_HostWait(condition) for condition in after])

    def _submit(self, copy: Copy) -> Waitable:
        lane, stream = self._back if copy.route[1] == RAM else self._there
        buffer = copy.target.origin or copy.target
        if copy.route[1] != RAM and buffer not in self._filled:
            # Its memory may have been freed by compute that is still queued: the caching allocator orders the
            # uses on one stream, and this is another.
            copy = replace(copy, after=[*copy.after, self.mark()])
            self._filled.add(buffer)
        later = _IssuedLater(self._on)
        # There is no event yet for a stream to wait for, and the caller should not wait.
        if any(_is_pending_on_host(condition) for condition in copy.after):
            later.ticket = lane.submit(lambda: self._enqueue(copy, stream, later.event))
            return later
        error = lane.outcome(lambda: self._enqueue(copy, stream, later.event))
        if error is None:
            return StreamPoint(later.event, self._on)
        later.ticket = Ticket()
        later.ticket.finish(error)
        return later

    def _enqueue(self, copy: Copy, stream: Any, event: Any) -> None:
        begin_s = self.recorder.now_s()
        with self._on.current(), self._on.in_stream(stream):
            for condition in copy.after:
                condition.wait()
            for target, source in copy.pieces(_PIECE_BYTES):
                target.copy_(source, non_blocking=True)
            event.record(stream)
        self.recorder.copied(*copy.route, copy.bytes, begin_s, copy.label)

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
    """Makes the host wait instead of a stream."""

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
