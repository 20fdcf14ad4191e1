"""DeepLabV3 under autocast with a gradient scaler, as torchvision's reference training does it."""

import torch
from torchvision.models.segmentation import deeplabv3_resnet50

model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21, aux_loss=True).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler()
for _ in range(10):
    images, target = torch.randn(4, 3, 320, 320).cuda(), torch.randint(0, 21, (4, 320, 320)).cuda()
    with torch.autocast("cuda"):
        out = model(images)
        losses = [torch.nn.functional.cross_entropy(out[name], target, ignore_index=255) for name in ("out", "aux")]
        loss = losses[0] + 0.5 * losses[1]
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
