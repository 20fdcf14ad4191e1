"""MONAI: a Unet over volumes, Dice loss, and sliding windows in evaluation."""

import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet

model = UNet(3, in_channels=1, out_channels=2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2).cuda()
loss_of, metric = DiceCELoss(to_onehot_y=True, softmax=True), DiceMetric(include_background=False)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _ in range(6):
    volumes, labels = torch.randn(2, 1, 96, 96, 96).cuda(), torch.randint(0, 2, (2, 1, 96, 96, 96)).cuda()
    optimizer.zero_grad()
    loss_of(model(volumes), labels).backward()
    optimizer.step()
with torch.no_grad():
    found = sliding_window_inference(torch.randn(1, 1, 128, 128, 128).cuda(), (96, 96, 96), 4, model).argmax(1, True)
    metric(found, torch.randint(0, 2, found.shape).cuda())
    print(metric.aggregate().item())
