"""The one writer of a run's Timeline: stamps the time and lets several threads write."""

from __future__ import annotations

import threading
import time

from brim.core import EventKind, Timeline

SHORTEST_WAIT_S = 50e-6  # asking whether something is there takes a little too


class Recorder:
    """Writes events with seconds since its making.

    ``keep`` bounds the events of a long run: past it only the totals in ``copied_bytes`` and ``busy_s`` go on.
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
        """A copy that began at ``begin_s`` and ends now."""
        took_s = self.now_s() - begin_s
        with self._lock:
            lane = (source, target)
            self.copied_bytes[lane] = self.copied_bytes.get(lane, 0) + bytes
            self.busy_s[lane] = self.busy_s.get(lane, 0.0) + took_s
        self._add(EventKind.COPY, target, bytes, time_s=begin_s, duration_s=took_s, source=source, label=label)

    def waited(self, tier: str, begin_s: float, label: str) -> None:
        """Compute in ``tier`` had to wait for ``label``'s copy from ``begin_s`` until now."""
        took_s = self.now_s() - begin_s
        if took_s >= SHORTEST_WAIT_S:
            self._add(EventKind.IDLE, tier, 0, time_s=begin_s, duration_s=took_s, label=label, category="copy")

    def _add(self, kind: EventKind, tier: str, bytes: int, **fields: object) -> None:
        with self._lock:
            if len(self.timeline) < self.keep:
                self.timeline.add(kind, tier, bytes, **fields)  # type: ignore[arg-type]
