"""FSDP2 with its CPU offload policy, on one rank: parameters, gradients and states rest in RAM."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from peers.training import Outcome, Setting, looped, make_optimizer, open_model, usual_step

TITLE = "FSDP2 CPUOffloadPolicy"
PACKAGE = "torch"
LOSSLESS = True


def run(setting: Setting) -> Outcome:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = shard(open_model(setting), "cpu")
    parameters = dict(model.named_parameters())

    def value(name: str) -> torch.Tensor:
        return cast(torch.Tensor, parameters[name].full_tensor().detach())

    step = usual_step(model, make_optimizer(model))
    return looped(setting, step, value, close=dist.destroy_process_group)


def shard(model: Any, device: str) -> Any:
    """As its tutorial does: every block a group of its own, and the rest one."""
    mesh = init_device_mesh(device, (1,))
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)
