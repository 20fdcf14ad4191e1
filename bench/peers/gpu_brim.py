"""brim itself."""

from __future__ import annotations

from typing import Any

import brim
from peers.gpu import Applied, Task

TITLE = "brim"
WARMUP = 2
CAPPED = True


def apply(task: Task) -> Applied:
    handle = brim.fit(task.module, vram=task.budget_bytes)

    def facts() -> dict[str, Any]:
        timeline = handle.timeline()
        return {"facts": dict(timeline.facts), "streamed_bytes": timeline.copied_bytes("ram", "vram")}

    return Applied(facts=facts, remove=handle.remove)
