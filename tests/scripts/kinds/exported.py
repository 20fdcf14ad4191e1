"""An exported program."""

import torch
from torch import nn

torch.manual_seed(0)
m = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
e = torch.export.export(m, (torch.randn(4, 256),))
with torch.no_grad():
    print(e.module()(torch.randn(4, 256)).double().sum().item())
