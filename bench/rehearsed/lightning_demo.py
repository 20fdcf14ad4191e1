"""Lightning: the transformer of its own demos, by a Trainer with accumulation and a checkpoint."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import Transformer
from torch.utils.data import DataLoader, TensorDataset


class Language(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Transformer(vocab_size=5000)

    def training_step(self, batch, _):
        output = self.model(*batch)
        loss = torch.nn.functional.nll_loss(output, batch[1].view(-1))
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", torch.nn.functional.nll_loss(self.model(*batch), batch[1].view(-1)))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


data = TensorDataset(torch.randint(0, 5000, (256, 35)), torch.randint(0, 5000, (256, 35)))
trainer = pl.Trainer(max_epochs=2, accelerator="gpu", precision="16-mixed", accumulate_grad_batches=2, logger=False)
trainer.fit(Language(), DataLoader(data, batch_size=32), DataLoader(data, batch_size=32))
