"""Early stopping and checkpoints by a metric, and runs that go on from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from basics import Classifier, Regression, class_data, regression_data
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from recording import Run, case
from torch.optim import lr_scheduler


class GivenMetric(Regression):
    """A validation metric that goes as the test wants it, by epoch."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def on_validation_epoch_end(self) -> None:
        self.log("given", self.values[min(self.current_epoch, len(self.values) - 1)])


def fit_given(run: Run, values: list[float], **options: Any) -> pl.Trainer:
    trainer = run.trainer(**{"max_epochs": len(values), "num_sanity_val_steps": 0, **options})
    run.fit(GivenMetric(values), trainer, run.loader(*regression_data(32)), run.loader(*regression_data(16, 1)))
    return trainer


@case
def early_stopping(run: Run) -> None:
    stopping = EarlyStopping("given", patience=2)
    fit_given(run, [3.0, 2.0, 2.5, 2.4, 1.0, 0.5], callbacks=[stopping])
    run.note("stopped_epoch", stopping.stopped_epoch)
    run.note("state", stopping.state_dict())


@case
def early_stopping_at_a_threshold(run: Run) -> None:
    stopping = EarlyStopping("given", mode="max", stopping_threshold=0.9)
    fit_given(run, [0.1, 0.5, 0.95, 0.99], callbacks=[stopping])
    run.note("stopped_epoch", stopping.stopped_epoch)


@case
def early_stopping_not_before_min_epochs(run: Run) -> None:
    stopping = EarlyStopping("given", patience=1)
    fit_given(run, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], callbacks=[stopping], min_epochs=4)
    run.note("stopped_epoch", stopping.stopped_epoch)


@case
def early_stopping_of_the_training_loss(run: Run) -> None:
    stopping = EarlyStopping("train_loss_epoch", patience=0, min_delta=0.5, check_on_train_epoch_end=True)
    run.fit(Regression(), run.trainer(max_epochs=20, callbacks=[stopping]), run.loader(*regression_data()))
    run.note("stopped_epoch", stopping.stopped_epoch)


@case
def early_stopping_without_its_metric(run: Run) -> None:
    fit_given(run, [1.0, 2.0], callbacks=[EarlyStopping("nothing")])


@case
def early_stopping_on_a_nan(run: Run) -> None:
    stopping = EarlyStopping("given", patience=5)
    fit_given(run, [1.0, float("nan"), 0.5], callbacks=[stopping])
    run.note("stopped_epoch", stopping.stopped_epoch)


def note_checkpoints(run: Run, checkpoint: ModelCheckpoint) -> None:
    folder = Path(str(checkpoint.dirpath))
    run.note("files", sorted(path.name for path in folder.glob("*.ckpt")))
    run.note("best_model_path", Path(checkpoint.best_model_path).name)
    run.note("best_model_score", checkpoint.best_model_score)
    run.note("last_model_path", Path(checkpoint.last_model_path).name)
    run.note("kth_best_model_path", Path(checkpoint.kth_best_model_path).name)
    run.note("best_k_models", {Path(path).name: score for path, score in checkpoint.best_k_models.items()})


def fit_checkpointed(run: Run, values: list[float], *, checkpoint: ModelCheckpoint, **options: Any) -> None:
    fit_given(run, values, callbacks=[checkpoint], enable_checkpointing=True, **options)
    note_checkpoints(run, checkpoint)


@case
def checkpoints_best_two(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.root / "saved", "{epoch}-{given:.2f}", monitor="given", save_top_k=2, save_last=True)
    fit_checkpointed(run, [3.0, 1.0, 2.0, 4.0, 0.5], checkpoint=checkpoint)


@case
def checkpoints_best_by_maximum(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.root / "saved", monitor="given", mode="max", save_top_k=1)
    fit_checkpointed(run, [3.0, 1.0, 5.0, 4.0], checkpoint=checkpoint)


@case
def checkpoints_of_every_epoch(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.root / "saved", "m-{epoch:02d}-{step}", save_top_k=-1, auto_insert_metric_name=False)
    fit_checkpointed(run, [3.0, 1.0, 5.0], checkpoint=checkpoint)


@case
def checkpoints_every_three_steps(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.root / "saved", every_n_train_steps=3, save_top_k=-1)
    fit_checkpointed(run, [3.0, 1.0, 5.0], checkpoint=checkpoint)


@case
def checkpoints_with_equal_names(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.root / "saved", "always", monitor="given", save_top_k=2)
    fit_checkpointed(run, [3.0, 2.0, 1.0], checkpoint=checkpoint)


@case
def checkpoints_by_default(run: Run) -> None:
    trainer = fit_given(run, [3.0, 1.0], enable_checkpointing=True)
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    note_checkpoints(run, trainer.checkpoint_callback)


@case
def checkpoint_without_its_metric(run: Run) -> None:
    checkpoint = ModelCheckpoint(run.root / "saved", monitor="nothing")
    fit_checkpointed(run, [1.0, 2.0], checkpoint=checkpoint)


@case
def resumed_with_everything(run: Run) -> None:
    class Everything(Classifier):
        def configure_optimizers(self) -> Any:
            adam = super().configure_optimizers()
            return [adam], [{"scheduler": lr_scheduler.StepLR(adam, 3, 0.5), "interval": "step"}]

    data, val = run.loader(*class_data()), run.loader(*class_data(32, 1))
    folder = run.root / "saved"

    def callbacks() -> list[pl.Callback]:
        checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
        return [checkpoint, EarlyStopping("val_loss", patience=3)]

    run.fit(Everything(), run.trainer(max_epochs=2, callbacks=callbacks(), enable_checkpointing=True), data, val)
    model, second = Everything(), run.trainer(max_epochs=4, callbacks=callbacks(), enable_checkpointing=True)
    second.fit(model, data, val, ckpt_path=folder / "last.ckpt")
    run.finish(model, second)
    run.note("stopping", second.early_stopping_callback.state_dict())
    note_checkpoints(run, second.checkpoint_callback)


@case
def resumed_in_mid_epoch(run: Run) -> None:
    data = run.loader(*class_data(96))
    path = run.root / "mid.ckpt"
    first = run.trainer(max_steps=4)
    run.fit(Classifier(), first, data)
    first.save_checkpoint(path)
    model, second = Classifier(), run.trainer(max_epochs=2)
    second.ckpt_path = path  # as good as fit(…, ckpt_path=path)
    second.fit(model, data)
    run.finish(model, second)


class SanityChecks(pl.Callback):
    """Saves a checkpoint at the end of epochs, and keeps at which epoch and step sanity checks were made."""

    def __init__(self, folder: Path, *, saves: bool = False) -> None:
        self.folder, self.saves = folder, saves
        self.checked: list[tuple[int, int]] = []

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.checked.append((trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.saves:
            trainer.save_checkpoint(self.folder / "epoch")


@case
def sanity_checks_of_runs_that_go_on(run: Run) -> None:
    data, val = run.loader(*regression_data(24)), run.loader(*regression_data(8, 1))
    hooks = SanityChecks(run.root, saves=True)
    first = run.trainer(max_epochs=2, callbacks=[hooks])
    first.fit(Regression(), data, val)
    first.save_checkpoint(run.root / "end")
    run.note("first", hooks.checked)
    for name in ("epoch", "end"):
        hooks = SanityChecks(run.root)
        model, trainer = Regression(), run.trainer(max_epochs=3, callbacks=[hooks])
        trainer.fit(model, data, val, ckpt_path=run.root / name)
        run.note(name, hooks.checked)
    run.finish(model, trainer)
