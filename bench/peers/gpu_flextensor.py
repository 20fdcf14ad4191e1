"""FlexTensor: profiles the first iterations, then places and prefetches weights within a share of the memory."""

from __future__ import annotations

import flextensor
import torch

from peers.gpu import Applied, Task

TITLE = "FlexTensor"
WARMUP = 14  # 1 of discovery, 10 of profiling, then its plan
CAPPED = True


def apply(task: Task) -> Applied:
    for part in (task.module.model.embed_tokens, task.module.model.norm, task.module.model.rotary_emb):
        part.to(task.device)
    task.module.lm_head.to(task.device)
    total_bytes = torch.cuda.get_device_properties(task.device).total_memory
    config = flextensor.OffloadConfig(
        include_patterns=["model.layers.*"],
        max_gpu_mem_fraction=(task.budget_bytes - task.working_bytes) / total_bytes,
    )
    flextensor.offload(task.module, config=config)
    return Applied(remove=flextensor.release)
