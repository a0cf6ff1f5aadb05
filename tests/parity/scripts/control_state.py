"""Reads of the Trainer in hooks: loaders, numbers of batches, metrics, the checkpoint, the data module of a run before."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from basics import Regression, regression_data
from recording import Run, case, numbers


class Logging(Regression):
    """Logs by step and by epoch, in training, validation and test."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Reader(pl.Callback):
    """Keeps, at every hook that is not inside of a step, what the Trainer shows."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def read(self, trainer: pl.Trainer, hook: str) -> None:
        loaders = [trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders]
        limits = [trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches]
        limits += [trainer.num_test_batches, trainer.num_predict_batches]
        if trainer.state.fn == "fit":
            limits.append(trainer.fit_loop.epoch_loop.val_loop.max_batches)
        metrics = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        flags = [trainer.enable_validation, trainer.ckpt_path is not None, trainer.fit_loop.restarting]
        given = [None if loader is None else type(loader).__name__ for loader in loaders]
        stages = [str(trainer.state.fn), str(trainer.state.stage), trainer.current_epoch, trainer.global_step]
        self.rows.append([hook, stages, given, limits, flags, numbers(metrics)])


def _reads(name: str) -> Any:
    return lambda self, trainer, *_, **__: self.read(trainer, name)


for _name in dir(pl.Callback):
    _inside = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    if _name in ("setup", "teardown") or (_name.startswith("on_") and _name not in _inside):
        setattr(Reader, _name, _reads(_name))


@case
def what_hooks_read(run: Run) -> None:
    reader = Reader()
    model, trainer = Logging(), run.trainer(max_epochs=2, callbacks=[reader], log_every_n_steps=2)
    train, val = run.loader(*regression_data(64)), run.loader(*regression_data(48, 1))
    run.fit(model, trainer, train, val)
    trainer.validate(model, [run.loader(*regression_data(32)), val], verbose=False)
    trainer.test(model, val, verbose=False)
    trainer.predict(model, run.loader(*regression_data(32)))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, train, val)
    run.note("read", reader.rows)
    run.finish(model, trainer)


@case
def what_hooks_read_after_a_checkpoint(run: Run) -> None:
    train, val = run.loader(*regression_data(64)), run.loader(*regression_data(48, 1))
    first, reader = run.trainer(max_epochs=1), Reader()
    run.fit(Logging(), first, train, val)
    first.save_checkpoint(run.root / "saved")
    model, trainer = Logging(), run.trainer(max_epochs=2, callbacks=[reader])
    trainer.fit(model, train, val, ckpt_path=run.root / "saved")
    trainer.test(model, val, verbose=False)
    run.note("read", reader.rows)
    run.finish(model, trainer)


@case
def what_hooks_read_without_batches(run: Run) -> None:
    for name in ("train", "val", "test", "predict"):
        reader = Reader()
        model = Logging()
        trainer = run.trainer(max_epochs=1, callbacks=[reader], **{f"limit_{name}_batches": 0})
        loader = run.loader(*regression_data(32))
        run.fit(model, trainer, loader, loader)
        for method in (trainer.validate, trainer.test):
            method(model, loader, verbose=False)
        trainer.predict(model, loader)
        run.note(name, reader.rows)


class Data(pl.LightningDataModule):
    """Writes down what is called of it."""

    def __init__(self, run: Run, calls: list[Any]) -> None:
        super().__init__()
        self.run, self.calls = run, calls

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return self.run.loader(*regression_data(32))

    def val_dataloader(self) -> Any:
        return self.run.loader(*regression_data(32, 1))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("on_before_batch_transfer")
        return batch


@case
def data_module_of_a_run_before(run: Run) -> None:
    calls: list[Any] = []
    model, trainer, data = Logging(), run.trainer(max_epochs=1), Data(run, calls)
    run.initialise(model)
    trainer.fit(model, datamodule=data)
    loader = run.loader(*regression_data(16))
    for method in (trainer.validate, trainer.test):
        method(model, loader, verbose=False)
        calls.append(trainer.datamodule is data)
    trainer.predict(model, loader)
    trainer.test(model, datamodule=(other := Tested(run, calls)), verbose=False)
    calls.append(trainer.datamodule is other)
    run.note("calls", calls)
    run.finish(model, trainer)


@case
def loaders_of_a_module_beside_a_data_module(run: Run) -> None:
    class Both(Logging):
        def val_dataloader(self) -> Any:
            return run.loader(*regression_data(32, 1))

    class TrainOnly(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return run.loader(*regression_data(32))

    model, trainer = Both(), run.trainer(max_epochs=1)
    run.fit(model, trainer, datamodule=TrainOnly())
    run.fit(model, run.trainer(max_epochs=1), run.loader(*regression_data(32)))
    trainer.validate(model, datamodule=TrainOnly(), verbose=False)


class Tested(Data):
    """Has batches to test with, too."""

    def test_dataloader(self) -> torch.utils.data.DataLoader:
        return self.run.loader(*regression_data(32, 2))


@case
def gradients_left_from_before(run: Run) -> None:
    found: list[Any] = []

    class Grads(Logging):
        def see(self) -> None:
            found.append([None if p.grad is None else numbers(p.grad.sum()) for p in self.parameters()])

        on_train_start = on_test_start = on_validation_start = on_predict_start = see

        def zero_grad(self, set_to_none: bool = True) -> None:
            found.append("zero_grad")
            super().zero_grad(set_to_none)

    model, trainer = Grads(), run.trainer(max_epochs=1, limit_train_batches=0)
    run.initialise(model)
    data = run.loader(*regression_data(32))
    for stage in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        stage(model, data)
    run.note("found", found)
