"""A module that keeps what it was called with."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.cache = {}
        self.count = 0
        self.out = []

    def forward(self, x):
        self.count += 1
        self.cache.setdefault("first", x)
        for layer in self.layers:
            x = layer(x).tanh()
        self.out.append(x)
        self.cache["last"] = x + self.cache["first"]
        return x


m = Net()
with torch.no_grad():
    for _ in range(3):
        m(torch.randn(4, 256))
print(m.count, len(m.out), [type(o).__name__ for o in m.out], m.cache["last"].double().sum().item())
