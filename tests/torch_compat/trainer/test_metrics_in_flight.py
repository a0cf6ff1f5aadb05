"""Values logged over an epoch are the same in a run that was resumed inside of it, for every sink and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.loggers.logger import Logger
from torch_compat.trainer import metric_states

X = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))


class Memory(Logger):
    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.sent.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        pass


class Model(LightningModule):
    """Epoch means, a metric logged as an object, one that the user computes and resets, and the same in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.outputs = torchmetrics.CatMetric()
        self.val_error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        y = self.layer(batch[0])
        loss = y.square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", y.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.error(y, batch[0][:, :1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.outputs.update(y.detach().flatten())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("spread", self.outputs.compute().std())
        self.outputs.reset()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.val_error(self.layer(batch[0]), batch[0][:, :1])
        self.log("val_error", self.val_error)
        self.log("val_step", self.layer(batch[0]).mean(), on_step=True, on_epoch=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder: Path, resume: Path | None = None) -> tuple[Memory, Trainer]:
    torch.manual_seed(1)
    logger = Memory()
    saved = [ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)] if resume is None else []
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=3, logger=logger, callbacks=saved, log_every_n_steps=1, val_check_interval=2,
        enable_checkpointing=not resume, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    data = TensorDataset(X)
    trainer.fit(Model(), DataLoader(data, 4, shuffle=True), DataLoader(data, 8), ckpt_path=resume)
    return logger, trainer


def test_logged_values_and_steps_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    whole, trainer = fit(tmp_path)  # six batches an epoch
    for step in (5, 10):
        resumed, continued = fit(tmp_path, tmp_path / f"step={step}.ckpt")
        # The step's own values were sent before it was saved.
        sent = [i for i, (_, values) in enumerate(whole.sent) if "loss_step" in values][step - 1]
        assert resumed.sent == whole.sent[sent + 1 :]
        assert dict(continued.callback_metrics) == dict(trainer.callback_metrics)


def test_states_of_two_processes_are_counted_once_on_another_number() -> None:
    model = Model()
    parts = []
    for half in X.split(24):
        model.error.reset()
        model.outputs.reset()
        model.error.update(half[:, 0], half[:, 1])
        model.outputs.update(half[:, 0])
        parts.append(metric_states.states(model))
    whole = torchmetrics.MeanSquaredError()
    whole.update(X[:, 0], X[:, 1])
    metric_states.load(model, metric_states.merged(model, parts, 0))
    torch.testing.assert_close(model.error.compute(), whole.compute())
    torch.testing.assert_close(model.outputs.compute(), X[:, 0])
    metric_states.load(model, metric_states.merged(model, parts, 1))
    assert model.error.sum_squared_error == 0
    assert model.error.total == 0
