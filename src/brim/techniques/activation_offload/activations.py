"""Activations that are offloaded during forward and fetched during backward.

Both follow the order of saving: forward offloads the oldest first, so that at most a window of bytes stays; backward
needs them in reverse order, so that the window before the last one that it used is fetched ahead. They go to RAM by
copies, or to disk by direct writes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from brim.core.hardware import DISK, RAM
from brim.errors import BrimError, BudgetError
from brim.memory.layout import PACKED_ALIGNMENT_BYTES, ReadRun
from brim.memory.pool import PAGE_BYTES, Arena, Buffer, TorchSource, round_up
from brim.memory.tiers import Memory
from brim.memory.transfer import Done, Settled, Ticket, Waitable
from brim.techniques.saved_tensor_hooks import Unchanged
from brim.units import MIB

Order = list["weakref.ref[Activation]"]  # in the order of saving


class Stage(Enum):
    RESIDENT = "resident"  # one of the newest: not offloaded yet
    LEAVING = "leaving"  # being copied, and still in memory
    OFFLOADED = "offloaded"
    STUCK = "stuck"  # its copy failed


class Activation:
    """A storage that autograd saved, in memory or offloaded; several nodes may have saved it."""

    def __init__(self, source: torch.Tensor, leftovers: deque[_Leftover]) -> None:
        self.bytes = source.numel()
        self.stage = Stage.RESIDENT
        self.source: torch.Tensor | None = source  # uint8: the storage that forward made
        self.offloaded: OffloadedActivation | None = None
        self.pending_fetch: Fetch | None = None
        self.loaded: torch.Tensor | None = None  # uint8: the fetched copy
        self.saved_count = 0  # how many nodes saved it
        self.unused_count = 0  # how many of them have not used the fetched copy yet
        self.fetch_count = 0  # how often it was fetched
        self.finished_pass = -1  # the backward pass in which all nodes have used it
        self._leftovers = leftovers

    @property
    def is_available(self) -> bool:
        return self.source is not None or self.pending_fetch is not None or self.loaded is not None

    def __del__(self) -> None:
        # It may run at any time in any thread, so it must not wait or take a lock.
        if self.offloaded is not None:
            on_thread = isinstance(self.offloaded.moved, (Done, Ticket))  # a Ticket keeps its source alive
            source = None if on_thread else self.source
            self._leftovers.append(_Leftover(self.stage, self.bytes, self.offloaded, self.pending_fetch, source))
        elif self.stage is Stage.RESIDENT:
            self._leftovers.append(_Leftover(self.stage, self.bytes, None, None, None))


@dataclass
class _Leftover:
    """The memory of an activation that was deleted; a copy may still read from ``source``."""

    stage: Stage
    bytes: int
    offloaded: OffloadedActivation | None
    pending_fetch: Fetch | None
    source: torch.Tensor | None

    def release(self) -> None:
        if self.pending_fetch is not None:
            self.pending_fetch.drop()
        if self.offloaded is not None:
            Settled(self.offloaded.moved).wait()
            self.offloaded.release()


class Saved:
    """A tensor that a node saved: a view of an activation."""

    def __init__(
        self, owner: Activations, activation: Activation, tensor: torch.Tensor, unchanged: Unchanged, order: Order
    ) -> None:
        self._owner, self.activation, self.unchanged = owner, activation, unchanged
        self.order, self.at = order, len(order)
        order.append(weakref.ref(activation))
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self.fetch_count = 0

    def unpack(self) -> torch.Tensor:
        return self._owner.load(self)

    def view(self, bytes: torch.Tensor) -> torch.Tensor:
        """The tensor over the storage's ``bytes``."""
        item = self._dtype.itemsize
        elements = bytes[: bytes.numel() // item * item].view(self._dtype)
        return elements.as_strided(self._size, self._stride, bytes.storage_offset() // item + self._offset)


class Activations:
    """The activations of a model that are offloaded, or will be.

    At most ``window_bytes`` of activations stay in the compute tier during forward (half of them resident, half
    leaving), and at most that many, but always one activation, are fetched ahead of use. ``misses`` counts the
    activations that backward needed before they were fetched.
    """

    def __init__(self, destination: Destination, *, window_bytes: int) -> None:
        self.window_bytes, self.misses = window_bytes, 0
        self._destination = destination
        self._nothing = torch.empty(0)
        self._lock = threading.RLock()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[Activation]]] = {}
        self._leftovers: deque[_Leftover] = deque()
        self._resident: deque[weakref.ref[Activation]] = deque()
        self._leaving: deque[weakref.ref[Activation]] = deque()
        self._bytes = {Stage.RESIDENT: 0, Stage.LEAVING: 0}
        self._order: Order = []  # since the last backward
        self._in_backward = False
        self._fetched: weakref.WeakSet[Activation] = weakref.WeakSet()  # fetched, but not used yet

    # -- forward

    def keep(self, tensor: torch.Tensor) -> Saved:
        """Take ``tensor`` from autograd, and wait while too many bytes are being offloaded.

        Raises BudgetError and TransferError when an older activation cannot be offloaded.
        """
        with self._lock:
            self._release_leftovers()
            if self._in_backward or (self._order and all(other() is None for other in reversed(self._order))):
                self._order, self._in_backward = [], False
            activation = self._find(tensor)
            if activation is None:
                activation = self._admit(tensor)
            activation.saved_count += 1
            activation.unused_count += 1
            return Saved(self, activation, tensor, Unchanged(tensor, self._nothing), self._order)

    def _find(self, tensor: torch.Tensor) -> Activation | None:
        storage, version, activation = self._known.get(tensor.untyped_storage()._cdata, (None, 0, None))
        if storage is None or activation is None or storage() is None or version != tensor._version:
            return None
        return activation()

    def _admit(self, tensor: torch.Tensor) -> Activation:
        storage = tensor.untyped_storage()
        item = tensor.element_size()
        elements = tensor.detach().as_strided((storage.nbytes() // item,), (1,), 0)
        activation = Activation(elements.view(torch.uint8), self._leftovers)
        self._bytes[Stage.RESIDENT] += activation.bytes
        self._resident.append(weakref.ref(activation))
        self._make_room()
        key, activations = storage._cdata, self._known
        activations[key] = (
            weakref.ref(storage, lambda _: activations.pop(key, None)),
            tensor._version,
            weakref.ref(activation),
        )
        return activation

    def _make_room(self) -> None:
        """Offload the oldest activations until the others are within the window."""
        while len(self._resident) > 1 and 2 * self._bytes[Stage.RESIDENT] > self.window_bytes:
            activation = self._resident[0]()
            if activation is not None:
                assert activation.source is not None, "it is resident"
                activation.offloaded = self._destination.send(activation.source)
                self._set_stage(activation, Stage.LEAVING)
                self._leaving.append(self._resident[0])
            self._resident.popleft()
        while len(self._leaving) > 1 and 2 * self._bytes[Stage.LEAVING] > self.window_bytes:
            activation = self._leaving[0]()
            if activation is not None:
                self._finish_leaving(activation)
            self._leaving.popleft()

    def _finish_leaving(self, activation: Activation) -> None:
        assert activation.offloaded is not None, "it is leaving"
        try:
            activation.offloaded.moved.wait()
        except BrimError:
            activation.offloaded.release()
            activation.offloaded = None
            self._set_stage(activation, Stage.STUCK)
            self._leaving.popleft()
            raise
        activation.source = None
        self._set_stage(activation, Stage.OFFLOADED)

    def _set_stage(self, activation: Activation, stage: Stage) -> None:
        for counted, sign in ((activation.stage, -1), (stage, 1)):
            if counted in self._bytes:
                self._bytes[counted] += sign * activation.bytes
        activation.stage = stage

    # -- backward

    def load(self, saved: Saved) -> torch.Tensor:
        """The tensor that ``keep`` took. Raises RuntimeError if it was modified in place since, and BrimErrors."""
        with self._lock:
            saved.unchanged.check()
            self._in_backward = True
            self._release_leftovers()
            activation = saved.activation
            if not activation.is_available:
                self.misses += 1
                self._drop_fetched(activation)
                self._fetch(activation)
            self._fetch_before(saved)
            moved = activation.offloaded.moved if activation.offloaded is not None else None
            if activation.stage is Stage.LEAVING and isinstance(moved, Ticket):
                Settled(moved).wait()  # its thread would keep the source longer than autograd does
            bytes = activation.source if activation.source is not None else self._arrived(activation)
            tensor = saved.view(bytes)
            self._count_use(activation, saved)
            return tensor

    def _fetch(self, activation: Activation) -> None:
        assert activation.offloaded is not None, "it is offloaded"
        activation.pending_fetch = activation.offloaded.fetch()
        activation.fetch_count += 1
        activation.unused_count = activation.saved_count
        self._fetched.add(activation)

    def _fetch_before(self, saved: Saved) -> None:
        """Fetch the activations that were saved before ``saved``, newest first, up to the window."""
        task, budget_bytes, seen = torch._C._current_graph_task_id(), self.window_bytes, {saved.activation}
        for position in range(saved.at - 1, -1, -1):
            activation = saved.order[position]()
            if activation is None or activation in seen or activation.finished_pass == task != -1:
                continue
            seen.add(activation)
            budget_bytes -= activation.bytes
            if budget_bytes < 0 and len(seen) > 2:
                return
            if not activation.is_available:
                try:
                    self._fetch(activation)
                except BudgetError:  # it is fetched when it is needed
                    return

    def _arrived(self, activation: Activation) -> torch.Tensor:
        if activation.loaded is None:
            try:
                self._arrive(activation)
            except BrimError:
                # A prefetch may have failed: try again.
                self._fetch(activation)
                self._arrive(activation)
        assert activation.loaded is not None, "it arrived"
        return activation.loaded

    def _arrive(self, activation: Activation) -> None:
        assert activation.pending_fetch is not None, "it is on its way"
        try:
            activation.loaded = activation.pending_fetch.arrive()
        except BrimError:
            activation.pending_fetch.drop()
            activation.pending_fetch = None
            raise
        activation.pending_fetch = None

    def _count_use(self, activation: Activation, saved: Saved) -> None:
        """Drop the fetched copy after the last node has used it; autograd keeps it as long as it needs it."""
        self._fetched.discard(activation)
        if saved.fetch_count != activation.fetch_count:
            saved.fetch_count = activation.fetch_count
            activation.unused_count -= 1
        if activation.unused_count <= 0 and activation.source is None:
            activation.loaded = None
            activation.finished_pass = torch._C._current_graph_task_id()

    def _drop_fetched(self, wanted: Activation) -> None:
        """Drop the activations that were fetched ahead, to make room for the one that is needed."""
        for activation in [*self._fetched]:
            if activation is not wanted and activation.pending_fetch is not None:
                activation.pending_fetch.drop()
                activation.pending_fetch = None
            activation.loaded = None
        self._fetched.clear()

    # -- the end

    def _release_leftovers(self) -> None:
        """Free the memory of deleted activations. It waits for their copies: a late thread would keep memory that the
        budget does not have."""
        while self._leftovers:
            leftover = self._leftovers[0]  # it stays in the queue until it is freed, in case of Ctrl-C
            leftover.release()
            self._leftovers.popleft()
            if leftover.stage in self._bytes:
                self._bytes[leftover.stage] -= leftover.bytes

    def settle(self) -> None:
        """Free all unused memory, also that of the destination."""
        with self._lock:
            self._release_leftovers()
            self._destination.trim()

    def __del__(self) -> None:
        if hasattr(self, "_fetched"):
            self.settle()


_LABEL = "activations"
_TORCH = TorchSource(torch.device("cpu"))


class OffloadedActivation(Protocol):
    """The bytes of an offloaded storage, complete once ``moved`` is done."""

    moved: Waitable

    def fetch(self) -> Fetch:
        """Start to copy the bytes back. Raises BudgetError when the compute tier has no room."""

    def release(self) -> None:
        """Free the memory, when no copy is running."""


@dataclass(eq=False)
class Fetch:
    """A copy of an activation back into ``buffer``."""

    _offloaded: OffloadedActivation
    _buffer: Buffer
    _moved: Waitable
    _at: int
    _bytes: int

    def arrive(self) -> torch.Tensor:
        """Wait for the bytes (uint8), in newly allocated memory. Raises the BrimError of the copy."""
        self._moved.wait()
        if isinstance(self._offloaded, ActivationOnDisk):
            self._offloaded.fill_edges(self._buffer.tensor, self._at)
        return self._buffer.hand_over()[self._at : self._at + self._bytes]

    def drop(self) -> None:
        """Wait for the copy, and free the buffer."""
        Settled(self._moved).wait()
        self._buffer.free()


class Destination(Protocol):
    """A tier that activations are offloaded to, with sensible defaults for ``apply``."""

    tier: str
    smallest_bytes: int
    window_bytes: int

    def send(self, source: torch.Tensor) -> OffloadedActivation:
        """Start to copy ``source`` (uint8, an entire storage), which must not change until it is moved.

        Raises BudgetError and TransferError when there is no room.
        """

    def trim(self) -> None:
        """Free unused memory."""


def destination_for(memory: Memory) -> Destination:
    return ToDisk(memory) if memory.host is None else ToRam(memory)


class ToRam:
    """Copies from VRAM into pieces of a few page-locked slabs."""

    tier = RAM
    smallest_bytes = MIB
    window_bytes = 256 * MIB

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena = Arena(memory.ram, _LABEL)

    def send(self, source: torch.Tensor) -> OffloadedActivation:
        return _ActivationInRam(self._memory, self._arena.take(source.numel()), source)

    def trim(self) -> None:
        self._arena.trim()
        self._memory.compute.settle()


class _ActivationInRam:
    def __init__(self, memory: Memory, piece: Buffer, source: torch.Tensor) -> None:
        self._memory, self._piece, self._bytes = memory, piece, source.numel()
        engine = memory.engine
        self.moved = engine.copy(source, piece, _LABEL, [engine.mark()], (memory.compute.tier, RAM))

    def fetch(self) -> Fetch:
        memory = self._memory
        buffer = memory.compute.allocate(round_up(self._bytes, PACKED_ALIGNMENT_BYTES), _LABEL)
        after = [self.moved, memory.engine.mark()]  # on a GPU the buffer's memory may still be in use by compute
        source = self._piece.tensor[: self._bytes]
        moved = memory.engine.copy(source, buffer, _LABEL, after, (RAM, memory.compute.tier))
        return Fetch(self, buffer, moved, 0, self._bytes)

    def release(self) -> None:
        self._piece.free()


class ToDisk:
    """Writes from RAM into the scratch file, directly from the tensor's own pages."""

    tier = DISK
    smallest_bytes = 256 << 10
    window_bytes = 64 * MIB

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def send(self, source: torch.Tensor) -> OffloadedActivation:
        return ActivationOnDisk(self._memory, source)

    def trim(self) -> None:
        """Free unused memory; the scratch file keeps its length, as its pages are reused."""
        self._memory.compute.settle()


class ActivationOnDisk:
    """An activation whose full pages are on disk; the bytes before the first and after the last page stay in RAM.

    PyTorch's memory begins anywhere in a page. Its full pages are written without a copy, and the bytes come back to
    the same offset within a page, so that kernels whose rounding depends on alignment compute the same.
    """

    def __init__(self, memory: Memory, source: torch.Tensor) -> None:
        self._memory, self._bytes = memory, source.numel()
        # Full pages at every offset: one less than the maximum, so that it is predictable.
        self._pages_bytes = max(0, self._bytes // PAGE_BYTES - 1) * PAGE_BYTES
        self._before = 0 if memory.fake else -source.data_ptr() % PAGE_BYTES
        after = self._before + self._pages_bytes
        self._edges = torch.empty(self._bytes - self._pages_bytes, dtype=torch.uint8, device="cpu")
        self._edges[: self._before].copy_(source[: self._before])
        self._edges[self._before :].copy_(source[after:])
        self._extent = memory.scratch().reserve(self._pages_bytes)
        self.moved = memory.engine.write(source[self._before : after], self._extent, _LABEL, [])

    def fetch(self) -> Fetch:
        memory, extent = self._memory, self._extent
        # One page to align, one for the bytes before, two for those after. From PyTorch's allocator: it has the pages
        # that forward freed, and to fault in new ones takes longer than to read them.
        buffer = memory.compute.allocate(self._pages_bytes + 4 * PAGE_BYTES, _LABEL, _TORCH)
        at = PAGE_BYTES + (0 if memory.fake else -buffer.tensor.data_ptr() % PAGE_BYTES)
        run = ReadRun(path=extent.path, offset=extent.offset, bytes=extent.bytes, at=at, direct=True)
        moved = memory.engine.read([run], buffer, _LABEL, [self.moved])
        return Fetch(self, buffer, moved, at - self._before, self._bytes)

    def fill_edges(self, buffer: torch.Tensor, at: int) -> None:
        after = self._before + self._pages_bytes
        buffer[at : at + self._before].copy_(self._edges[: self._before])
        buffer[at + after : at + self._bytes].copy_(self._edges[self._before :])

    def release(self) -> None:
        self._memory.scratch().release(self._extent)
