"""A compiled module."""

import torch
from torch import nn

torch.manual_seed(0)
m = torch.compile(nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), backend="eager")
with torch.no_grad():
    print(m(torch.randn(4, 256)).double().sum().item())
