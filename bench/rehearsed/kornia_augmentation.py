"""kornia: augmentation on the GPU in front of a classifier."""

import kornia.augmentation as K
import torch
from torch import nn
from torchvision.models import resnet18

augment = nn.Sequential(
    K.RandomHorizontalFlip(p=0.5), K.RandomAffine(degrees=15.0, p=0.7), K.ColorJitter(0.2, 0.2, 0.2, 0.1, p=0.8),
    K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.3), K.RandomErasing(p=0.2),
)  # fmt: skip
model = resnet18(num_classes=10).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    images, labels = torch.rand(32, 3, 128, 128, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    loss = nn.functional.cross_entropy(model(augment(images)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
