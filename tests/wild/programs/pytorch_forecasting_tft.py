"""pytorch-forecasting: a TemporalFusionTransformer."""

import numpy as np
import pandas as pd
import recorder
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

rows = [{"time": i, "group": str(g), "value": float(np.sin(i / (3 + g)) + g)} for g in range(4) for i in range(60)]
data = TimeSeriesDataSet(
    pd.DataFrame(rows),
    time_idx="time",
    target="value",
    group_ids=["group"],
    max_encoder_length=12,
    max_prediction_length=4,
    time_varying_unknown_reals=["value"],
    time_varying_known_reals=["time"],
    static_categoricals=["group"],
)
recorder.seed()
model = TemporalFusionTransformer.from_dataset(
    data,
    hidden_size=8,
    attention_head_size=2,
    dropout=0.0,
    hidden_continuous_size=4,
    loss=QuantileLoss(),
    learning_rate=0.01,
    log_interval=-1,
)
trainer = recorder.trainer(max_epochs=1, limit_train_batches=5, gradient_clip_val=0.1)
trainer.fit(
    model,
    data.to_dataloader(train=True, batch_size=16, num_workers=0),
    data.to_dataloader(train=False, batch_size=16, num_workers=0),
)
