"""Record a run's moves and waits from several threads in a Timeline."""

from __future__ import annotations

import threading
import time

from brim.core import EventKind, Timeline

SHORTEST_WAIT_S = 50e-6  # shorter waits are the cost of the check


class Recorder:
    """Adds events with the seconds since its creation.

    After ``keep`` events only the totals in ``copied_bytes`` and ``busy_s`` continue.
    """

    def __init__(self, timeline: Timeline, *, keep: int = 1_000_000) -> None:
        self.timeline, self.keep = timeline, keep
        self.copied_bytes: dict[tuple[str, str], int] = {}  # (source, target) -> bytes moved
        self.busy_s: dict[tuple[str, str], float] = {}
        self._start_s = time.perf_counter()
        self._lock = threading.Lock()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def allocated(self, tier: str, bytes: int, storage: int, label: str, category: str = "") -> None:
        now_s = self.now_s()
        self._add(EventKind.ALLOC, tier, bytes, time_s=now_s, storage=storage, label=label, category=category)

    def freed(self, tier: str, bytes: int, storage: int, label: str) -> None:
        self._add(EventKind.FREE, tier, bytes, time_s=self.now_s(), storage=storage, label=label)

    def copied(self, source: str, target: str, bytes: int, begin_s: float, label: str) -> None:
        """Record a copy that began at ``begin_s`` and ends now."""
        took_s = self.now_s() - begin_s
        with self._lock:
            lane = (source, target)
            self.copied_bytes[lane] = self.copied_bytes.get(lane, 0) + bytes
            self.busy_s[lane] = self.busy_s.get(lane, 0.0) + took_s
        self._add(EventKind.COPY, target, bytes, time_s=begin_s, duration_s=took_s, source=source, label=label)

    def waited(self, tier: str, begin_s: float, label: str) -> None:
        """Record that compute in ``tier`` waited for ``label``'s copy from ``begin_s`` until now."""
        took_s = self.now_s() - begin_s
        if took_s >= SHORTEST_WAIT_S:
            self._add(EventKind.IDLE, tier, 0, time_s=begin_s, duration_s=took_s, label=label, category="copy")

    def computed(self, tier: str, begin_s: float, took_s: float, label: str, lane: int = 0) -> None:
        """Record compute in ``tier`` on ``label``; events of several lanes may nest."""
        self._add(EventKind.COMPUTE, tier, 0, time_s=begin_s, duration_s=took_s, label=label, stream=lane)

    def _add(self, kind: EventKind, tier: str, bytes: int, **fields: object) -> None:
        with self._lock:
            if len(self.timeline) < self.keep:
                self.timeline.add(kind, tier, bytes, **fields)  # type: ignore[arg-type]
