"""pytorch-forecasting: a temporal fusion transformer, trained by Lightning."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

frame = pd.DataFrame(
    {
        "time": np.tile(np.arange(100), 20),
        "series": np.repeat(np.arange(20), 100).astype(str),
        "value": np.random.rand(2000),
    }
)
data = TimeSeriesDataSet(
    frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=24, max_prediction_length=6,
    time_varying_unknown_reals=["value"], static_categoricals=["series"],
)  # fmt: skip
model = TemporalFusionTransformer.from_dataset(data, hidden_size=32, attention_head_size=4, loss=QuantileLoss())
trainer = pl.Trainer(max_epochs=1, accelerator="gpu", gradient_clip_val=0.1, limit_train_batches=10, logger=False)
trainer.fit(model, data.to_dataloader(train=True, batch_size=64, num_workers=0))
