"""DistributedDataParallel as PyTorch's tutorial starts it, with a sampler and synchronized batch norms."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import resnet50

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(resnet50(num_classes=100)).to(device)
model = DistributedDataParallel(model, device_ids=[device.index])
data = TensorDataset(torch.randn(640, 3, 64, 64), torch.randint(0, 100, (640,)))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), pin_memory=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for images, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(images.to(device, non_blocking=True)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(total.item() / dist.get_world_size())
dist.destroy_process_group()
