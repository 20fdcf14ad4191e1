"""An autograd function of the program's own that reads values."""

import torch
from torch import nn

torch.manual_seed(0)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        ctx.most = x.abs().max().item()
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if ctx.most < 0:
            raise RuntimeError("never")
        return g * (x.abs() <= ctx.limit), None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = Clip.apply(layer(x), 1.0)
        return x


m = Net()
o = torch.optim.Adam(m.parameters())
for _ in range(3):
    loss = m(torch.randn(8, 256)).square().mean()
    o.zero_grad()
    loss.backward()
    o.step()
    print(loss.item())
