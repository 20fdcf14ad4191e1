"""Trains until it is interrupted; says so when it has begun, and once more when it ends."""

import atexit

import torch
from torch import nn

atexit.register(lambda: print("the end", flush=True))
torch.manual_seed(8)
model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.ReLU()) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
step = 0
while True:
    model(torch.randn(4, 368)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 3:
        print("training", flush=True)
