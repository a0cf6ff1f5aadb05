"""neuralforecast: NHITS, NBEATS, an LSTM and PatchTST on two series."""

import numpy as np
import pandas as pd
import recorder
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NBEATS, NHITS, PatchTST

t = np.arange(120)
frame = pd.concat(
    pd.DataFrame({"unique_id": name, "ds": pd.date_range("2020", periods=120, freq="D"), "y": np.sin(t / k) + t / 100})
    for name, k in (("a", 3), ("b", 5))
)
common = {
    "h": 6,
    "input_size": 12,
    "max_steps": 20,
    "precision": recorder.PRECISION,
    "windows_batch_size": None,  # all windows: a compiled step's draws are not torch's
    "inference_windows_batch_size": 64,
    "enable_progress_bar": False,
    "logger": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
    "devices": 1,
}
for model in (
    NHITS(**common),
    NBEATS(**common),
    LSTM(**common, encoder_dropout=0.0),
    PatchTST(**common, dropout=0.0, fc_dropout=0.0, attn_dropout=0.0, head_dropout=0.0)
    if "attn_dropout" in PatchTST.__init__.__code__.co_varnames
    else NHITS(**common),
):
    recorder.seed()
    NeuralForecast(models=[model], freq="D").fit(frame)
