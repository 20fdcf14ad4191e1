"""What autograd saved, on its way out during forward and on its way back during backward.

Both are ordered by the packing: forward lets the oldest go first and never keeps more than a window of bytes;
backward asks in the reverse order, so that the window before what it asks for is what it needs next.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from enum import Enum

import torch

from brim.errors import BrimError, BudgetError
from brim.memory.transfer import Done, Settled, Ticket
from brim.techniques.activation_offload.ways import Fetch, OffloadedActivation, Way
from brim.techniques.saved_tensor_hooks import Unchanged

Order = list["weakref.ref[Activation]"]  # of packing


class Stage(Enum):
    KEPT = "kept"  # among the newest: it need not leave
    LEAVING = "leaving"  # being copied, and still here
    AWAY = "away"
    STAYS = "stays"  # it could not leave


class Activation:
    """The bytes of one storage that autograd saved, wherever they are: one, however many nodes saved it."""

    def __init__(self, source: torch.Tensor, remains: deque[_Remains]) -> None:
        self.bytes = source.numel()
        self.stage = Stage.KEPT
        self.source: torch.Tensor | None = source  # uint8: the storage that forward made
        self.offloaded: OffloadedActivation | None = None
        self.coming: Fetch | None = None
        self.back: torch.Tensor | None = None  # uint8: what came back
        self.savings = 0  # how many nodes saved it
        self.unused = 0  # how many of them have not asked since it came back
        self.round = 0  # how often it was fetched
        self.done_in = -1  # the backward pass that needs it no more
        self._remains = remains

    @property
    def is_here(self) -> bool:
        return self.source is not None or self.coming is not None or self.back is not None

    def __del__(self) -> None:
        # Anywhere, in any thread: nothing is waited for and no lock is taken here.
        if self.offloaded is not None:
            on_thread = isinstance(self.offloaded.moved, (Done, Ticket))  # which holds what it still reads from
            source = None if on_thread else self.source
            self._remains.append(_Remains(self.stage, self.bytes, self.offloaded, self.coming, source))
        elif self.stage is Stage.KEPT:
            self._remains.append(_Remains(self.stage, self.bytes, None, None, None))


@dataclass
class _Remains:
    """What an activation that nobody needs any more has left behind. ``source`` may still be read from."""

    stage: Stage
    bytes: int
    offloaded: OffloadedActivation | None
    coming: Fetch | None
    source: torch.Tensor | None

    def release(self) -> None:
        if self.coming is not None:
            self.coming.drop()
        if self.offloaded is not None:
            Settled(self.offloaded.moved).wait()
            self.offloaded.release()


class Saved:
    """One tensor that one node saved: a view of an activation."""

    def __init__(
        self, owner: Activations, activation: Activation, tensor: torch.Tensor, unchanged: Unchanged, order: Order
    ) -> None:
        self._owner, self.activation, self.unchanged = owner, activation, unchanged
        self.order, self.at = order, len(order)
        order.append(weakref.ref(activation))
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self.round = 0

    def unpack(self) -> torch.Tensor:
        return self._owner.give(self)

    def view(self, bytes: torch.Tensor) -> torch.Tensor:
        """The tensor as it was, over the storage's ``bytes``."""
        item = self._dtype.itemsize
        whole = bytes[: bytes.numel() // item * item].view(self._dtype)
        return whole.as_strided(self._size, self._stride, bytes.storage_offset() // item + self._offset)


class Activations:
    """All activations of one model that are, or will be, away.

    At most ``window_bytes`` of what was saved stay in the compute tier while forward goes on (half of them kept, half
    leaving), and at most that much comes back before it is asked for, one activation always. ``misses`` counts those
    that were asked for before they were fetched.
    """

    def __init__(self, way: Way, *, window_bytes: int) -> None:
        self.window_bytes, self.misses = window_bytes, 0
        self._way = way
        self._nothing = torch.empty(0)
        self._lock = threading.RLock()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[Activation]]] = {}
        self._remains: deque[_Remains] = deque()
        self._kept: deque[weakref.ref[Activation]] = deque()
        self._leaving: deque[weakref.ref[Activation]] = deque()
        self._bytes = {Stage.KEPT: 0, Stage.LEAVING: 0}
        self._order: Order = []  # since the last backward
        self._given = False  # whether backward has begun since
        self._fetched: weakref.WeakSet[Activation] = weakref.WeakSet()  # and not used yet

    # -- forward

    def keep(self, tensor: torch.Tensor) -> Saved:
        """Take ``tensor`` from autograd. Waits while too much is on its way out.

        Raises BudgetError and TransferError when what is older cannot leave.
        """
        with self._lock:
            self._clear()
            if self._given or (self._order and all(other() is None for other in reversed(self._order))):
                self._order, self._given = [], False
            activation = self._find(tensor)
            if activation is None:
                activation = self._admit(tensor)
            activation.savings += 1
            activation.unused += 1
            return Saved(self, activation, tensor, Unchanged(tensor, self._nothing), self._order)

    def _find(self, tensor: torch.Tensor) -> Activation | None:
        storage, version, activation = self._known.get(tensor.untyped_storage()._cdata, (None, 0, None))
        if storage is None or activation is None or storage() is None or version != tensor._version:
            return None
        return activation()

    def _admit(self, tensor: torch.Tensor) -> Activation:
        storage = tensor.untyped_storage()
        item = tensor.element_size()
        whole = tensor.detach().as_strided((storage.nbytes() // item,), (1,), 0)
        activation = Activation(whole.view(torch.uint8), self._remains)
        self._bytes[Stage.KEPT] += activation.bytes
        self._kept.append(weakref.ref(activation))
        self._make_room()
        key, activations = storage._cdata, self._known
        activations[key] = (
            weakref.ref(storage, lambda _: activations.pop(key, None)),
            tensor._version,
            weakref.ref(activation),
        )
        return activation

    def _make_room(self) -> None:
        """Let the oldest go until the newest are within the window."""
        while len(self._kept) > 1 and 2 * self._bytes[Stage.KEPT] > self.window_bytes:
            activation = self._kept[0]()
            if activation is not None:
                assert activation.source is not None, "it has not left"
                activation.offloaded = self._way.send(activation.source)
                self._move_on(activation, Stage.LEAVING)
                self._leaving.append(self._kept[0])
            self._kept.popleft()
        while len(self._leaving) > 1 and 2 * self._bytes[Stage.LEAVING] > self.window_bytes:
            activation = self._leaving[0]()
            if activation is not None:
                self._let_go(activation)
            self._leaving.popleft()

    def _let_go(self, activation: Activation) -> None:
        assert activation.offloaded is not None, "it is leaving"
        try:
            activation.offloaded.moved.wait()
        except BrimError:
            activation.offloaded.release()
            activation.offloaded = None
            self._move_on(activation, Stage.STAYS)
            self._leaving.popleft()
            raise
        activation.source = None
        self._move_on(activation, Stage.AWAY)

    def _move_on(self, activation: Activation, stage: Stage) -> None:
        for counted, sign in ((activation.stage, -1), (stage, 1)):
            if counted in self._bytes:
                self._bytes[counted] += sign * activation.bytes
        activation.stage = stage

    # -- backward

    def give(self, saved: Saved) -> torch.Tensor:
        """The tensor that ``keep`` took. Raises RuntimeError when it was modified in place since, and BrimErrors."""
        with self._lock:
            saved.unchanged.check()
            self._given = True
            self._clear()
            activation = saved.activation
            if not activation.is_here:
                self.misses += 1
                self._forget(activation)
                self._fetch(activation)
            self._fetch_before(saved)
            moved = activation.offloaded.moved if activation.offloaded is not None else None
            if activation.stage is Stage.LEAVING and isinstance(moved, Ticket):
                Settled(moved).wait()  # its thread would hold it longer than autograd does
            bytes = activation.source if activation.source is not None else self._arrived(activation)
            tensor = saved.view(bytes)
            self._count_use(activation, saved)
            return tensor

    def _fetch(self, activation: Activation) -> None:
        assert activation.offloaded is not None, "it is away"
        activation.coming = activation.offloaded.fetch()
        activation.round += 1
        activation.unused = activation.savings
        self._fetched.add(activation)

    def _fetch_before(self, saved: Saved) -> None:
        """Bring back what was saved before ``saved``, newest first, up to the window."""
        task, budget_bytes, seen = torch._C._current_graph_task_id(), self.window_bytes, {saved.activation}
        for position in range(saved.at - 1, -1, -1):
            activation = saved.order[position]()
            if activation is None or activation in seen or activation.done_in == task != -1:
                continue
            seen.add(activation)
            budget_bytes -= activation.bytes
            if budget_bytes < 0 and len(seen) > 2:
                return
            if not activation.is_here:
                try:
                    self._fetch(activation)
                except BudgetError:  # not now: when it is asked for
                    return

    def _arrived(self, activation: Activation) -> torch.Tensor:
        if activation.back is None:
            try:
                self._arrive(activation)
            except BrimError:
                # It failed while nobody needed it, perhaps: whether it still does is known only now.
                self._fetch(activation)
                self._arrive(activation)
        assert activation.back is not None, "it arrived"
        return activation.back

    def _arrive(self, activation: Activation) -> None:
        assert activation.coming is not None, "it is on its way"
        try:
            activation.back = activation.coming.arrive()
        except BrimError:
            activation.coming.drop()
            activation.coming = None
            raise
        activation.coming = None

    def _count_use(self, activation: Activation, saved: Saved) -> None:
        """After the last node that saved it has asked, it lives as long as autograd holds it."""
        self._fetched.discard(activation)
        if saved.round != activation.round:
            saved.round = activation.round
            activation.unused -= 1
        if activation.unused <= 0 and activation.source is None:
            activation.back = None
            activation.done_in = torch._C._current_graph_task_id()

    def _forget(self, wanted: Activation) -> None:
        """What was fetched ahead is not what is asked for: it must not take the room of what is."""
        for activation in [*self._fetched]:
            if activation is not wanted and activation.coming is not None:
                activation.coming.drop()
                activation.coming = None
            activation.back = None
        self._fetched.clear()

    # -- the end

    def _clear(self) -> None:
        """Release what nobody needs any more. What is still being moved is waited for: a thread that is late would
        keep memory that the budget does not have."""
        while self._remains:
            left = self._remains[0]  # and it stays there while it is waited for: Ctrl-C may come
            left.release()
            self._remains.popleft()
            if left.stage in self._bytes:
                self._bytes[left.stage] -= left.bytes

    def settle(self) -> None:
        """Release whatever nobody needs any more, in all places."""
        with self._lock:
            self._clear()
            self._way.trim()

    def __del__(self) -> None:
        if hasattr(self, "_fetched"):
            self.settle()
