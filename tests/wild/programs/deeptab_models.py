"""deeptab: a tabular ResNet and an FT-Transformer."""

import numpy as np
import pandas as pd
import recorder
from deeptab.configs import FTTransformerConfig, ResNetConfig, TrainerConfig
from deeptab.models import FTTransformerRegressor, ResNetRegressor

x = np.random.default_rng(0).normal(size=(120, 5))
frame = pd.DataFrame(x, columns=[f"f{i}" for i in range(5)])
y = x @ np.arange(5.0) + 0.1
for kind, config in (
    (ResNetRegressor, ResNetConfig(dropout=0.0)),
    (FTTransformerRegressor, FTTransformerConfig(attn_dropout=0.0, ff_dropout=0.0, head_dropout=0.0)),
):
    recorder.seed()
    kind(model_config=config, trainer_config=TrainerConfig(max_epochs=2, batch_size=32), random_state=1).fit(
        frame, y, precision=recorder.PRECISION
    )
