"""A plain training loop: a multilayer perceptron, AdamW, a loss per step."""

import torch
from torch import nn

torch.manual_seed(0)
layers = []
for _ in range(8):
    layers += [nn.Linear(368, 368), nn.GELU(), nn.Dropout(0.1)]
model = nn.Sequential(*layers, nn.Linear(368, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 368), torch.randint(0, 10, (64,))
for step in range(6):
    batch = torch.randperm(64)[:16]
    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
model.eval()
with torch.no_grad():
    print(model(x).double().sum().item())
