"""Modules and data modules that ``cli.py`` names by class path."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    """A small regression.

    Args:
        width: hidden units.
        lr: learning rate of its own optimizer.
        activation: between the layers.
    """

    def __init__(self, width: int = 8, lr: float = 0.1, activation: nn.Module | None = None, n_features: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(n_features, width), activation or nn.ReLU(), nn.Linear(width, 1))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class WiderNet(Net):
    """A subclass for the command line to choose."""

    def __init__(self, factor: int = 2, **kwargs: int) -> None:
        super().__init__(width=4 * factor)
        self.save_hyperparameters()


class Injected(Net):
    """A module whose optimizer and scheduler are made by functions from the command line."""

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.SGD,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ) -> None:
        super().__init__()
        self.optimizer_fn, self.scheduler_fn = optimizer, scheduler

    def configure_optimizers(self) -> dict:
        optimizer = self.optimizer_fn(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler_fn(optimizer)}


class Data(pl.LightningDataModule):
    """Rows of a linear function."""

    def __init__(self, batch_size: int = 16, rows: int = 64, n_features: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="batch_size")
        self.batch_size = batch_size
        self.width = 2 * n_features
        x = torch.randn(rows, n_features, generator=torch.Generator().manual_seed(1))
        self.rows = TensorDataset(x, x.sum(1, keepdim=True))

    def loader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
