"""darts: N-BEATS, a TCN, a block RNN and a TFT."""

import numpy as np
import recorder
from darts import TimeSeries
from darts.models import BlockRNNModel, NBEATSModel, TCNModel, TFTModel

dtype = np.float64 if recorder.PRECISION == "64-true" else np.float32
series = TimeSeries.from_values(np.sin(np.arange(120) / 4).astype(dtype) + 1)
common = {
    "input_chunk_length": 12,
    "output_chunk_length": 4,
    "n_epochs": 1,
    "batch_size": 16,
    "random_state": 1,
    "pl_trainer_kwargs": {
        "accelerator": "cpu",
        "devices": 1,
        "precision": recorder.PRECISION,
        "enable_progress_bar": False,
        "logger": False,
    },
}
for make in (
    lambda: NBEATSModel(**common, num_stacks=2, num_blocks=1, layer_widths=16),
    lambda: TCNModel(**common, dropout=0.0),
    lambda: BlockRNNModel(**common, model="LSTM", hidden_dim=8),
    lambda: TFTModel(**common, hidden_size=8, add_relative_index=True, dropout=0.0),
):
    recorder.seed()
    make().fit(series)
