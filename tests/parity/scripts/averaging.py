"""Callbacks that average weights, and those that freeze and unfreeze layers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from basics import Regression, regression_data
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from recording import Run, case, main
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Normalised(Regression):
    """Two layers with batch normalisation; 1,024 weights in one, so that a mesh may split them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def fit_averaged(run: Run, callback: pl.Callback, **options: Any) -> pl.Trainer:
    trainer = run.trainer(callbacks=[callback], **{"max_epochs": 3, **options})
    run.fit(Normalised(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))
    return trainer


class SavedInMidTraining(pl.Callback):
    """Saves a checkpoint at the end of an epoch, while weights and averages differ."""

    def __init__(self, path: Any, epoch: int) -> None:
        self.path = path
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@case
def equally_weighted_mean(run: Run) -> None:
    callback = WeightAveraging()
    fit_averaged(run, callback)
    run.note("state", callback.state_dict())


@case
def moving_average_of_parameters(run: Run) -> None:
    class EMA(WeightAveraging):
        def __init__(self) -> None:
            super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx >= 4

    callback = EMA()
    fit_averaged(run, callback)
    run.note("state", callback.state_dict())


@case
def moving_average_that_warms_up(run: Run) -> None:
    def warming_up(averaged: Tensor, current: Tensor, num_averaged: Tensor) -> Tensor:
        decay = min(0.999, (1 + num_averaged) / (10 + num_averaged))
        return averaged * decay + current * (1 - decay)

    fit_averaged(run, WeightAveraging(avg_fn=warming_up))


@case
def averaged_resumed_and_tested(run: Run) -> None:
    path = run.root / "mid.ckpt"
    data, val = run.loader(*regression_data()), run.loader(*regression_data(32, 1))
    make = lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_epoch=1)  # noqa: E731
    trainer = run.trainer(callbacks=[make(), SavedInMidTraining(path, 1)], max_epochs=3)
    run.fit(Normalised(), trainer, data, val)
    model, callback = Normalised(), make()
    trainer = run.trainer(callbacks=[callback], max_epochs=3)
    trainer.fit(model, data, val, ckpt_path=path)
    run.finish(model, trainer)
    run.note("state", callback.state_dict())
    tested = Normalised()
    run.note("validated", run.trainer().validate(tested, val, ckpt_path=path))  # the averages are the checkpoint's weights
    run.note("saved", tested.state_dict())


@case
def stochastic_averaging(run: Run) -> None:
    class Plain(Regression):
        def configure_optimizers(self) -> Any:
            sgd = super().configure_optimizers()
            return [sgd], [torch.optim.lr_scheduler.StepLR(sgd, 1, 0.9)]

    callback = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.5, annealing_epochs=2, annealing_strategy="linear")
    trainer = run.trainer(callbacks=[callback], max_epochs=5)
    run.fit(Plain(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))
    run.note("state", {key: callback.state_dict()[key] for key in ("n_averaged", "latest_update_epoch")})


@case
def stochastic_averaging_with_batch_norm(run: Run) -> None:
    callback = StochasticWeightAveraging(swa_lrs=[0.005], swa_epoch_start=2)
    trainer = fit_averaged(run, callback, gradient_clip_val=0.5, max_epochs=4)
    layer = trainer.lightning_module.get_submodule("layer.1")
    run.note(
        "batch norm",
        [layer.momentum, trainer.max_epochs, trainer.accumulate_grad_batches],
    )


@case
def stochastic_averaging_with_accumulation(run: Run) -> None:
    callback = StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=2)
    fit_averaged(run, callback, accumulate_grad_batches=3)


@case
def stochastic_averaging_resumed(run: Run) -> None:
    make = lambda: StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=2)  # noqa: E731
    path, data = run.root / "mid.ckpt", run.loader(*regression_data())
    run.fit(Normalised(), run.trainer(callbacks=[make(), SavedInMidTraining(path, 2)], max_epochs=5), data)
    model, callback = Normalised(), make()
    trainer = run.trainer(callbacks=[callback], max_epochs=5)
    trainer.fit(model, data, ckpt_path=path)
    run.finish(model, trainer)


if __name__ == "__main__":
    main()
