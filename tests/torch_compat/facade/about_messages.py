"""Errors that stock tells by their first words, which scripts and tests look for: ``said_…`` are compared by those words."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from answering import ask_each
from lightning.fabric import Fabric
from lightning.pytorch import callbacks as cb
from lightning.pytorch import plugins, strategies
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from models import Net, data, trainer
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader


def fits(*loaders: Any, ckpt_path: Any = None, flags: Any = None, **members: Any) -> None:
    """A fit of a Net whose class has other members."""
    net = type("Other", (Net,), members)()
    trainer(max_epochs=1, **(flags or {})).fit(net, *(loaders or [data()]), ckpt_path=ckpt_path)


def schedules(make: Any) -> None:
    def configure(self: Any) -> Any:
        optimizer = SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

    fits(configure_optimizers=configure)


def logs_otherwise(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("a", 1.0, prog_bar=bool(batch_idx))
    return self(batch).mean()


def loads_what_is_missing() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.save("some.ckpt", {"there": 1})
    fabric.load("some.ckpt", {"missing": 1})


class Stepped:
    """A scheduler that is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def takes_two(self: Any, batch: Any, batch_idx: int) -> None: ...


ask_each(
    said_mode_of_checkpoint=lambda: cb.ModelCheckpoint(mode="best"),
    said_top_k=lambda: cb.ModelCheckpoint(save_top_k=-2),
    said_every_n_epochs=lambda: cb.ModelCheckpoint(every_n_epochs=-1),
    said_both_intervals=lambda: cb.ModelCheckpoint(every_n_train_steps=2, train_time_interval=timedelta(1)),
    said_mode_of_stopping=lambda: cb.EarlyStopping("a", mode="best"),
    said_logging_interval=lambda: cb.LearningRateMonitor("batch"),
    said_duration=lambda: cb.Timer("1:2"),
    said_interval=lambda: cb.Timer(interval="batch"),
    said_no_schedule=lambda: cb.GradientAccumulationScheduler({}),
    said_epoch_of_schedule=lambda: cb.GradientAccumulationScheduler({-1: 2}),
    said_factor_of_schedule=lambda: cb.GradientAccumulationScheduler({0: 0}),
    said_filename=lambda: cb.OnExceptionCheckpoint("x", filename=""),
    said_method=lambda: Tuner(trainer()).lr_find(Net(), data(), method="other"),
    said_nodes=lambda: trainer(num_nodes=0),
    said_nodes_of_fabric=lambda: Fabric(accelerator="cpu", num_nodes=0),
    said_accelerator=lambda: trainer(accelerator="abacus"),
    said_accelerator_of_fabric=lambda: Fabric(accelerator=5),
    said_strategy=lambda: trainer(strategy="nope"),
    said_strategy_of_1=lambda: trainer(strategy="dp"),
    said_strategy_of_fabric=lambda: Fabric(accelerator="cpu", strategy=None),
    said_precision=lambda: Fabric(accelerator="cpu", precision="17"),
    said_two_precisions=lambda: trainer(plugins=[plugins.DoublePrecision(), plugins.HalfPrecision()]),
    said_two_places=lambda: trainer(
        strategy=strategies.DDPStrategy(checkpoint_io=plugins.TorchCheckpointIO()), plugins=[plugins.TorchCheckpointIO()]
    ),
    said_precision_twice=lambda: trainer(precision="64-true", plugins=[plugins.DoublePrecision()]),
    said_plugin=lambda: trainer(plugins=5),
    said_no_loader=lambda: trainer().test(Net()),
    said_loaders_twice=lambda: trainer().fit(Net(), data(), datamodule=pl.LightningDataModule()),
    said_other_loaders_twice=lambda: trainer().validate(Net(), data(), datamodule=pl.LightningDataModule()),
    said_no_batches=lambda: trainer().fit(Net(), 5),
    said_no_batches_of_module=lambda: trainer().fit(type("Own", (Net,), {"train_dataloader": lambda self: 5})()),
    said_no_module=lambda: trainer().fit(torch.nn.Linear(2, 2), data()),
    said_no_index=lambda: fits(data(), [data(), data()], validation_step=takes_two),
    said_no_index_of_predict=lambda: trainer().predict(type("O", (Net,), {"predict_step": takes_two})(), [data(), data()]),
    said_no_best=lambda: fits(ckpt_path="best"),
    said_no_hpc=lambda: fits(ckpt_path="hpc"),
    said_best_in_a_trial=lambda: trainer(fast_dev_run=True, callbacks=[cb.ModelCheckpoint()]).test(
        Net(), data(), ckpt_path="best"
    ),
    said_optimizers=lambda: fits(configure_optimizers=lambda self: 5),
    said_interval_of_scheduler=lambda: schedules(lambda optimizer: {"scheduler": StepLR(optimizer, 1), "interval": "batch"}),
    said_no_scheduler=lambda: schedules(lambda optimizer: {"interval": "step"}),
    said_no_monitor=lambda: schedules(ReduceLROnPlateau),
    said_no_monitor_in_a_dict=lambda: schedules(lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer)}),
    said_no_optimizer_in_a_dict=lambda: fits(configure_optimizers=lambda self: {"lr_scheduler": 3, "frequency": 2}),
    said_closure_not_called=lambda: fits(optimizer_step=lambda self, epoch, batch_idx, optimizer, closure=None: None),
    one_cycle_by_epochs=lambda: schedules(lambda optimizer: OneCycleLR(optimizer, 0.1, 8)),
    one_cycle_by_epochs_in_a_dict=lambda: schedules(lambda optimizer: {"scheduler": OneCycleLR(optimizer, 0.1, 8)}),
    said_other_optimizer=lambda: schedules(lambda optimizer: StepLR(SGD([torch.nn.Parameter(torch.ones(1))], 0.1), 1)),
    said_result=lambda: fits(training_step=lambda self, batch, batch_idx: "text"),
    said_no_loss=lambda: fits(training_step=lambda self, batch, batch_idx: {"x": 1}),
    said_no_gradient=lambda: fits(training_step=lambda self, batch, batch_idx: self(batch).mean().detach()),
    said_many_losses=lambda: fits(training_step=lambda self, batch, batch_idx: self(batch)),
    said_logged_otherwise=lambda: fits(training_step=logs_otherwise),
    said_no_metric=lambda: fits(flags={"callbacks": [cb.EarlyStopping("nope")]}),
    said_no_logger=lambda: fits(flags={"callbacks": [cb.LearningRateMonitor()], "logger": False}),
    said_no_logger_of_stats=lambda: fits(flags={"callbacks": [cb.DeviceStatsMonitor()], "logger": False}),
    said_two_schedules=lambda: fits(
        flags={"callbacks": [cb.GradientAccumulationScheduler({0: 2})], "accumulate_grad_batches": 2}
    ),
    said_part_of_no_length=lambda: fits((row for row in data()), flags={"limit_train_batches": 0.5}),
    said_limit=lambda: trainer(limit_train_batches=1.5),
    said_part_of_a_batch=lambda: fits(flags={"limit_train_batches": 0.1}),
    said_part_of_a_batch_of_validation=lambda: fits(data(), data(), flags={"limit_val_batches": 0.1}),
    said_no_predict_step=lambda: trainer().predict(type("O", (Net,), {"predict_step": None})(), data()),
    said_order_of_predict=lambda: trainer().predict(Net(), CombinedLoader([data()], "min_size")),
    said_own_scheduler=lambda: schedules(Stepped),
    said_scheduler_without_state=lambda: schedules(lambda optimizer: type("S", (), {"step": None, "optimizer": optimizer})()),
    said_schedule_by_hand=lambda: fits(
        flags={"callbacks": [cb.GradientAccumulationScheduler({0: 2})]}, automatic_optimization=False
    ),
    said_accelerator_twice=lambda: trainer(strategy=strategies.SingleDeviceStrategy(accelerator=CPUAccelerator())),
    said_precision_of_strategy=lambda: trainer(
        strategy=strategies.SingleDeviceStrategy(precision_plugin=plugins.DoublePrecision()), plugins=[plugins.HalfPrecision()]
    ),
    said_kubeflow=lambda: plugins.environments.KubeflowEnvironment.detect(),
    said_trace_without_example=lambda: Net().to_torchscript(method="trace"),
    said_same_names_of_groups=lambda: fits(
        flags={"callbacks": [cb.LearningRateMonitor()], "logger": CSVLogger(".")},
        configure_optimizers=lambda self: SGD([{"params": [one], "name": "a"} for one in self.parameters()], 0.1),
    ),
    warned_of_no_batches=lambda: fits(DataLoader([])),
    warned_of_shuffled_validation=lambda: fits(data(), DataLoader(torch.ones(4, 4), shuffle=True)),
    warned_of_determinism=lambda: trainer(deterministic=True, benchmark=True) and torch.use_deterministic_algorithms(False),
    warned_of_overridden_steps=lambda: fits(
        flags={"callbacks": [cb.GradientAccumulationScheduler({0: 2})]},
        optimizer_step=lambda self, epoch, batch_idx, optimizer, closure=None: optimizer.step(closure),
    ),
    two_checkpoints_in_one_folder=lambda: fits(
        flags={
            "callbacks": [cb.ModelCheckpoint("saved", filename=name) for name in ("{epoch}", "{step}")],
            "enable_checkpointing": True,
        }
    ),
    said_sequential=lambda: fits(CombinedLoader({"a": data()}, "sequential")),
    fits_no_monitor_of_checkpoint=lambda: fits(
        flags={"callbacks": [cb.ModelCheckpoint(monitor="nope")], "enable_checkpointing": True}
    ),
    said_no_devices=lambda: trainer(devices=0),
    said_no_devices_of_fabric=lambda: Fabric(accelerator="cpu", devices=0),
    said_devices=lambda: trainer(devices="x"),
    said_time=lambda: trainer(max_time="x"),
    said_missing_key=loads_what_is_missing,
)
