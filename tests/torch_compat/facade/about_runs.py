"""Small runs: what they return, leave behind and print; what cannot be run; copies and pickles."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from about_modules import TwoOptimizers
from about_trainer import MEMBERS
from answering import ask, ask_each, attempt
from lightning.pytorch import callbacks as cb
from lightning.pytorch.demos.boring_classes import BoringDataModule, RandomIterableDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.data import has_len_all_ranks
from models import MODULE_MEMBERS, Net, data, trainer
from torch import nn
from torch.utils.data import DataLoader


def go_on(one: pl.Trainer) -> Any:
    """A copied Trainer, fitting its own copy of the module for another epoch."""
    before = one.lightning_module.layer.weight.clone()
    one.fit_loop.max_epochs = 2
    one.fit(one.lightning_module, data())
    return [one.global_step, one.current_epoch, bool((before != one.lightning_module.layer.weight).any())]


@ask
def fitted() -> Any:
    """A run whose many results are looked at."""
    torch.manual_seed(1)
    model, one = Net(), trainer(max_epochs=1, log_every_n_steps=1, logger=CSVLogger(".", name="log"), enable_checkpointing=True)
    before = attempt(lambda: one.save_checkpoint("early.ckpt"))
    one.fit(model, data(), data(4))
    found: dict[str, Any] = {"before": before}
    found["members"] = {name: attempt(lambda name=name: getattr(one, name)) for name in MEMBERS if name != "ckpt_path"}
    found["returned"] = attempt(lambda: one.validate(model, data(4)))
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        found[name] = getattr(one, name)
    found["best"] = attempt(lambda: one.checkpoint_callback.best_model_path)
    found["validates best"] = attempt(lambda: one.validate(dataloaders=[data(2), data(2)], ckpt_path="best", verbose=False))
    one.save_checkpoint("end.ckpt")
    loaded = Net.load_from_checkpoint("end.ckpt", lr=0.5)
    found["loaded"] = [loaded.hparams, loaded.training, torch.equal(loaded.layer.weight, model.layer.weight)]
    found["trainer copies"] = attempt(lambda: type(copy.deepcopy(one)))
    found["copy goes on"] = attempt(lambda: go_on(copy.deepcopy(one)))
    found["trainer pickled"] = attempt(lambda: pickle.loads(pickle.dumps(one)).global_step)
    found["module copies"] = attempt(lambda: copy.deepcopy(model).layer.weight)
    found["pickled"] = attempt(lambda: pickle.loads(pickle.dumps(model)).layer.weight)
    torch.save(model, "whole.pt")
    found["saved whole"] = attempt(lambda: torch.load("whole.pt", weights_only=False).layer.weight)
    found["log"] = sorted(os.listdir("log/version_0"))
    found["csv"] = Path("log/version_0/metrics.csv").read_text().splitlines()[0]
    found["state"] = [str(one.state.fn), str(one.state.status), str(one.state.stage), one.state.finished, one.state.stopped]
    found["module"] = {name: attempt(lambda name=name: getattr(model, name)) for name in MODULE_MEMBERS}
    found["nothing"] = [
        attempt(lambda: one.fit(model, data(), ckpt_path="no.ckpt")),
        attempt(lambda: one.test(dataloaders=data(2), ckpt_path="no.ckpt")),
    ]
    return found


class Gathers(Net):
    """Notes what ``all_gather`` makes of a tensor, a tree and a number, in a step and in a hook."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).pow(2).mean()
        found = self.all_gather({"batch": batch, "loss": loss, "number": 2.0, "text": "t"}, sync_grads=True)
        self.in_step = [found["batch"].shape, found["loss"].requires_grad, found["number"].shape, found["text"]]
        return found["loss"].sum()

    def on_train_epoch_end(self) -> None:
        self.in_hook = self.all_gather([torch.ones(3), 1])


@ask
def gathered_on_one_device() -> Any:  # stock's ddp would leave its process group to the questions after it
    torch.manual_seed(1)
    model = Gathers()
    trainer(max_epochs=1).fit(model, data())
    return [model.in_step, model.in_hook, model.layer.weight]


