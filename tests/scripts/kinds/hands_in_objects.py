"""An object with a lock that is passed to a module and written to."""

import threading
from dataclasses import dataclass, field

import torch
from torch import nn

torch.manual_seed(0)


@dataclass
class State:
    hidden: torch.Tensor
    seen: list = field(default_factory=list)
    lock: object = field(default_factory=threading.Lock)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x, state):
        with state.lock:
            for layer in self.layers:
                x = layer(x + state.hidden).tanh()
            state.hidden = x
            state.seen.append(x.mean())
        return x


m = Net()
s = State(torch.zeros(4, 256))
with torch.no_grad():
    for _ in range(3):
        y = m(torch.randn(4, 256), s)
print(y.double().sum().item(), len(s.seen), s.seen[-1].item())
