"""An ensemble under vmap, and gradients of each sample."""

import copy

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

torch.manual_seed(0)
ms = [nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(4)]
params, buffers = stack_module_state(ms)
base = copy.deepcopy(ms[0]).to("meta")


def f(p, b, x):
    return functional_call(base, (p, b), (x,))


print(vmap(f, in_dims=(0, 0, None))(params, buffers, torch.randn(5, 256)).double().sum().item())


def loss(p, x):
    return functional_call(ms[0], p, (x,)).square().mean()


g = vmap(grad(loss), in_dims=(None, 0))(dict(ms[0].named_parameters()), torch.randn(5, 256))
print(sum(v.double().sum().item() for v in g.values()))
print(ms[1](torch.randn(2, 256)).double().sum().item())
