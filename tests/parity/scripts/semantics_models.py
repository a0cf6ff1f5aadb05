"""The models that the scripts of semantics train, and for how long."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
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


class BackwardInTheStep(Regression):
    """Its own backward pass leaves gradients, which the ``zero_grad()`` before the loss's backward drops."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch[0]).square().mean().backward()
        return super().training_step(batch, batch_idx)


class Recomputed(torch.autograd.Function):
    """Runs a backward pass of its own in its backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), grad)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.first, self.block, self.shared = nn.Linear(8, 8), nn.Linear(8, 8), shared

    def forward(self, x: Tensor) -> Any:
        inner = Recomputed.apply(self.first(x), self.block)
        return inner + self.block(x) if self.shared else inner  # pyright: ignore[reportOperatorIssue]
