"""A module that raises, which the program catches."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.no_such_thing


try:
    Net()(torch.randn(4, 256))
except AttributeError as e:
    print("mine:", e)
try:
    Net()(torch.randn(4, 255))
except RuntimeError as e:
    print("mine:", e)
