"""The models that the scripts of semantics train, and for how long."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from basics import Regression, regression_data
from recording import Run
from torch import Tensor, nn


def fit(run: Run, model: pl.LightningModule, n: int = 64, val: bool = False, **options: Any) -> pl.Trainer:
    """Two epochs of four batches unless told otherwise."""
    trainer = run.trainer(**{"max_epochs": 2, **options})
    loaders = [run.loader(*regression_data(n))] + ([run.loader(*regression_data(32, 1))] if val else [])
    run.fit(model, trainer, *loaders)
    return trainer


class Deep(Regression):
    """Two blocks, the first with dropout (inactive: p = 0) and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.block(x))
