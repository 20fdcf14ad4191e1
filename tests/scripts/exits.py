"""A program with arguments that trains, and ends with the exit code it was told."""

import argparse
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--code", type=int, default=0)
parser.add_argument("words", nargs="*")
args = parser.parse_args()
torch.manual_seed(7)
model = nn.Sequential(*[nn.Sequential(nn.Linear(368, 368), nn.ReLU()) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = model(torch.randn(4, 368)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
print(args.words, sys.argv[1:])
sys.exit(args.code)
