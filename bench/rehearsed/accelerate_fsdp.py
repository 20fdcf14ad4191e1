"""Accelerate: FSDP2 by its plugin, as `accelerate launch` sets it up, on the ranks of a job."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = GPT2LMHeadModel(GPT2Config(n_layer=6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = DataLoader(TensorDataset(torch.randint(0, 50257, (640, 256))), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (tokens,) in data:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(accelerator.gather(loss.detach()).mean().item())
