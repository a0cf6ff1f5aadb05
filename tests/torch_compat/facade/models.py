"""The shared part of the questions about runs: a quiet Trainer, a module of one layer, its data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import nn
from torch.utils.data import DataLoader

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**{**QUIET, **options})


MODULE_MEMBERS = (
    *(
        "automatic_optimization",
        "current_epoch",
        "device",
        "device_mesh",
        "dtype",
        "example_input_array",
        "fabric",
        "global_rank",
    ),
    *("global_step", "hparams", "local_rank", "logger", "loggers", "on_gpu", "strict_loading", "trainer"),
)


class Net(pl.LightningModule):
    """A layer, with a hyperparameter."""

    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/loss", torch.tensor(2.0))
        self.log("count", 3.0, on_step=True, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"rows": torch.tensor(len(batch)), "batch": batch_idx, "loader": dataloader_idx}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


def data(rows: int = 6) -> DataLoader:
    torch.manual_seed(0)
    return DataLoader(RandomDataset(4, rows), batch_size=2)


def seeded() -> Net:
    torch.manual_seed(1)
    return Net()
