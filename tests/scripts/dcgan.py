"""Re-creates PyTorch's DCGAN tutorial: two networks, two Adam optimizers, real and generated images in turn."""

import torch
from torch import nn

torch.manual_seed(999)
NOISE, WIDTH, CHANNELS = 64, 48, 3


def initialise(module):
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, WIDTH * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(WIDTH * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH * 4, WIDTH * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH * 2, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(True),
            nn.Conv2d(WIDTH, CHANNELS, 3, 1, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(CHANNELS, WIDTH, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, WIDTH * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH * 4, WIDTH * 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(WIDTH * 8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH * 8, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, image):
        return self.main(image)


generator, discriminator = Generator(), Discriminator()
generator.apply(initialise)
discriminator.apply(initialise)
criterion = nn.BCELoss()
fixed = torch.randn(4, NOISE, 1, 1)
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for step in range(4):
    real = torch.rand(4, CHANNELS, 16, 16) * 2 - 1
    discriminator.zero_grad()
    label = torch.full((4,), 1.0)
    error_real = criterion(discriminator(real).view(-1), label)
    error_real.backward()
    fake = generator(torch.randn(4, NOISE, 1, 1))
    label.fill_(0.0)
    error_fake = criterion(discriminator(fake.detach()).view(-1), label)
    error_fake.backward()
    discriminator_optimizer.step()

    generator.zero_grad()
    label.fill_(1.0)
    error = criterion(discriminator(fake).view(-1), label)
    error.backward()
    generator_optimizer.step()
    print(step, error_real.item(), error_fake.item(), error.item())
with torch.no_grad():
    print(generator(fixed).double().abs().sum().item())
