"""Lightning's Trainer with a small classifier on random rows: loop, loaders and checkpoints are the library's own."""

import logging
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # which devices there are is told by lines of its own
warnings.simplefilter("ignore")


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, rows):
        return self.layers(rows)

    def training_step(self, batch, _):
        rows, labels = batch
        loss = nn.functional.cross_entropy(self(rows), labels)
        print(loss.item())
        return loss

    def validation_step(self, batch, _):
        rows, labels = batch
        print("validation", nn.functional.cross_entropy(self(rows), labels).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(12)
data = DataLoader(TensorDataset(torch.randn(32, 64), torch.randint(0, 10, (32,))), batch_size=8, shuffle=False)
with tempfile.TemporaryDirectory() as folder:
    trainer = pl.Trainer(
        max_epochs=2, accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1, logger=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Classifier(), data, data)
