"""Updates in RAM on a thread of their own, beside a backward pass on a GPU.

The thread that runs a backward pass is far ahead of the GPU. If it waited for a block's gradients, stepped the block
and brought it back, the GPU would have nothing to do meanwhile; here only this thread waits.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from brim.memory.tiers import Memory
from brim.techniques.streaming.host_device_copy import Carried, HostDeviceCopy, tensor_bytes


@dataclass(frozen=True)
class _Update:
    """One under way, and the part of the room that it has."""

    begin: int
    end: int
    future: Future[None]


class BackgroundUpdates:
    """Runs updates one after another. As many wait as the room of ``host_copy`` has place for."""

    def __init__(self, memory: Memory, host_copy: HostDeviceCopy) -> None:
        self._host_copy = host_copy
        # A prediction has nothing to overlap, and where RAM is the compute tier the CPU is what computes.
        self.possible = memory.host is not None and not memory.fake and host_copy.work_bytes > 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="brim-update")
        self._under_way: deque[_Update] = deque()

    def begin(
        self,
        tensors: Sequence[tuple[nn.Parameter, torch.Tensor]],
        label: str,
        update: Callable[[Carried], None],
    ) -> None:
        """Have ``update`` run with these parameters and gradients. They are copied when this returns.

        It waits for the copies alone: gradients that wait for their update in the compute tier would be memory that
        nobody has promised. Raises what an earlier update raised.
        """
        begin, end = self._room(sum(2 * tensor_bytes(parameter) for parameter, _ in tensors))
        carried = self._host_copy.carry([(p, gradient, False, False) for p, gradient in tensors], begin, label)
        carried.arrive()
        # From here on the values may change at any time, so code that saved them must be notified.
        torch.autograd.graph.increment_version([p for p, _ in tensors])
        self._under_way.append(_Update(begin, end, self._thread.submit(update, carried)))

    def _room(self, bytes: int) -> tuple[int, int]:
        """A part of the room that nobody has, after whatever wait that takes; it is given in a circle."""
        while self._under_way:
            first, last = self._under_way[0].begin, self._under_way[-1].end
            limit = first if last <= first else self._host_copy.work_bytes
            if last + bytes <= limit:
                return last, last + bytes
            if last > first and bytes <= first:
                return 0, bytes
            self._wait_for_first()
        return 0, bytes

    def _wait_for_first(self) -> None:
        self._under_way[0].future.result()  # and it stays the first if this is interrupted
        self._under_way.popleft()

    def join(self) -> None:
        """Wait for all of them. Raises what the first that failed raised."""
        while self._under_way:
            try:
                self._wait_for_first()
            except Exception:
                self.give_up()
                raise

    def give_up(self) -> None:
        """Wait for all of them, however they end: the step that they belong to has failed."""
        while self._under_way:
            with contextlib.suppress(Exception):
                self._under_way[0].future.result()
            self._under_way.popleft()

    def close(self) -> None:
        self.give_up()
        self._thread.shutdown()
