"""Callbacks that average weights, that freeze and unfreeze layers, that measure, or that stop on a jump of the loss."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from basics import Regression, regression_data
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from recording import Run, case, main, numbers
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
def pruned_between_epochs(run: Run) -> None:
    saved = ModelCheckpoint(run.root / "pruned", save_top_k=-1, filename="{epoch}")
    pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    trainer = run.trainer(callbacks=[pruning, saved], max_epochs=3, enable_checkpointing=True)
    model = Normalised()
    run.fit(model, trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))
    run.note("zeros", [int((one == 0).sum()) for one in model.parameters()])
    tested = Normalised.load_from_checkpoint(run.root / "pruned" / "epoch=1.ckpt")
    run.note("saved", tested.state_dict())


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
def averages_outlive_the_fit(run: Run) -> None:
    callback = EMAWeightAveraging(decay=0.8)
    saved = ModelCheckpoint(run.root / "saved", save_last=True)
    data, val = run.loader(*regression_data()), run.loader(*regression_data(32, 1))
    trainer = run.trainer(callbacks=[callback, saved], max_epochs=2, enable_checkpointing=True)
    model = Normalised()
    run.fit(model, trainer, data, val)
    averaged: Any = callback._average_model
    run.note("averaged", [averaged.n_averaged, averaged.module.state_dict()])
    last = saved.last_model_path
    run.note("validated", [trainer.validate(model, val), trainer.validate(model, val, ckpt_path=last)])
    run.note("being trained", model.state_dict())
    run.note("validated again", [trainer.validate(model, val), trainer.validate(Normalised(), val, ckpt_path=last)])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data, val)
    run.finish(model, trainer)


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
def stochastic_averaging_of_a_stream_with_batch_norm(run: Run) -> None:
    """Nobody knows of how many batches the epoch of statistics has: an AssertionError when that begins."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.utils.data.TensorDataset(*regression_data()))

    trainer = run.trainer(callbacks=[StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)], max_epochs=2)
    run.fit(Normalised(), trainer, torch.utils.data.DataLoader(Stream(), batch_size=run.batch_size))


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
def metrics_read_at_optimizer_steps_of_averaging(run: Run) -> None:
    """In the epoch of statistics there is one such step, at its end."""

    class Reads(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
            run.note(f"metrics {trainer.global_step} {trainer.current_epoch}", numbers(trainer.callback_metrics))

    averaging = StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=2)
    trainer = run.trainer(callbacks=[averaging, Reads()], max_epochs=3)
    run.fit(Normalised(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def stochastic_averaging_resumed(run: Run) -> None:
    make = lambda: StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=2)  # noqa: E731
    path, data = run.root / "mid.ckpt", run.loader(*regression_data())
    run.fit(Normalised(), run.trainer(callbacks=[make(), SavedInMidTraining(path, 2)], max_epochs=5), data)
    model, callback = Normalised(), make()
    trainer = run.trainer(callbacks=[callback], max_epochs=5)
    trainer.fit(model, data, ckpt_path=path)
    run.finish(model, trainer)


class Transfer(Regression):
    """A backbone with batch normalisation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.backbone(x))

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [adam], [torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)]


class Thaw(BaseFinetuning):
    """Unfreezes a layer in each epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.get_submodule("backbone"), train_bn=False)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        layers = {1: "backbone.3", 2: "backbone.1", 3: "backbone.0"}
        if epoch in layers:
            self.unfreeze_and_add_param_group(pl_module.get_submodule(layers[epoch]), optimizer)


def note_groups(run: Run, trainer: pl.Trainer, callback: BaseFinetuning) -> None:
    groups = trainer.optimizers[0].param_groups
    run.note("groups", [[len(group["params"]), group["lr"], group["weight_decay"]] for group in groups])
    state = callback.state_dict()
    run.note("named", [group["params"] for group in state["internal_optimizer_metadata"][0]])
    run.note("previous", state.get("previous_backbone_lr"))


@case
def layers_thaw_one_by_one(run: Run) -> None:
    callback = Thaw()
    trainer = run.trainer(callbacks=[callback], max_epochs=5)
    run.fit(Transfer(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))
    note_groups(run, trainer, callback)


