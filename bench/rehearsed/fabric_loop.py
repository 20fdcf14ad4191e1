"""Lightning Fabric: a loop of one's own with its precision and its checkpoints."""

import lightning as L
import torch
from torchvision.models import efficientnet_b0

fabric = L.Fabric(accelerator="cuda", precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(1)
model = efficientnet_b0(num_classes=10)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
for _ in range(8):
    loss = torch.nn.functional.cross_entropy(
        model(torch.randn(8, 3, 160, 160, device=fabric.device)), torch.randint(0, 10, (8,), device=fabric.device)
    )
    optimizer.zero_grad()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})
