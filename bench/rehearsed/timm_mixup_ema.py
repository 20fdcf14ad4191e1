"""timm: a ConvNeXt with Mixup, soft targets and an average of its weights."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

model = timm.create_model("convnext_tiny", pretrained=False, num_classes=100, drop_path_rate=0.1).cuda()
optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=10)
average, mixup, criterion = ModelEmaV3(model), Mixup(mixup_alpha=0.8, num_classes=100), SoftTargetCrossEntropy()
for epoch in range(10):
    images, target = mixup(torch.randn(16, 3, 224, 224).cuda(), torch.randint(0, 100, (16,)).cuda())
    with torch.autocast("cuda", torch.bfloat16):
        loss = criterion(model(images), target)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update(model)
    scheduler.step(epoch)
    print(epoch, loss.item())
