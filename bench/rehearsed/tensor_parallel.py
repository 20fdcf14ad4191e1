"""Tensor parallelism and FSDP2 on a mesh of two dimensions, as PyTorch's tutorial combines them."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
world = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cuda", (world // 4, 4), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(*[Block(1024) for _ in range(4)]).cuda()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for block in model:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"], mp_policy=policy)
fully_shard(model, mesh=mesh["data"], mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(8):
    model(torch.randn(16, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
