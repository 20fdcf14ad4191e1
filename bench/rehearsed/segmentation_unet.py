"""segmentation-models-pytorch: a Unet with Dice loss and its metrics."""

import segmentation_models_pytorch as smp
import torch

model = smp.Unet("resnet34", encoder_weights=None, in_channels=3, classes=1).cuda()
loss_of = smp.losses.DiceLoss(mode="binary")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for _ in range(10):
    images, masks = torch.randn(8, 3, 256, 256, device="cuda"), torch.rand(8, 1, 256, 256, device="cuda") > 0.5
    logits = model(images)
    loss = loss_of(logits, masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    stats = smp.metrics.get_stats((logits.sigmoid() > 0.5).long(), masks.long(), mode="binary")
    print(smp.metrics.iou_score(*stats, reduction="micro"))
