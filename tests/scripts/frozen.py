"""A loop whose program has put what it made out of the garbage collector's sight, as one does before it forks."""

import gc

import torch
from torch import nn

torch.manual_seed(7)
model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.ReLU()) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
early = [[]]
gc.freeze()
late = [[]]
x = torch.randn(16, 368)
before = gc.get_freeze_count()
for _ in range(3):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
seen = {id(one) for one in gc.get_objects()}
# But for the few that were let go: an optimizer's first step, hooks that are taken off, garbage that was frozen too.
as_many = 0.98 * before < gc.get_freeze_count() < before + 100
print("frozen:", id(early) not in seen, id(late) not in seen, as_many)
