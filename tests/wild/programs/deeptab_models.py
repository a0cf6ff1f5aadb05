"""deeptab: a tabular ResNet and an FT-Transformer."""

import numpy as np
import pandas as pd
import recorder
from deeptab.models import FTTransformerRegressor, ResNetRegressor

x = np.random.default_rng(0).normal(size=(120, 5))
frame = pd.DataFrame(x, columns=[f"f{i}" for i in range(5)])
y = x @ np.arange(5.0) + 0.1
for kind in (ResNetRegressor, FTTransformerRegressor):
    recorder.seed()
    model = kind(dropout=0.0) if kind is ResNetRegressor else kind(attn_dropout=0.0, ff_dropout=0.0)
    model.fit(frame, y, max_epochs=2, batch_size=32)
