"""A regression that is optimized by hand."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from basics import Regression, regression_data
from recording import Run, numbers
from torch import Tensor, nn


class Manual(Regression):
    """Two layers, the optimizer's steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.first(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(run: Run, model: pl.LightningModule, n: int = 64, **options: Any) -> pl.Trainer:
    trainer = run.trainer(**{"max_epochs": 2, **options})
    run.fit(model, trainer, run.loader(*regression_data(n)))
    return trainer


def gradients_of(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else numbers(p.grad) for p in model.parameters()]
