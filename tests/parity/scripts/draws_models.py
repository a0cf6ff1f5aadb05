"""The module that the cases of ``draws`` train, and a callback that writes down where torch's generator is."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from recording import Run
from torch import Tensor, nn

Loss = Callable[["Drawing", Tensor, Tensor], Tensor]


def place() -> str:
    """Where torch's generator is."""
    return hashlib.md5(torch.get_rng_state().numpy().tobytes()).hexdigest()


class Places(pl.Callback):
    """Writes down where torch's generator is in hooks."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def note(self, hook: str) -> None:
        self.run.record["hooks"].append([hook, place()])

    def on_train_start(self, *_: Any) -> None:
        self.note("on_train_start")

    def on_train_epoch_start(self, *_: Any) -> None:
        self.note("on_train_epoch_start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.note("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("on_train_batch_end")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.note("on_validation_batch_end")

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.note("on_validation_epoch_end")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.note("on_train_epoch_end")

    def on_test_batch_end(self, *_: Any) -> None:
        self.note("on_test_batch_end")

    def on_predict_batch_end(self, *_: Any) -> None:
        self.note("on_predict_batch_end")


class Drawing(pl.LightningModule):
    """A net of eight features and two targets; ``how`` makes the loss. Validation draws, too."""

    def __init__(self, net: nn.Module, how: Loss | None = None) -> None:
        super().__init__()
        self.net = net
        self.how: Loss = how or (lambda self, x, y: F.mse_loss(self.net(x), y))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.how(self, *batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("validation", F.mse_loss(self.net(x + 0.1 * torch.randn_like(x)), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.how(self, *batch) + torch.rand(()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]) + torch.randn(2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def rows(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 8, generator=generator), torch.randn(n, 2, generator=generator)


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def fit(run: Run, net: nn.Module, how: Loss | None = None, module: type[Drawing] = Drawing, **options: Any) -> pl.Trainer:
    """Two epochs with batches in another order each, the last one smaller, and validation."""
    model = module(net, how)
    run.initialise(model)
    seed()
    trainer = run.trainer(**{"max_epochs": 2, "callbacks": [Places(run)], **options})
    run.fit(model, trainer, run.loader(*rows(), shuffle=True), run.loader(*rows(24)))
    run.note("then", torch.rand(3))
    return trainer


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
