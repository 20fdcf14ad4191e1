"""Re-creates PyTorch's super-resolution example, deeper: sub-pixel convolutions, an orthogonal start."""

import math

import torch
from torch import nn

torch.manual_seed(123)
FACTOR = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 80, 5, padding=2)
        self.middle = nn.ModuleList(nn.Conv2d(80, 80, 3, padding=1) for _ in range(20))
        self.last = nn.Conv2d(80, FACTOR**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(FACTOR)
        for conv in (self.first, *self.middle):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.last.weight)

    def forward(self, x):
        for conv in (self.first, *self.middle):
            x = torch.relu(conv(x))
        return self.shuffle(self.last(x))


model = Net()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
images = torch.rand(8, 1, 12, 12)
small = nn.functional.avg_pool2d(images, FACTOR)
for epoch in range(2):
    for begin in (0, 4):
        optimizer.zero_grad()
        loss = criterion(model(small[begin : begin + 4]), images[begin : begin + 4])
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())
    with torch.no_grad():
        print("ratio", 10 * math.log10(1 / criterion(model(small), images).item()))
