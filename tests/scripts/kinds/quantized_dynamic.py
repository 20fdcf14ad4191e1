"""A dynamically quantized module."""

import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
m = torch.ao.quantization.quantize_dynamic(
    nn.Sequential(nn.Embedding(2000, 256), *[nn.Linear(256, 256) for _ in range(6)]).eval(),
    {nn.Linear},
    dtype=torch.qint8,
)
with torch.no_grad():
    print(m(torch.randint(0, 2000, (4, 7))).double().sum().item())
