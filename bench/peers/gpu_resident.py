"""The reference: all weights on the device, no cap. Gives T_compute and the output that all others must match."""

from __future__ import annotations

from peers.gpu import Applied, Task

TITLE = "all resident (no cap)"
WARMUP = 2
CAPPED = False


def apply(task: Task) -> Applied:
    task.module.to(task.device)
    return Applied()
