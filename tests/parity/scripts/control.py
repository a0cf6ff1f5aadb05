"""Schedulers, early stopping, checkpoints and other ways to steer a run."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import control_counters  # noqa: F401
import lightning.pytorch as pl
import torch
from basics import Classifier, Regression, class_data, regression_data
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from recording import Run, case, main
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader


def scheduled(configure: Any) -> pl.LightningModule:
    """A regression whose ``configure_optimizers`` is ``configure(sgd)``."""

    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            return configure(super().configure_optimizers())

    return Scheduled()


def fit_scheduled(run: Run, configure: Any, **options: Any) -> None:
    trainer = run.trainer(**{"max_epochs": 4, "callbacks": [LearningRateMonitor()], **options})
    run.fit(scheduled(configure), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def scheduler_in_two_lists(run: Run) -> None:
    fit_scheduled(run, lambda sgd: ([sgd], [lr_scheduler.StepLR(sgd, 1, 0.5)]))


@case
def scheduler_config_in_a_list(run: Run) -> None:
    fit_scheduled(run, lambda sgd: ([sgd], [{"scheduler": lr_scheduler.ExponentialLR(sgd, 0.9), "interval": "step"}]))


@case
def scheduler_in_a_dict(run: Run) -> None:
    fit_scheduled(run, lambda sgd: {"optimizer": sgd, "lr_scheduler": lr_scheduler.CosineAnnealingLR(sgd, 4)})


@case
def scheduler_config_in_a_dict(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        config = {"scheduler": lr_scheduler.StepLR(sgd, 1, 0.7), "interval": "step", "frequency": 3, "name": "mine"}
        return {"optimizer": sgd, "lr_scheduler": config}

    fit_scheduled(run, configure)


@case
def optimizer_in_a_list(run: Run) -> None:
    fit_scheduled(run, lambda sgd: [sgd], callbacks=[])


@case
def one_cycle_with_momentum(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        config = {"scheduler": lr_scheduler.OneCycleLR(sgd, max_lr=0.2, total_steps=16), "interval": "step"}
        return {"optimizer": sgd, "lr_scheduler": config}

    fit_scheduled(run, configure, callbacks=[LearningRateMonitor("step", log_momentum=True)])


@case
def plateau_of_the_validation_loss(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        plateau = lr_scheduler.ReduceLROnPlateau(sgd, factor=0.1, patience=0, threshold=0.9)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    fit_scheduled(run, configure, max_epochs=6)


@case
def plateau_of_the_training_loss_by_step(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        plateau = lr_scheduler.ReduceLROnPlateau(sgd, factor=0.5, patience=1, threshold=0.5)
        config = {"scheduler": plateau, "monitor": "train_loss_step", "interval": "step"}
        return {"optimizer": sgd, "lr_scheduler": config}

    fit_scheduled(run, configure)


@case
def plateau_without_its_metric(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": lr_scheduler.ReduceLROnPlateau(sgd), "monitor": "nothing"}}

    fit_scheduled(run, configure)


@case
def scheduler_every_second_epoch_with_accumulation(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(sgd, 1, 0.5), "frequency": 2}}

    fit_scheduled(run, configure, accumulate_grad_batches=3)


@case
def step_scheduler_with_accumulation(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(sgd, 2, 0.5), "interval": "step"}}

    fit_scheduled(run, configure, accumulate_grad_batches=3)


@case
def groups_with_their_own_rates(run: Run) -> None:
    class Grouped(Regression):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.layer.weight], "lr": 0.01, "weight_decay": 0.1}, {"params": [self.layer.bias]}]
            optimizer = torch.optim.AdamW(groups, lr=0.1)
            rates = [lambda epoch: 0.9**epoch, lambda epoch: 0.5**epoch]
            return [optimizer], [lr_scheduler.LambdaLR(optimizer, rates)]

    run.fit(Grouped(), run.trainer(max_epochs=3, callbacks=[LearningRateMonitor()]), run.loader(*regression_data()))


@case
def no_optimizer(run: Run) -> None:
    fit_scheduled(run, lambda sgd: None, callbacks=[])


@case
def own_scheduler_step(run: Run) -> None:
    class Own(Regression):
        def configure_optimizers(self) -> Any:
            sgd = super().configure_optimizers()
            return [sgd], [{"scheduler": lr_scheduler.StepLR(sgd, 1, 0.9), "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if self.global_step % 2 == 0:
                scheduler.step()

    run.fit(Own(), run.trainer(max_epochs=2), run.loader(*regression_data()))


@case
def learning_rate_set_by_hand(run: Run) -> None:
    class ByHand(Regression):
        def on_train_epoch_start(self) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.05 / (1 + self.current_epoch)

    run.fit(ByHand(), run.trainer(max_epochs=3), run.loader(*regression_data()))


@case
def estimated_batches(run: Run) -> None:
    class Estimating(Regression):
        def configure_optimizers(self) -> Any:
            run.note("estimated", float(self.trainer.estimated_stepping_batches))
            run.note("world", [self.trainer.max_epochs, self.trainer.max_steps, self.trainer.accumulate_grad_batches])
            return super().configure_optimizers()

    run.fit(Estimating(), run.trainer(max_epochs=3, accumulate_grad_batches=2), run.loader(*regression_data(72)))


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


@case
def what_is_warned_of(run: Run) -> None:
    class Warned(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Dropout().eval()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("begun", float(batch_idx), on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.log("whole", torch.tensor(batch_idx), on_epoch=True)
            self.log("counted", self.loss((batch["x"], batch["y"])), on_epoch=True, logger=True)
            return None if batch_idx == 2 else self.loss((batch["x"], batch["y"]))

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> Any:
            sgd = super().configure_optimizers()
            plateau = lr_scheduler.ReduceLROnPlateau(sgd)
            return {
                "optimizer": sgd,
                "lr_scheduler": {"scheduler": plateau, "monitor": "no", "strict": False, "other": 1},
                "more": 1,
            }

    class Batches(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            x, y = regression_data(48)
            rows = [slice(16 * index, 16 * index + 16) for index in range(3)]
            # The first leaf, of another size each time, is what stock takes for the batch's size.
            batches = [{"first": torch.ones(n), "x": x[part], "y": y[part]} for n, part in zip((1, 2, 4), rows, strict=True)]
            return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        saving = [ModelCheckpoint(run.root / "one"), ModelCheckpoint(run.root / "two", every_n_train_steps=1)]
        trainer = run.trainer(max_epochs=1, logger=False, callbacks=[*saving, Timer("01:00:00:00")], enable_checkpointing=True)
        model = Warned()
        run.fit(model, trainer, datamodule=Batches())
        trainer.validate(model, run.loader(*regression_data(16)), ckpt_path="best", verbose=False)
        trainer.predict(model, run.loader(*regression_data(16)))
        again = run.trainer(max_epochs=1, logger=False)
        again.fit(Warned(), datamodule=Batches(), ckpt_path=saving[0].best_model_path)
        again.fit(Warned(), datamodule=Batches(), ckpt_path="last")
    run.note("warnings", sorted({str(one.message)[:60] for one in found if "treespec" not in str(one.message)}))


@case
def stopped_by_should_stop(run: Run) -> None:
    class Stopping(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 6:
                self.trainer.should_stop = True

    run.fit(Stopping(), run.trainer(max_epochs=5), run.loader(*regression_data()), run.loader(*regression_data(16, 1)))


@case
def epoch_ended_by_minus_one(run: Run) -> None:
    class Ending(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    run.fit(Ending(), run.trainer(max_epochs=2), run.loader(*regression_data()), run.loader(*regression_data(16, 1)))


@case
def stopped_by_time(run: Run) -> None:
    timer = Timer(duration={"seconds": 0})
    run.fit(Regression(), run.trainer(max_epochs=3, callbacks=[timer]), run.loader(*regression_data()))


@case
def interrupted_by_an_error(run: Run) -> None:
    class Failing(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                raise KeyError("the user's own error")

    class Data(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            run.note("stage", f"{stage} {stage!s}")

        def train_dataloader(self) -> Any:
            return run.loader(*regression_data())

        def on_exception(self, exception: BaseException) -> None:
            run.note("told the datamodule", repr(exception))

    model, trainer = Failing(), run.trainer(max_epochs=3)
    try:
        run.fit(model, trainer, datamodule=Data())
    finally:
        run.finish(model, trainer)


@case
def hyperparameters(run: Run) -> None:
    class Saved(Regression):
        def __init__(self, lr: float = 0.05, layers: tuple[int, ...] = (1, 2), note: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["note"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    model, path = Saved(lr=0.02), run.root / "saved.ckpt"
    trainer = run.trainer(max_epochs=1)
    run.fit(model, trainer, run.loader(*regression_data()))
    trainer.save_checkpoint(path)
    loaded = Saved.load_from_checkpoint(path)
    run.note("hparams", dict(loaded.hparams))
    run.note("weights", loaded.layer.weight)


@case
def wrong_result_of_a_step(run: Run) -> None:
    class Wrong(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return "a string"

    run.fit(Wrong(), run.trainer(max_epochs=1), run.loader(*regression_data()))


@case
def detected_anomaly(run: Run) -> None:
    class NotANumber(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.loss(batch) * 0 - 1).sqrt()

    run.fit(NotANumber(), run.trainer(max_epochs=1, detect_anomaly=True), run.loader(*regression_data()))


@case
def helpers_of_deep_modules(run: Run) -> None:
    """What people import from below ``lightning.pytorch.utilities`` and its like gives stock's values."""
    from lightning.fabric.connector import _convert_precision_to_unified_args
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper, _distributed_is_initialized
    from lightning.fabric.utilities.logger import _flatten_dict, _sanitize_params
    from lightning.pytorch.core.saving import convert
    from lightning.pytorch.demos.lstm import SequenceSampler
    from lightning.pytorch.loggers.logger import merge_dicts
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
    from lightning.pytorch.loops.progress import _BatchProgress, _OptimizationProgress
    from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
    from lightning.pytorch.utilities.data import _update_dataloader
    from lightning.pytorch.utilities.parsing import get_init_args, parse_class_init_keys
    from lightning.pytorch.utilities.testing import _runif_reasons

    class Holder:
        def __init__(self, a: int, *rest: int, b: int = 2, **others: int) -> None:
            super().__init__()
            self.arguments = get_init_args(sys._getframe())

    batches, steps = _BatchProgress(), _OptimizationProgress()
    batches.increment_ready()
    batches.increment_by(3, is_last_batch=True)
    batches.reset_on_restart()
    steps.optimizer.step.increment_completed()
    loss = ClosureResult.from_training_step_output({"loss": torch.tensor(3.0), "x": torch.tensor(1.0)}, normalize=2)
    order = torch.utils.data.SequentialSampler(range(7))
    loader = run.loader(torch.arange(6.0), shuffle=True)
    run.note("precision", [_convert_precision_to_unified_args(one) for one in (16, "16", 32, "bf16", "16-true", None, 64)])
    run.note(
        "samplers",
        [
            list(DistributedSamplerWrapper(order, num_replicas=2, rank=1, shuffle=False)),
            list(UnrepeatedDistributedSampler(range(7), num_replicas=2, rank=1)),
            list(SequenceSampler(range(20), 4)),
            [index for batch in _update_dataloader(loader, order).batch_sampler for index in batch],
        ],
    )
    run.note(
        "dicts",
        [
            merge_dicts([{"a": 1, "b": {"c": 1, "d": 2}}, {"a": 3, "b": {"c": 5}}], {"a": max}),
            _flatten_dict({"a": {"b": [1], "c": {"d": 2}}}),
            _sanitize_params({"a": torch.ones(2), "b": [1], "c": None, "d": 1.5}),
        ],
    )
    run.note("progress", [batches.state_dict(), steps.state_dict(), steps.optimizer_steps])
    run.note("closure", [loss.closure_loss, loss.asdict()])
    run.note(
        "parsing", [parse_class_init_keys(Holder), Holder(1, 2, b=3, c=4).arguments, [convert(x) for x in ("1", "True", "x")]]
    )
    run.note(
        "conditions", [_runif_reasons(min_torch="99", tpu=True, standalone=True, deepspeed=True), _distributed_is_initialized()]
    )


if __name__ == "__main__":
    main()
