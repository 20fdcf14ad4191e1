"""A data set with a model of its own, in workers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class D(Dataset):
    def __init__(self):
        self.f = nn.Linear(8, 8)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        with torch.no_grad():
            return self.f(torch.full((8,), float(i))).sum().repeat(256)


if __name__ == "__main__":
    torch.manual_seed(0)
    m = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    o = torch.optim.Adam(m.parameters())
    for x in DataLoader(D(), batch_size=4, num_workers=2):
        loss = m(x).square().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        print(loss.item())
