"""Lightning: a module of one's own under its Trainer."""

from __future__ import annotations

import warnings

import pytorch_lightning as pl
import torch
from _settings import kept, language_loss, optimizer, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
given = settings()
WIDE = ("optimizer", "states", "gradients", "loading")
WIDTH = 2048 if given.case in WIDE else 256 if given.case in ("loss", "outputs") else 512
WORDS = {"loss": 48000, "outputs": 16000}.get(given.case, 1024)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.inner(x)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.outputs = []

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            recomputed = "checkpointing" in given and self.training
            x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        return self.head(x)

    def training_step(self, batch, _):
        logits = self(batch)
        if given.case == "loss":
            return language_loss(logits.bfloat16().flatten(0, 1), batch.flatten(), given)
        return logits.float().square().mean()

    def validation_step(self, batch, _):
        self.outputs.append(kept(self(batch), given))
        if given.case != "outputs":
            self.outputs.clear()

    def configure_optimizers(self):
        if given.case == "gradients":
            return torch.optim.SGD(self.parameters(), lr=1e-4, foreach=False)
        if given.case == "states":
            return torch.optim.AdamW(self.parameters(), fused=True)
        return optimizer(self.parameters(), given)


data = torch.utils.data.DataLoader(torch.randint(0, 1000, (512, 64)), batch_size=given.batch)
model = Model()
if "weights in 16 bits" in given:
    model = model.bfloat16()
precision = "bf16-mixed" if "bfloat16 autocast" in given else "32-true"
trainer = pl.Trainer(
    accelerator="gpu", max_steps=5, precision=precision, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=20,
    limit_train_batches=5,
)  # fmt: skip
if given.case in ("evaluation", "outputs", "loading"):
    trainer.validate(model, data, verbose=False)
else:
    trainer.fit(model, data)
