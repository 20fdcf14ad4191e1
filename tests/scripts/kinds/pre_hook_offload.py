"""An offload of weights by hooks of the program's own."""

import torch
from torch import nn

torch.manual_seed(0)
store = {}
m = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])


def load(module, args):
    module.weight.data = store[module]


def drop(module, args, out):
    module.weight.data = torch.empty(0)


for part in m:
    store[part] = part.weight.data
    part.weight.data = torch.empty(0)
    part.register_forward_pre_hook(load)
    part.register_forward_hook(drop)
with torch.no_grad():
    print(m(torch.randn(4, 256)).double().sum().item())
