"""A callback of Lightning's Trainer that predicts the memory of a step."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from brim.core import Timeline
from brim.integrations.training_step import note_explained, note_measured, note_unpredicted, predict_step


class BrimCallback(Callback):
    """Predict the memory of a training step before the first step, and explain the error if memory runs out.

    ``Trainer(..., callbacks=[BrimCallback()])`` writes to stderr what ``brim.integrations.transformers.BrimCallback``
    writes. A step that cannot be predicted is trained all the same: one of several processes or optimizers, or
    of manual optimization.

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
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization or trainer.world_size > 1:
            note_unpredicted("there are several processes or optimizers, or manual optimization")
            return
        numbers = [0] if len(inspect.signature(pl_module.training_step).parameters) > 1 else []

        def forward(copy: Any, batch: Any) -> Any:
            with trainer.precision_plugin.forward_context():
                loss = copy.training_step(batch, *numbers)
            return loss["loss"] if isinstance(loss, dict) else loss

        passes, clip_norm = trainer.accumulate_grad_batches, float(trainer.gradient_clip_val or 0)
        example = (batch,), dict[str, Any]()
        self.predicted = predict_step(pl_module, trainer.optimizers[0], example, passes, clip_norm, forward)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        note_measured(self.predicted)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        note_explained(exception)
