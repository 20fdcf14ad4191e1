"""Random requests on an allocator under test, and the replay of those that ``bench/allocator_truth.py`` recorded."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any, Protocol

from brim.allocator.out_of_memory import OutOfMemory
from brim.recordings import snapshot
from brim.recordings.history import DeviceHistory
from brim.recordings.replay import Replay
from brim.recordings.timeline import recorded_run
from brim.units import GIB, KIB, MIB
from support.simulated_recording import Recording

FOLDER = Path(__file__).resolve().parents[2] / "measurements" / "allocator_truth"
SETTINGS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "max_split": "max_split_size_mb:64",
    "roundup": "roundup_power2_divisions:8",
    "roundup_list": "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "gc": "garbage_collection_threshold:0.6",
    "max_split_gc": "max_split_size_mb:128,garbage_collection_threshold:0.8",
    "expandable_roundup": "expandable_segments:True,roundup_power2_divisions:4",
}
LIMIT_BYTES = 3 * GIB  # what each run may reserve
_LIVE_BYTES = 5 * GIB // 2  # what the sequence holds before it frees


class Backend(Protocol):
    """An allocator under test."""

    def malloc(self, bytes: int, stream: int) -> Any: ...
    def free(self, handle: Any) -> None: ...
    def use(self, handle: Any, stream: int) -> None: ...
    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...
    def dump(self) -> bytes: ...


def run(backend: Backend, seed: int, events: int) -> bytes:
    """One random sequence; the same for the same seed, whatever the allocator answers but for what does not fit."""
    drawn = random.Random(seed)
    usual = [drawn.randint(1, 64 * MIB) for _ in range(12)]  # a step asks for the same sizes again and again
    held: list[tuple[Any, int]] = []
    total = 0
    for _ in range(events):
        what = drawn.random()
        if what < 0.52:
            size, stream = _size(drawn, usual), drawn.choice((0, 0, 0, 1))
            while held and total + size > _LIVE_BYTES and drawn.random() < 0.97:
                total -= _free(backend, held, drawn)
            handle = backend.malloc(size, stream)
            if handle is None:
                for _ in range(len(held) // 2):
                    total -= _free(backend, held, drawn)
            else:
                held.append((handle, size))
                total += size
        elif what < 0.93 and held:
            total -= _free(backend, held, drawn)
        elif what < 0.97 and held:
            backend.use(drawn.choice(held)[0], drawn.choice((0, 1)))
        elif what < 0.99:
            backend.synchronize()
        elif what > 0.996:
            backend.empty_cache()
    return backend.dump()


def _free(backend: Backend, held: list[tuple[Any, int]], drawn: random.Random) -> int:
    handle, size = held.pop(drawn.randrange(len(held)) if drawn.random() < 0.5 else -1)
    backend.free(handle)
    return size


def _size(drawn: random.Random, usual: list[int]) -> int:
    """Small tensors mostly; some of the usual sizes; a few large ones."""
    kind = drawn.random()
    if kind < 0.4:
        return int(2 ** drawn.uniform(0, 20))
    if kind < 0.7:
        return drawn.choice(usual)
    if kind < 0.9:
        return drawn.randint(512 * KIB, 24 * MIB)
    return drawn.randint(16 * MIB, 300 * MIB)


class Simulated:
    """brim's own allocator, for a machine without a GPU."""

    def __init__(self, setting: str) -> None:
        fraction = f"per_process_memory_fraction:{LIMIT_BYTES / (64 * GIB)}"  # of what Recording calls the device
        self.allocator = Recording(",".join(filter(None, (setting, fraction))), LIMIT_BYTES)

    def malloc(self, bytes: int, stream: int) -> Any:
        try:
            return self.allocator.malloc(bytes, stream)
        except OutOfMemory:
            return None

    def free(self, handle: Any) -> None:
        self.allocator.free(handle)

    def use(self, handle: Any, stream: int) -> None:
        self.allocator.record_stream(handle, stream)

    def synchronize(self) -> None:
        self.allocator.complete_events()

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def dump(self) -> bytes:
        return self.allocator.dump()


def replay(history: DeviceHistory) -> Replay:
    return recorded_run(history, "run").replay


def replayed(path: Path) -> Any:
    """The replay of one record."""
    found = snapshot.parse(gzip.decompress(path.read_bytes()), path.name)
    return replay(found.devices[0])
