"""A callback of Lightning's Trainer that predicts the memory of a step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from brim.core import Timeline
from brim.integrations.training_step import note_explained, note_measured, note_unpredicted, predict_step


class BrimCallback(Callback):
    """Predict the memory of a training step before the first step, and explain the error if memory runs out.

    ``Trainer(..., callbacks=[BrimCallback()])`` writes to stderr what ``brim.integrations.transformers.BrimCallback``
    writes. A step that cannot be predicted is trained all the same: one of several optimizers, or of manual
    optimization.

    Attributes:
        predicted: The predicted memory of two steps; None before the first step, and if it cannot be predicted.
    """

    def __init__(self) -> None:
        self.predicted: Timeline | None = None
        self._is_first = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.predicted, self._is_first = None, trainer.is_global_zero

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._is_first:
            return
        self._is_first = False
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            note_unpredicted("several optimizers, or manual optimization, step in the module's own code")
            return

        def forward(copy: Any, batch: Any) -> Any:
            with trainer.precision_plugin.forward_context():
                loss = copy.training_step(batch, 0)
            return loss["loss"] if isinstance(loss, dict) else loss

        passes, clip_norm = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        own, pl_module._trainer = pl_module._trainer, None  # the copy of the module is not to copy the trainer
        try:
            self.predicted = predict_step(
                pl_module, trainer.optimizers[0], ((batch,), {}), passes, float(clip_norm or 0), forward
            )
        finally:
            pl_module._trainer = own

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        note_measured(self.predicted)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        note_explained(exception)
