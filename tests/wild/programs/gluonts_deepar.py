"""gluonts: DeepAR and a feed-forward network."""

import numpy as np
import pandas as pd
import recorder
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator

data = ListDataset([{"start": pd.Period("2020-01-01", "D"), "target": np.sin(np.arange(100) / k) + 2} for k in (3, 5)], freq="D")
options = {"max_epochs": 1, "enable_progress_bar": False, "logger": False, "accelerator": "cpu", "devices": 1}
for estimator in (
    SimpleFeedForwardEstimator(
        prediction_length=4, context_length=12, num_batches_per_epoch=10, batch_size=8, trainer_kwargs=dict(options)
    ),
    DeepAREstimator(
        freq="D",
        prediction_length=4,
        context_length=12,
        num_batches_per_epoch=10,
        batch_size=8,
        dropout_rate=0.0,
        trainer_kwargs=dict(options),
    ),
):
    recorder.seed()
    estimator.train(data)
