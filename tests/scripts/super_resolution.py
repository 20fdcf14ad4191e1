"""Re-creates PyTorch's super-resolution example: sub-pixel convolutions, an orthogonal start, signal-to-noise."""

import math

import torch
from torch import nn

torch.manual_seed(123)
FACTOR = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 128, 5, padding=2)
        self.conv2 = nn.Conv2d(128, 256, 3, padding=1)
        self.conv3 = nn.Conv2d(256, 256, 3, padding=1)
        self.conv4 = nn.Conv2d(256, FACTOR**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(FACTOR)
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        for conv in (self.conv1, self.conv2, self.conv3):
            x = torch.relu(conv(x))
        return self.shuffle(self.conv4(x))


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
