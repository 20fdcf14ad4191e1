"""Checkpoints of model and optimizer, saved, thrown away and gone on from, as PyTorch's tutorial on them has it."""

import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(6)


def make():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.Tanh()) for _ in range(8)], nn.Linear(368, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 368)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
    return loss.item()


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "checkpoint.tar"
    model, optimizer = make()
    loss = train(model, optimizer, 3)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": loss}
    torch.save(kept, path)
    del model, optimizer, kept
    model, optimizer = make()
    found = torch.load(path, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    print("goes on from", found["loss"])
    del found
    train(model, optimizer, 3)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])  # back, in the middle of it all
    train(model, optimizer, 2)
