"""A model, its data, and the same training in plain torch: what the Trainer's runs are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import torch_compat as pl

ROWS, WIDTH = 22, 8


class Net(pl.LightningModule):
    """Two blocks with dims that four devices divide, and a bias that they do not; keeps each loss."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 16), torch.nn.Linear(16, WIDTH)])
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.log("val_loss", F.cross_entropy(scores, y))
        self.accuracy.update(scores, y)
        self.log("val_accuracy", self.accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }

    def values(self) -> list[float]:
        return [float(loss) for loss in self.losses]


def make(kind: Callable[..., Net] = Net, **kwargs: Any) -> Net:
    torch.manual_seed(0)
    return kind(**kwargs)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator))


def loader(parts: int) -> DataLoader:
    """Batches of 8 rows over ``parts`` devices; the last has 6, which four do not divide."""
    return DataLoader(dataset(), batch_size=8 // parts)


def trainer(strategy: Any, devices: int, **kwargs: Any) -> pl.Trainer:
    options = {
        "max_epochs": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu",
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, devices=devices, **(options | kwargs))


def plain_training(module: Net, epochs: int = 2, clip: float | None = None, accumulate: int = 1) -> list[float]:
    """The same in a bare loop on the host."""
    chosen = module.configure_optimizers()
    optimizer = chosen["optimizer"] if isinstance(chosen, dict) else chosen
    scheduler = chosen["lr_scheduler"]["scheduler"] if isinstance(chosen, dict) else None
    losses = []
    for _ in range(epochs):
        batches = list(loader(1))
        for index, (x, y) in enumerate(batches):
            if index % accumulate == 0:
                optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            (loss / accumulate).backward()
            losses.append(float(loss.detach()))
            if (index + 1) % accumulate == 0 or index + 1 == len(batches):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
    return losses


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of any parameter or buffer."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for (_, a), (_, b) in pairs)
