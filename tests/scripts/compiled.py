"""A model under torch.compile, trained and then evaluated."""

import torch
from torch import nn

torch.manual_seed(4)
model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.SiLU()) for _ in range(8)], nn.Linear(368, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fast = torch.compile(model, backend="eager")
x, y = torch.randn(16, 368), torch.randint(0, 4, (16,))
for step in range(4):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(fast(x), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
fast.eval()
with torch.no_grad():
    print(fast(x).double().sum().item(), model(x).double().sum().item())
