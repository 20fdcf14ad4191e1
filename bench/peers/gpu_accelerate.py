"""``accelerate.cpu_offload``: each weight copied to the device when its module runs (accelerate/big_modeling.py)."""

from __future__ import annotations

from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module

from peers.gpu import Applied, Task

TITLE = "accelerate.cpu_offload"
WARMUP = 2
CAPPED = True


def apply(task: Task) -> Applied:
    cpu_offload(task.module, execution_device=task.device)
    return Applied(remove=lambda: remove_hook_from_module(task.module, recurse=True))
