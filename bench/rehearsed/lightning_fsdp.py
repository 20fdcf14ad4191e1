"""Lightning: a Trainer on the ranks of a job, sharded by FSDP."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(block, 6), nn.Linear(512, 10)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.head(self.layers(batch[0]).mean(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


data = TensorDataset(torch.randn(512, 64, 512), torch.randint(0, 10, (512,)))
trainer = pl.Trainer(
    max_epochs=1, accelerator="gpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), precision="bf16-mixed",
    strategy=FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}), logger=False, enable_checkpointing=False,
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(data, batch_size=8))
