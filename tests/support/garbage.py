"""The threads that garbage holds, collected to the last one."""

from __future__ import annotations

import gc
import threading
import time


def collect_threads() -> list[str]:
    """Collect garbage until no thread of brim is left. Returns the names of those that are after two seconds."""
    for _ in range(100):
        gc.collect()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("brim-")]
        if not threads:
            break
        time.sleep(0.02)  # a thread that was dropped in the middle of a job keeps its memory until the job ends
    return threads
