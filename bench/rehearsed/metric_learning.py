"""pytorch-metric-learning: triplets that a miner picks from the batch."""

import torch
from pytorch_metric_learning import losses, miners
from torchvision.models import resnet18

model = resnet18(num_classes=128).cuda()
miner, loss_of = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(10):
    images, labels = torch.randn(32, 3, 96, 96, device="cuda"), torch.randint(0, 8, (32,), device="cuda")
    embeddings = model(images)
    loss = loss_of(embeddings, labels, miner(embeddings, labels))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
