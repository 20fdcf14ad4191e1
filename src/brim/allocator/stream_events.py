"""Frees that wait for other streams: the events of ``record_stream``, without a device.

Follows ``insert_events``, ``process_events`` and ``insert_events_deferred_until_no_capture`` of PyTorch's
``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from brim.allocator.blocks import Block


class StreamEvents:
    """One queue of events per stream; a stream passes the front of its queue on request."""

    def __init__(self) -> None:
        self.pending = False  # whether any block waits, kept up to date because every request asks
        self._queues: dict[int, deque[Block]] = {}
        self._passed: dict[int, int] = {}  # stream -> events at the front of its queue that are over
        self._deferred: list[Block] = []  # freed during a capture, when events must not be queried
        self._captured_uses: dict[Block, set[int]] = {}

    def record_use(self, block: Block, stream: int, *, capturing: bool) -> None:
        if block.stream_uses is None:
            block.stream_uses = set()
        block.stream_uses.add(stream)
        if capturing:
            self._captured_uses.setdefault(block, set()).add(stream)

    def add(self, block: Block, *, capturing: bool) -> None:
        """A freed block that other streams used: it waits for each of them from here on."""
        self.pending = True
        if capturing:
            self._deferred.append(block)
        else:
            self._insert(block)

    def _insert(self, block: Block) -> None:
        streams, block.stream_uses = sorted(block.stream_uses or ()), None
        block.event_count += len(streams)
        for stream in streams:
            self._queues.setdefault(stream, deque()).append(block)

    def complete(self, stream: int | None) -> None:
        """``stream`` (None: every stream) has passed all events that are recorded so far."""
        for name in list(self._queues) if stream is None else [stream]:
            self._passed[name] = len(self._queues.get(name, ()))

    def finished(self, *, synchronize: bool = False) -> Iterator[Block]:
        """The blocks whose last event is over; with ``synchronize``, after waiting for all.

        Each no longer waits when it is given, and must be put back before the next is asked for.
        """
        yield from self._flush_deferred()
        if synchronize:
            self.complete(None)
        for stream in list(self._queues):
            queue = self._queues[stream]
            for _ in range(self._passed.pop(stream, 0)):
                block = queue.popleft()
                block.event_count -= 1
                if not block.event_count:
                    yield block
            if not queue:
                del self._queues[stream]
        self.pending = bool(self._queues)

    def _flush_deferred(self) -> Iterator[Block]:
        """Start to wait for the uses outside captures; what was used inside captures only is free at once."""
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            block.stream_uses = (block.stream_uses or set()) - self._captured_uses.pop(block, set())
            self._insert(block)
            if not block.event_count:
                yield block
