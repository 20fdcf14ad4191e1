"""A model that is copied with copy.deepcopy: an average from the start, the best one so far in the middle."""

import copy

import torch
from torch import nn

torch.manual_seed(5)
model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.BatchNorm1d(368), nn.ReLU()) for _ in range(8)])
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(16, 368)
best, best_loss = None, float("inf")
for step in range(5):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * value)
    if step in (1, 3) and loss.item() < best_loss:
        best, best_loss = copy.deepcopy(model), loss.item()
    print(step, loss.item())
model.eval()
best.eval()
with torch.no_grad():
    print(*(one(x).double().sum().item() for one in (model, average, best)))
for one in (model, best):
    print(sum(value.double().sum().item() for value in one.state_dict().values()))
