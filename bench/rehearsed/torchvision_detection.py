"""Faster R-CNN trained on a few images, as torchvision documents its detection models."""

import torch
from torchvision.models.detection import fasterrcnn_resnet50_fpn

model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=21).cuda().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in range(10):
    images = [torch.rand(3, 480, 640, device="cuda") for _ in range(2)]
    boxes = torch.tensor([[10.0, 20.0, 200.0, 220.0], [50.0, 60.0, 400.0, 300.0]], device="cuda")
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2], device="cuda")} for _ in images]
    loss = sum(model(images, targets).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    print([sorted(found) for found in model([torch.rand(3, 480, 640, device="cuda")])])