@ask
def predicted() -> Any:
    torch.manual_seed(1)
    one, model = trainer(), Net()
    return [
        one.predict(model, data()),
        one.predict(model, [data(2), data(4)]),
        one.predict(model, {"a": data(2), "b": data(2)}),
        one.predict(model, data(), return_predictions=False),
        attempt(lambda: one.predict(model)),
        attempt(lambda: one.predict(None, data(2))),
    ]


@ask
def printed_tables() -> Any:
    one = trainer()
    return [one.validate(Net(), data(2)), one.test(Net(), [data(2), data(2)])]


class LongNames(Net):
    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("a_rather_long_name_of_a_metric_that_is_logged", float(dataloader_idx))
        self.log("int", 3)
        self.log(f"only_{dataloader_idx}", 1.0, add_dataloader_idx=False)


class SameName(Net):
    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("same", 1.0, add_dataloader_idx=False)


class Steps(Net):
    """With a scheduler of steps, and what hooks are called with."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(["start", batch_idx, batch is None])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rates = [group["lr"] for group in self.optimizers().param_groups]
        self.calls.append(["end", batch_idx, batch is None, outputs is None, self.trainer.global_step, rates])


def no_batches(empty: tuple[int, ...], **options: Any) -> Any:
    """A fit whose loader, which has no length, gives None at these places."""
    torch.manual_seed(1)
    batches = [None if index in empty else torch.full((2, 4), float(index)) for index in range(4)]
    model, one = Steps(), trainer(max_epochs=2, log_every_n_steps=1, logger=CSVLogger(".", name="none"), **options)
    model.calls = []
    one.fit(model, torch.utils.data.DataLoader(Stream(batches), batch_size=None))
    rows = Path(one.log_dir, "metrics.csv").read_text().splitlines()
    return [model.calls, one.global_step, one.fit_loop.total_batch_idx, model.layer.weight, one.callback_metrics, len(rows)]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


ask_each(
    none_in_the_middle=lambda: no_batches((1,)),
    none_first=lambda: no_batches((0, 1)),
    none_last=lambda: no_batches((3,)),
    none_accumulated=lambda: no_batches((1,), accumulate_grad_batches=2),
)


def without_batches(kind: str) -> Any:
    """The results of a run over loaders without batches."""
    called = []
    model, run = Net(), getattr(trainer(limit_predict_batches=3), kind)
    setattr(model, f"on_{kind}_start", lambda: called.append(kind))
    return [run(model, []), run(model, DataLoader([])), run(model, [DataLoader([]), DataLoader([])]), called]


ask_each(**{f"{kind}_of_nothing": lambda kind=kind: without_batches(kind) for kind in ("predict", "test", "validate")})
ask_each(length_of_nothing=lambda: has_len_all_ranks(DataLoader([]), trainer().strategy))


@ask
def one_name_of_two_loaders() -> Any:
    return trainer().validate(SameName(), [data(2), data(2)])


@ask
def printed_several_tables() -> Any:
    return trainer().validate(LongNames(), [data(2) for _ in range(3)])


ask_each(
    fits_nothing=lambda: trainer(max_epochs=1).fit(Net()),
    fits_linear=lambda: trainer(max_epochs=1).fit(nn.Linear(1, 1), data()),
    fits_both=lambda: trainer(max_epochs=1).fit(Net(), data(), datamodule=BoringDataModule()),
    fits_number=lambda: trainer(max_epochs=1).fit(Net(), 3),
    fits_empty=lambda: trainer(max_epochs=1).fit(Net(), []),
    fits_loader_as_datamodule=lambda: trainer(max_epochs=1).fit(Net(), datamodule=data()),
    fits_zero=lambda: trainer(max_epochs=0).fit(Net(), data()),
    fits_from_missing=lambda: trainer(max_epochs=1).fit(Net(), data(), ckpt_path="no.ckpt"),
    fits_from_best=lambda: trainer(max_epochs=1).fit(Net(), data(), ckpt_path="best"),
    fits_from_last=lambda: trainer(max_epochs=1).fit(Net(), data(), ckpt_path="last"),
    validates_none=lambda: trainer().validate(None, data()),
    validates_without_loader=lambda: trainer().validate(Net()),
    validates_without_step=lambda: trainer().validate(pl.LightningModule(), data()),
    validates_best=lambda: trainer().validate(Net(), data(), ckpt_path="best"),
    predicts_without_loader=lambda: trainer().predict(Net()),
    stops_on_missing=lambda: trainer(max_epochs=1, callbacks=[cb.EarlyStopping("nothing")]).fit(Net(), data(2), data(2)),
    monitors_missing=lambda: trainer(
        max_epochs=1, enable_checkpointing=True, callbacks=[cb.ModelCheckpoint(".", monitor="nothing")]
    ).fit(Net(), data(2), data(2)),
    lr_without_logger=lambda: trainer(max_epochs=1, callbacks=[cb.LearningRateMonitor()]).fit(Net(), data(2)),
    swa_and_two=lambda: trainer(max_epochs=1, callbacks=[cb.StochasticWeightAveraging(0.1)]).fit(TwoOptimizers(), data(2)),
    trainer_pickles=lambda: type(pickle.loads(pickle.dumps(trainer()))),
)


class Ends(pl.Callback):
    """The Trainer's answers about the end of batches and of training, where none is current."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found.append(["train_start", trainer.is_last_batch])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found.append(["epoch_start", trainer.is_last_batch])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found.append(["epoch_end", trainer.is_last_batch, trainer.fit_loop.done, trainer.fit_loop.skip])


