"""Training from a DataLoader with worker processes, started in the way that the first argument names."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __init__(self):
        self.parent = os.getpid()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        assert os.getpid() != self.parent, "this is to run in a worker"
        x = torch.sin(torch.arange(368.0) * (index + 1))
        return x, x.square()


def main():
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.Tanh()) for _ in range(8)], nn.Linear(368, 368))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Squares(), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=sys.argv[1])
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
