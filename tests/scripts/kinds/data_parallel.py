"""DataParallel without a GPU."""

import torch
from torch import nn

torch.manual_seed(0)
m = nn.DataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]))
o = torch.optim.Adam(m.parameters())
for _ in range(3):
    loss = m(torch.randn(4, 256)).square().mean()
    o.zero_grad()
    loss.backward()
    o.step()
    print(loss.item())
