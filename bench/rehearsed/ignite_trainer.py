"""PyTorch-Ignite: supervised engines with metrics and mixed precision."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import mobilenet_v3_small

data = DataLoader(TensorDataset(torch.randn(128, 3, 96, 96), torch.randint(0, 10, (128,))), batch_size=32)
model, criterion = mobilenet_v3_small(num_classes=10).cuda(), nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
trainer = create_supervised_trainer(model, optimizer, criterion, device="cuda", amp_mode="amp", scaler=True)
metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
evaluator = create_supervised_evaluator(model, metrics=metrics, device="cuda")
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: print(evaluator.run(data).metrics))
trainer.run(data, max_epochs=2)
