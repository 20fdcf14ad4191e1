"""A model that is evaluated before it is trained, as some programs do for a baseline."""

import torch
from torch import nn

torch.manual_seed(11)
model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.ReLU()) for _ in range(8)])
x = torch.randn(16, 368)
model.eval()
with torch.no_grad():
    print("before", (model(x) - x).square().mean().item())
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
