"""bitsandbytes: AdamW with states of 8 bits."""

import bitsandbytes as bnb
import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=6)).cuda()
optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-4)
for _ in range(10):
    tokens = torch.randint(0, 50257, (4, 512), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