def where_it_ends(**limits: Any) -> Any:
    """The ends of epochs of two batches."""
    ends = Ends()
    one = trainer(callbacks=[ends], **limits)
    one.fit(Net(), data(4), data(4))
    return [*ends.found, one.is_last_batch, callable(ends.log), callable(ends.log_dict)]


ask_each(
    where_epochs_end=lambda: where_it_ends(max_epochs=2),
    where_steps_end=lambda: where_it_ends(max_steps=3),
    where_steps_end_with_an_epoch=lambda: where_it_ends(max_steps=4),
    where_one_batch_ends=lambda: where_it_ends(max_epochs=2, overfit_batches=1),
)


class Written(cb.BasePredictionWriter):
    """What a writer is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.given: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        self.given.append(given)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        self.given.append(given)


@ask
def written_of_what_has_no_indices() -> Any:
    writer = Written()
    torch.manual_seed(0)
    returned = trainer(callbacks=[writer]).predict(Net(), DataLoader(RandomIterableDataset(4, 4), batch_size=2))
    return [writer.given, returned]


class NoValueYet(torchmetrics.Metric):
    """Computes None until it has seen more than ``after`` batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, batch: torch.Tensor) -> None:
        self.seen += 1

    def compute(self) -> torch.Tensor | None:
        return None if int(self.seen) <= self.after else self.seen * 1.0


class LogsNoValue(Net):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.value = NoValueYet(after)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.value(batch)
        self.log("value", self.value, on_step=True, on_epoch=True)


@ask
def metrics_without_a_value() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # here that its Python runs beside the program
        return [trainer().validate(LogsNoValue(after), data()) for after in (9, 2)]


class Asked(pl.LightningDataModule):
    """Notes in which stage of which epoch loaders are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def train_dataloader(self) -> Any:
        self.asked.append(["train", self.trainer.current_epoch, self.trainer.state.stage])
        return data()

    def val_dataloader(self) -> Any:
        self.asked.append(["val", self.trainer.current_epoch, self.trainer.state.stage])
        return data()


def loaders_asked_for(**options: Any) -> Any:
    source = Asked()
    trainer(max_epochs=3, **options).fit(Net(), datamodule=source)
    return source.asked


ask_each(
    loaders_asked_once=lambda: loaders_asked_for(),
    loaders_asked_without_a_check=lambda: loaders_asked_for(num_sanity_val_steps=0),
    loaders_asked_again=lambda: loaders_asked_for(num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=2),
)


class Restored(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.keys = sorted(checkpoint)
        checkpoint["state_dict"]["layer.bias"] += 100


class RestoredBy(pl.Callback):
    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.keys = sorted(checkpoint)


@ask
def keys_in_hooks_of_a_resume() -> Any:
    first, model, callback = trainer(max_epochs=1), Restored(), RestoredBy()
    first.fit(Net(), data())
    first.save_checkpoint("end.ckpt")
    trainer(max_epochs=2, callbacks=[callback]).fit(model, data(), ckpt_path="end.ckpt")
    return [model.keys, callback.keys, bool((model.layer.bias > 10).all())]
