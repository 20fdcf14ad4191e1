"""Re-creates PyTorch's variational autoencoder example: its decoder is also called by itself, to draw samples."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(400, 640)
        self.hidden = nn.Linear(640, 640)
        self.mean = nn.Linear(640, 20)
        self.spread = nn.Linear(640, 20)
        self.fc3 = nn.Linear(20, 640)
        self.fc4 = nn.Linear(640, 400)

    def encode(self, x):
        h = F.relu(self.hidden(F.relu(self.fc1(x))))
        return self.mean(h), self.spread(h)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mean, spread = self.encode(x)
        z = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        return self.decode(z), mean, spread


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(2):
    for _ in range(3):
        data = torch.rand(16, 400)
        optimizer.zero_grad()
        made, mean, spread = model(data)
        divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        loss = F.binary_cross_entropy(made, data, reduction="sum") + divergence
        loss.backward()
        optimizer.step()
        print(loss.item())
    with torch.no_grad():
        print("sample", model.decode(torch.randn(8, 20)).double().sum().item())
