"""The simulated allocator with uses on several streams and CUDA graph captures, for recordings without a GPU.

Predictions make no such requests, and a replay takes their outcome from its record. Follows ``insert_events``,
``process_events`` and ``insert_events_deferred_until_no_capture`` of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from brim.allocator.blocks import Block, BlockPool, PoolId, PrivatePool
from brim.allocator.caching_allocator import CachingAllocator


class StreamsAndCaptures(CachingAllocator):
    """Freed blocks wait for the other streams that used them; captures have pools of their own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.captures: dict[PoolId, Collection[int] | None] = {}
        self.queues: dict[int, deque[Block]] = {}  # of a stream: the blocks that wait for it
        self.deferred: list[Block] = []  # freed during a capture, when events must not be queried
        self._passed: dict[int, int] = {}  # of a stream: events at the front of its queue that are over
        self._uses: dict[Block, set[int]] = {}
        self._captured_uses: dict[Block, set[int]] = {}

    @property
    def active_bytes(self) -> int:
        """The bytes in use, or waiting for other streams."""
        waiting = {block for queue in (self.deferred, *self.queues.values()) for block in queue}
        return sum(block.size for block in (*self.live.values(), *waiting))

    def malloc(self, nbytes: int, stream: int = 0, pool: PoolId | None = None) -> Block:
        if not self.captures:
            self._complete_waiting()
        return super().malloc(nbytes, stream, pool)

    def free(self, block: Block) -> None:
        """Free a block. If other streams used it, it becomes reusable when their events are over."""
        self.request_free(block)
        if block not in self._uses:
            self.complete_free(block)
        elif self.captures:
            self.deferred.append(block)
            block.event_count = 1
        else:
            self._insert(block)

    def empty_cache(self, pool: PoolId | None = None) -> None:
        if pool is None and self.captures:
            for name in [*self.private_pools]:
                super().empty_cache(name)
            return
        if pool is None:
            self._complete_waiting(synchronize=True)
        super().empty_cache(pool)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``stream`` uses ``block`` too (``Tensor.record_stream``)."""
        if stream != block.stream:
            self._uses.setdefault(block, set()).add(stream)
            if self.captures:
                self._captured_uses.setdefault(block, set()).add(stream)

    def complete_events(self, stream: int | None = None) -> None:
        """Let ``stream`` (None: every stream) reach all events recorded so far; ``malloc`` notices, as in PyTorch."""
        for name in list(self.queues) if stream is None else [stream]:
            self._passed[name] = len(self.queues.get(name, ()))

    def begin_allocate_to_pool(self, pool: PoolId, streams: Collection[int] | None = None) -> None:
        """Send requests on ``streams`` (None: all) to a private pool, as a CUDA graph capture does."""
        if pool in self.private_pools:
            self.private_pools[pool].use_count += 1
        else:
            self.private_pools[pool] = PrivatePool()
        self.captures[pool] = streams

    def end_allocate_to_pool(self, pool: PoolId) -> None:
        del self.captures[pool]

    def release_pool(self, pool: PoolId) -> None:
        """Remove a user of the pool; without users, its free segments can be released."""
        self.private_pools[pool].use_count -= 1

    def _pool_for(self, size: int, stream: int, pool: PoolId | None) -> BlockPool:
        if pool is None:
            capturing = (name for name, streams in self.captures.items() if streams is None or stream in streams)
            pool = next(reversed([*capturing]), None)
        return super()._pool_for(size, stream, pool)

    def _retry(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        return None if self.captures else super()._retry(pool, size, stream)

    def _insert(self, block: Block) -> None:
        streams = sorted(self._uses.pop(block))
        block.event_count = len(streams)
        for stream in streams:
            self.queues.setdefault(stream, deque()).append(block)

    def _complete_waiting(self, *, synchronize: bool = False) -> None:
        """Complete the frees whose last event is over; with ``synchronize``, all of them."""
        for block in self._finished(synchronize):
            self.complete_free(block)

    def _finished(self, synchronize: bool) -> Iterator[Block]:
        deferred, self.deferred = self.deferred, []
        for block in deferred:
            self._uses[block] -= self._captured_uses.pop(block, set())
            self._insert(block)
            if not block.event_count:  # only the captures used it
                yield block
        if synchronize:
            self.complete_events()
        for stream in list(self.queues):
            queue = self.queues[stream]
            for _ in range(self._passed.pop(stream, 0)):
                block = queue.popleft()
                block.event_count -= 1
                if not block.event_count:
                    yield block
            if not queue:
                del self.queues[stream]
