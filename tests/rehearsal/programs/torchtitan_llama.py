"""One rank of torchtitan's Llama 3.1 8B under FSDP2, as on ``RANKS`` H100 at the end of 2024. Leaves ``result``.

The model and its selective checkpointing are those that ``tests/support/accuracy/torchtitan.py`` has after
torchtitan's code; here the loop is torchtitan's, too: model made on meta, fused AdamW, gradients clipped. PyTorch of
that time took flash attention on an H100, which the checkpointing saves; today it takes cuDNN's, which that does not
know.
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.accuracy import torchtitan

warnings.simplefilter("ignore")
ranks = int(os.environ["RANKS"])
dist.init_process_group("nccl", rank=0, world_size=ranks, store=dist.HashStore())
mesh = init_device_mesh("cuda", (ranks,))
with torch.device("meta"):
    model = torchtitan.Model(torchtitan._LAYERS)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for number, block in enumerate(model.layers):
    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=number < torchtitan._LAYERS - 1)
fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.zeros(torchtitan._BATCH, torchtitan._TOKENS, dtype=torch.long)
with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
    for _ in range(3):
        inputs, labels = tokens.cuda(), tokens.cuda()
        optimizer.zero_grad()
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
result = {"reserved": torch.cuda.max_memory_reserved(), "retries": torch.cuda.memory_stats()["num_alloc_retries"]}