@case
def backbone_follows(run: Run) -> None:
    callback = BackboneFinetuning(1, lambda_func=lambda epoch: 3.0, backbone_initial_ratio_lr=0.2)
    trainer = run.trainer(callbacks=[callback], max_epochs=4)
    run.fit(Transfer(), trainer, run.loader(*regression_data()))
    note_groups(run, trainer, callback)


@case
def backbone_resumed(run: Run) -> None:
    path, data = run.root / "saved.ckpt", run.loader(*regression_data())
    trainer = run.trainer(callbacks=[BackboneFinetuning(1, backbone_initial_lr=0.001, should_align=False)], max_epochs=3)
    run.fit(Transfer(), trainer, data)
    trainer.save_checkpoint(path)
    model, callback = Transfer(), BackboneFinetuning(1, backbone_initial_lr=0.001, should_align=False)
    trainer = run.trainer(callbacks=[callback], max_epochs=5)
    trainer.fit(model, data, ckpt_path=path)
    run.finish(model, trainer)
    note_groups(run, trainer, callback)


@case
def no_backbone(run: Run) -> None:
    run.fit(Regression(), run.trainer(callbacks=[BackboneFinetuning()], max_epochs=1), run.loader(*regression_data()))


@case
def spike_of_the_loss(run: Run) -> None:
    class Spiking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * (1 + 50 * (batch_idx == 5))

    callback = SpikeDetection(exclude_batches_path=run.root)
    trainer = run.trainer(callbacks=[callback], max_epochs=2)
    try:
        run.fit(Spiking(), trainer, run.loader(*regression_data(128)))
    finally:
        state = callback.state_dict()
        run.note("spike", {key: state[key] for key in ("last_val", "bad_batches", "mode", "rtol")})
        run.note("file", (run.root / "skip_batches.json").read_text())


@case
def throughput_is_logged_at_the_same_steps(run: Run) -> None:
    class Counted(Regression):
        flops_per_batch = 1000

    monitor = ThroughputMonitor(lambda batch: len(batch[0]), length_fn=lambda batch: batch[0].numel(), window_size=3)
    trainer = run.trainer(callbacks=[monitor], max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=2)
    data, val = run.loader(*regression_data(128)), run.loader(*regression_data(64, 1))
    run.fit(Counted(), trainer, data, val)
    # Of a mesh, rates of all devices are logged too; times differ from run to run.
    for entry in run.record["logged"]:
        measured = {key: value for key, value in entry[1].items() if "/" in key}
        for key in measured:
            del entry[1][key]
        entry[1]["measured"] = sorted(
            key for key in measured if "device/" in key or (key.count("/") == 1 and "_per_sec" not in key)
        )
        entry[1]["batches"] = measured.get("train/batches", measured.get("validate/batches"))


@case
def steps_of_what_callbacks_log(run: Run) -> None:
    """With two manual optimizers a batch is two optimizer steps and one of the loggers'."""

    class Manual(Transfer):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.backbone, self.layer)]

    watching = [LearningRateMonitor("step"), LearningRateMonitor("epoch"), DeviceStatsMonitor(cpu_stats=True)]
    trainer = run.trainer(callbacks=[*watching], max_epochs=2, log_every_n_steps=3, val_check_interval=2)
    run.fit(Manual(), trainer, run.loader(*regression_data(112)), run.loader(*regression_data(48, 1)))
    for entry in run.record["logged"]:
        entry[1] = sorted({key.split("/")[0] if key.startswith("Device") else key for key in entry[1]})


@case
def monitored_before_it_is_logged(run: Run) -> None:
    callback = ModelCheckpoint(run.root / "saved", monitor="val_loss", save_on_train_epoch_end=True)
    trainer = run.trainer(callbacks=[callback], max_epochs=4, check_val_every_n_epoch=2, enable_checkpointing=True)
    run.fit(Regression(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))
    run.note("best", [callback.best_model_score, len(callback.best_k_models)])


if __name__ == "__main__":
    main()
