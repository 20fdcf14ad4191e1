"""brim itself."""

from __future__ import annotations

from typing import Any

import brim
from peers.gpu import Applied, Task

TITLE = "brim"
WARMUP = 2
CAPPED = True


def apply(task: Task) -> Applied:
    handle = brim.fit(task.module, vram=task.budget_bytes, device=task.device.type, example=task.example)

    def facts() -> dict[str, Any]:
        timeline = handle.timeline()
        promise = handle.plan.promise
        promised = {"promised_s": promise.step_s, "promised_bytes": dict(promise.peak_bytes)}
        return {"facts": dict(timeline.facts) | promised, "streamed_bytes": timeline.copied_bytes("ram", "vram")}

    return Applied(facts=facts, remove=handle.remove)
