"""pytorch-forecasting: DeepAR and N-BEATS."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import recorder
from pytorch_forecasting import DeepAR, NBeats, TimeSeriesDataSet

rows = [{"time": i, "group": str(g), "value": float(np.sin(i / (3 + g)) + g)} for g in range(4) for i in range(60)]
for kind in (NBeats, DeepAR):
    data = TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **({} if kind is NBeats else {"min_encoder_length": 6}),
    )
    recorder.seed()
    model = kind.from_dataset(data, learning_rate=0.01, log_interval=-1, dropout=0.0)
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        devices=1,
    )
    trainer.fit(
        model,
        data.to_dataloader(train=True, batch_size=16, num_workers=0),
        data.to_dataloader(train=False, batch_size=16, num_workers=0),
    )
