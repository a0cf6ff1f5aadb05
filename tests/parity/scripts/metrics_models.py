"""The classifier that the cases of ``metrics`` measure."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import class_data
from recording import Run
from torch import Tensor, nn


class Measured(pl.LightningModule):
    """A linear classifier; what it measures is for the cases."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        """Called in every step."""

    def step(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        logits = self.layer(batch[0])
        self.measure(stage, logits, batch[1], batch_idx, dataloader_idx)
        return F.cross_entropy(logits, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step("train", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step("val", batch, batch_idx, dataloader_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(run: Run, model: pl.LightningModule, loaders: int = 1, **options: Any) -> pl.Trainer:
    """Three epochs of four batches, the last of them smaller, validated on 40 rows (and 24)."""
    trainer = run.trainer(**{"max_epochs": 3, **options})
    validation = [run.loader(*class_data(40, 1)), run.loader(*class_data(24, 2))][:loaders]
    run.fit(model, trainer, run.loader(*class_data(56)), validation if loaders > 1 else validation[0])
    return trainer
