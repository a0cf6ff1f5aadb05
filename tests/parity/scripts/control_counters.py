"""The loops' counters, under the names by which scripts find them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from basics import Regression, regression_data
from recording import Run, case
from torch.optim import lr_scheduler


class Counters(pl.Callback):
    """Writes down the loops' counters, under the names by which scripts find them, at every hook that a step is not inside of."""

    def __init__(self, run: Run) -> None:
        self.rows: dict[str, Any] = {}
        run.record["notes"] = {"counters": self.rows}

    def row(self, trainer: pl.Trainer, hook: str) -> None:
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        progress = {
            "epoch": fit.epoch_progress,
            "batch": epoch.batch_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
            "manual": epoch.manual_optimization.optim_step_progress,
            "scheduler": epoch.scheduler_progress,
            "validation": epoch.val_loop.batch_progress,
        }
        others = [epoch._batches_that_stepped, fit.batch_idx, fit.total_batch_idx, epoch.global_step, fit.max_epochs]
        found: dict[str, Any] = {name: one.state_dict() for name, one in progress.items()}
        if hook in ("on_train_batch_end", "on_train_epoch_end"):
            saved = trainer._checkpoint_connector.dump_checkpoint()["loops"]["fit_loop"]
            found["saved"] = {name: saved[name] for name in ("epoch_progress", "epoch_loop.batch_progress")}
        self.rows[f"{len(self.rows)} {hook}"] = {**found, "others": others}


def _writes(name: str) -> Any:
    return lambda self, trainer, *_, **__: self.row(trainer, name)


for _stage in ("train", "validation"):
    for _when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"):
        setattr(Counters, f"on_{_stage}_{_when}", _writes(f"on_{_stage}_{_when}"))


def fit_counted(run: Run, model: pl.LightningModule, **options: Any) -> None:
    trainer = run.trainer(max_epochs=2, limit_val_batches=2, num_sanity_val_steps=1, callbacks=[Counters(run)], **options)
    run.fit(model, trainer, run.loader(*regression_data(48)), run.loader(*regression_data(32, 1)))


@case
def counters_under_stocks_names(run: Run) -> None:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            sgd = super().configure_optimizers()
            return [sgd], [{"scheduler": lr_scheduler.StepLR(sgd, 1, 0.9), "interval": "step"}]

    fit_counted(run, Scheduled(), accumulate_grad_batches=2)


@case
def counters_of_manual_optimization(run: Run) -> None:
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    fit_counted(run, Manual())


class Accumulating(pl.Callback):
    """Sets how many batches accumulate, in a hook of every third batch: 2, 3, 1, …"""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.turn)
        self.turns = 0

    def turn(self, trainer: pl.Trainer, *_: Any) -> None:
        self.turns += 1
        if self.turns % 3 == 0:
            trainer.accumulate_grad_batches = trainer.accumulate_grad_batches % 3 + 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Gradients are seen, and stay: a window that begins in its middle adds to those of the step before."""


@case
def accumulation_that_hooks_set(run: Run) -> None:
    for hook in ("on_train_batch_start", "on_train_batch_end", "on_validation_end"):
        model = Regression()
        trainer = run.trainer(max_epochs=2, val_check_interval=1, limit_val_batches=1, callbacks=[Accumulating(hook)])
        run.fit(model, trainer, run.loader(*regression_data(112)), run.loader(*regression_data(32, 1)))


@case
def steps_estimated_in_a_validation_step(run: Run) -> None:
    """The first to ask loads the training loader: here the sanity check."""

    class Asking(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("estimated", float(self.trainer.estimated_stepping_batches))
            super().validation_step(batch, batch_idx)

    trainer = run.trainer(max_epochs=2, num_sanity_val_steps=1)
    run.fit(Asking(), trainer, run.loader(*regression_data(48), shuffle=True), run.loader(*regression_data(32, 1)))
