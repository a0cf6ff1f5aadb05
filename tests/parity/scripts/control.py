"""Schedulers, early stopping, checkpoints and other ways to steer a run. Most cases are in the files beside this one."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

import control_checkpoints  # noqa: F401
import control_counters  # noqa: F401
import control_schedulers  # noqa: F401
import control_state  # noqa: F401
import lightning.pytorch as pl
import torch
from basics import Regression, regression_data
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from recording import Run, case, main
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader


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
    # Only here: on several devices a loader of ready batches gives each batch to all of them.
    own = ("treespec", "(without a `batch_size`")
    run.note("warnings", sorted({text[:60] for one in found if not any(part in (text := str(one.message)) for part in own)}))


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


class Raising(Regression):
    """Raises in a hook when that is called for a certain time."""

    def __init__(self, where: str, at: int) -> None:
        super().__init__()
        self.where, self.at, self.calls = where, at, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"forked": 2 * loss, "of_epoch": 3 * loss}, on_step=None, on_epoch=True, prog_bar=True)
        return loss

    def meet(self, hook: str) -> None:
        self.calls += hook == self.where
        if hook == self.where and self.calls == self.at:
            raise ValueError(hook)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.meet("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.meet("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.meet("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("of_hook", 1.0 + batch_idx)
        self.meet("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.meet("on_train_epoch_end")

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.meet("on_validation_batch_end")


RAISING = [name for name, value in vars(Raising).items() if name.startswith("on_")]


@case
def metrics_of_an_interrupted_run(run: Run) -> None:
    class Asks(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            run.note(f"asked in {exception}", {name: float(value) for name, value in trainer.callback_metrics.items()})

    for where in RAISING:
        for at in (1, 2, 6):
            torch.manual_seed(at)
            trainer = run.trainer(
                max_epochs=2, callbacks=[Asks()] if at == 2 else [], log_every_n_steps=2, num_sanity_val_steps=0
            )
            with contextlib.suppress(ValueError):
                trainer.fit(Raising(where, at), run.loader(*regression_data()), run.loader(*regression_data(16, 1)))
            for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
                run.note(f"{where} {at} {kind}", {name: float(value) for name, value in getattr(trainer, kind).items()})
            run.note(f"{where} {at} stream", torch.rand(1))


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
    """Imports from below ``lightning.pytorch.utilities`` and its like give stock's values."""
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
