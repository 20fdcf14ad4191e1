"""diffusers group offload: blocks copied on a stream of their own while the one before runs, as documented."""

from __future__ import annotations

from diffusers.hooks.group_offloading import apply_group_offloading

from peers.gpu import Applied, Task

TITLE = "diffusers group offload"
WARMUP = 2
CAPPED = True


def apply(task: Task) -> Applied:
    streams = task.device.type == "cuda"
    task.module.lm_head.to(task.device)
    apply_group_offloading(
        task.module.model,  # it looks for the list of blocks among the direct children
        onload_device=task.device,
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=streams,
        non_blocking=streams,
        record_stream=streams,
    )
    return Applied()
