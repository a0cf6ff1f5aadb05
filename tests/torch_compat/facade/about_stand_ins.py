"""Replacements of Lightning's objects in test suites and extensions, and what hooks see of metrics, rates and loaders."""

from __future__ import annotations

import contextlib
import csv
import io
import warnings
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import lightning.pytorch as pl
import torch
from answering import ask, attempt
from lightning.fabric import Fabric
from lightning.pytorch import callbacks as cb
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from models import Net, data, seeded, trainer
from torch import nn
from torch.utils.data import DataLoader


def calls(mock: Any) -> list[str]:
    return [name for name, _, _ in mock.method_calls]


@ask
def mocks_in_a_run() -> Any:
    callback, specified, logger, model = Mock(), Mock(spec=cb.Callback), Mock(log_dir="d"), seeded()
    model.validation_step = None
    model.on_train_end = Mock()
    plain = cb.Callback()
    plain.on_train_batch_end = Mock()
    one = trainer(max_epochs=1, callbacks=[callback, specified, plain], logger=logger, log_every_n_steps=1)
    with patch.object(cb.Callback, "on_fit_end") as replaced:
        one.fit(model, data(4), data(2))
    return [
        *(calls(mock) for mock in (callback, specified)),
        [[sorted(call.kwargs["metrics"]), call.kwargs["step"]] for call in logger.log_metrics.call_args_list],
        [replaced.call_count, model.on_train_end.call_count, plain.on_train_batch_end.call_count],
    ]


@ask
def optimizer_in_a_mock() -> Any:
    sgd, model = torch.optim.SGD, seeded()
    with warnings.catch_warnings(), patch.object(sgd, "step", autospec=True, side_effect=sgd.step) as step:
        warnings.simplefilter("ignore")  # here that steps run eagerly
        with patch.object(sgd, "zero_grad") as zero:
            one = trainer(max_epochs=1)
            one.fit(model, data(4))
    return [step.call_count, zero.call_count, model.layer.weight]


class Watching(cb.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []


def _watch(name: str) -> Any:
    def hook(self: Watching, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        seen = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen.append([name, *({key: float(value) for key, value in one.items()} for one in seen)])
        self.seen.append([type(trainer._active_loop).__name__.lstrip("_"), trainer._results is None, trainer.val_check_batch])
        self.seen.append(trainer.strategy.lr_scheduler_configs == trainer.lr_scheduler_configs)

    return hook


for _name in ("setup", *(name for name in dir(cb.Callback) if name.startswith("on_"))):
    setattr(Watching, _name, _watch(_name))


class Clipping(Net):
    clipped = 0

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        self.clipped += 1
        super().clip_gradients(*args, **kwargs)


@ask
def metrics_in_every_hook() -> Any:
    torch.manual_seed(1)
    watching, model = Watching(), Clipping()
    one = trainer(max_epochs=1, callbacks=[watching], gradient_clip_val=0.1, accumulate_grad_batches=2)
    one.fit(model, data(4), [data(2), data(2)])
    one.validate(model, data(2), verbose=False)
    return [watching.seen, model.clipped]


class Steps(Net):
    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("step", float(batch_idx), on_step=True, on_epoch=False, prog_bar=True)
        self.log("both", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)


@ask
def values_after_several_loaders() -> Any:
    one = trainer()
    one.validate(Steps(), [data(2), data(4)], verbose=False)
    return [one.callback_metrics, one.logged_metrics, one.progress_bar_metrics]


class Weighted(Net):
    def on_train_start(self) -> None:
        self.log("start", 1.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("weighted", float(batch_idx), on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log("by_rows", batch_idx * 1.0, on_step=False, on_epoch=True, batch_size=(batch[:, 0] > 0).sum() + 1)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        self.order = ["train"]
        return data(6)

    def val_dataloader(self) -> Any:
        self.order.append("val")
        return data(4)


class Gauges(CPUAccelerator):
    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"heat": 3.0}


@ask
def logged_values() -> Any:
    model, logger = seeded_weighted(), CSVLogger(".", name="log")
    options: dict[str, Any] = {"accelerator": Gauges(), "callbacks": [cb.DeviceStatsMonitor()], "num_sanity_val_steps": 0}
    one = trainer(max_epochs=1, logger=logger, log_every_n_steps=1, **options)
    one.fit(model)
    found = one.callback_metrics
    one.test(model, [data(2), data(4)], verbose=False)
    one.validate(model, verbose=False)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [sorted(found), [{name: float(value) for name, value in row.items() if value} for row in rows], model.order]


def seeded_weighted() -> Weighted:
    torch.manual_seed(1)
    return Weighted()


@ask
def batch_size_of_few_trials() -> Any:
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(RandomDataset(4, 64), batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return data(2)

    return Tuner(trainer(max_epochs=1)).scale_batch_size(Sized(), mode="binsearch", max_trials=1, steps_per_trial=1, margin=0.0)


@ask
def loaders_after_the_finders() -> Any:
    class Sized(Net):
        batch_size = 2
        lr = 0.1

        def train_dataloader(self) -> Any:
            return DataLoader(RandomDataset(4, 64), batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(RandomDataset(4, 32), batch_size=self.batch_size)

    found: list[Any] = []
    for limit in (1.0, 0):
        model, one = Sized(), trainer(max_epochs=1, limit_val_batches=limit)
        Tuner(one).scale_batch_size(model, max_trials=2, steps_per_trial=1, init_val=4)
        loaders = [one.train_dataloader, one.val_dataloaders]
        found.append([None if loader is None else loader.batch_size for loader in loaders])
    one, model = trainer(max_epochs=1), Sized()
    torch.manual_seed(3)
    with contextlib.redirect_stderr(io.StringIO()):  # stock shows a bar where none is wanted
        Tuner(one).lr_find(model, num_training=3)
    drawn = torch.rand(1)  # the loaders' data are drawn, too, and nothing of that is left
    return [*found, one.train_dataloader is not None, one.val_dataloaders is not None, drawn]


@ask
def fabric_saves_what_has_a_state() -> Any:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    made = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
    made[0].last_epoch = 5
    fabric.save("a.ckpt", {"scheduler": made[0], "n": 3})
    left = fabric.load("a.ckpt", {"scheduler": made[1]})
    return [fabric.load("a.ckpt")["scheduler"], left, made[1].last_epoch, attempt(lambda: model.mark_forward_method(3))]


@ask
def module_under_fabric() -> Any:
    fabric, model = Fabric(accelerator="cpu", devices=1, loggers=MagicMock()), Net()
    fabric.setup(model, model.configure_optimizers())
    return [
        model.trainer.global_rank,
        model.trainer.is_global_zero,
        attempt(lambda: model.trainer.max_epochs),
        model.all_gather(torch.ones(1)),
        type(model.logger).__name__,
    ]
