"""A module out of torch.fx."""

import torch
from torch import nn

torch.manual_seed(0)
m = torch.fx.symbolic_trace(nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]))
with torch.no_grad():
    print(m(torch.randn(4, 256)).double().sum().item())
