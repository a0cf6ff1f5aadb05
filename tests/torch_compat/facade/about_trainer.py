"""The Trainer: its arguments, alone and together, and its members before a run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import lightning.pytorch as pl
from answering import ask_each, attempt
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from models import QUIET, trainer

WRONG: dict[str, list[Any]] = {
    "accelerator": ["abacus", 3, "mps", "hpu"],
    "strategy": ["quantum", 3, "dp", "ddp_sharded"],
    "devices": ["many", 0, -5, 1.5, [], [0, 0], "0", "", None],
    "num_nodes": ["two", 0, -1],
    "precision": ["7-mixed", 8, "mixed", 32.0, "16", "bf16", 64],
    "logger": ["csv", 3, [3]],
    "callbacks": [[3], "callback", 3],
    "fast_dev_run": [-1, 1.5, "yes"],
    "max_epochs": [-2, 1.5, "two"],
    "max_steps": [-2, None],
    "max_time": ["soon", 3, {"weeks": "x"}, "00:61:00:00"],
    "limit_train_batches": [-1, 1.5, "half", -0.5],
    "limit_val_batches": [-1, 2.5],
    "limit_test_batches": [-1],
    "limit_predict_batches": [-0.1],
    "overfit_batches": [-1, 1.5, "one"],
    "val_check_interval": [1.5, -1, "never", -0.5, "00:00:00", {"x": 1}],
    "check_val_every_n_epoch": [0, -1, 1.5, "x", None],
    "num_sanity_val_steps": [-2, 1.5],
    "log_every_n_steps": [-1, 1.5],
    "accumulate_grad_batches": [0, -1, 1.5, "x", {0: 1}],
    "gradient_clip_val": ["much", -1],
    "gradient_clip_algorithm": ["other", 3],
    "deterministic": ["maybe", 3],
    "benchmark": ["maybe"],
    "profiler": ["other", 3],
    "reload_dataloaders_every_n_epochs": [-1, 1.5, "x"],
    "default_root_dir": [3],
    "plugins": ["other", [3], 3],
    "sync_batchnorm": ["x"],
    "barebones": [True],
    "gpus": [1],
    "resume_from_checkpoint": ["x"],
    "auto_lr_find": [True],
}
ask_each(
    **{
        f"trainer_{name}_{index}": lambda name=name, value=value: type(pl.Trainer(**{**QUIET, name: value})).__name__
        for name, values in WRONG.items()
        for index, value in enumerate(values)
    }
)

ask_each(
    trainer_positional=lambda: pl.Trainer("cpu"),
    trainer_steps_and_epochs=lambda: [
        trainer().max_epochs,
        trainer(max_steps=5).max_epochs,
        trainer(max_epochs=-1).max_epochs,
        trainer(max_time="00:00:01:00").max_epochs,
    ],
    trainer_two_bars=lambda: trainer(enable_progress_bar=True, callbacks=[cb.RichProgressBar(), cb.TQDMProgressBar()]),
    trainer_bar_and_off=lambda: trainer(callbacks=[cb.TQDMProgressBar()]),
    trainer_checkpoint_and_off=lambda: trainer(callbacks=[cb.ModelCheckpoint()]),
    trainer_timer_and_time=lambda: [
        type(one).__name__ for one in trainer(max_time="00:00:01:00", callbacks=[cb.Timer(timedelta(1))]).callbacks
    ],
    trainer_same_keys=lambda: trainer(enable_checkpointing=True, callbacks=[cb.ModelCheckpoint(), cb.ModelCheckpoint()]),
    trainer_accumulation=lambda: (
        trainer(accumulate_grad_batches=2, callbacks=[cb.GradientAccumulationScheduler({1: 2})]).accumulate_grad_batches
    ),
    trainer_barebones_callbacks=lambda: pl.Trainer(accelerator="cpu", devices=1, barebones=True, callbacks=[cb.ModelSummary()]),
    trainer_barebones=lambda: (lambda t: [t.callbacks, t.loggers, t.num_sanity_val_steps, t.log_every_n_steps])(
        pl.Trainer(accelerator="cpu", devices=1, barebones=True)
    ),
    trainer_barebones_logger=lambda: pl.Trainer(accelerator="cpu", devices=1, barebones=True, logger=True),
    trainer_order=lambda: [
        type(one).__name__
        for one in pl.Trainer(
            accelerator="cpu", devices=1, logger=False, callbacks=[cb.ModelCheckpoint(), cb.LambdaCallback(), cb.Timer()]
        ).callbacks
    ],
    trainer_fast_dev_run=lambda: (
        lambda t: [
            t.max_epochs,
            t.max_steps,
            t.limit_train_batches,
            t.limit_val_batches,
            t.num_sanity_val_steps,
            t.val_check_interval,
            t.check_val_every_n_epoch,
            len(t.loggers),
            type(t.logger).__name__,
        ]
    )(pl.Trainer(accelerator="cpu", devices=1, fast_dev_run=3, logger=CSVLogger("."))),
    trainer_overfit=lambda: (lambda t: [t.limit_train_batches, t.limit_val_batches, t.overfit_batches])(
        trainer(overfit_batches=2)
    ),
    trainer_members=lambda: {name: attempt(lambda name=name: getattr(ONE, name)) for name in MEMBERS},
)
ONE = trainer(max_epochs=2)


def _flags(connector: Any) -> list[Any]:
    flags = [connector._accelerator_flag, connector._devices_flag, connector._num_nodes_flag, connector._precision_flag]
    return [*flags, [str(device) for device in connector._parallel_devices], connector.is_distributed]


def _sources(made: pl.Trainer) -> list[Any]:
    loops = (made.fit_loop, made.fit_loop.epoch_loop.val_loop, made.validate_loop, made.test_loop, made.predict_loop)
    return [[loop._data_source.name, loop._data_source.is_module(), loop._data_source.is_defined()] for loop in loops]


class _SourcesInRun(pl.Callback):
    """Asks inside of a run."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = _sources(trainer)
        self.given = trainer.fit_loop._data_source.dataloader() is trainer.train_dataloader


def _sources_in_run() -> list[Any]:
    from lightning.pytorch.demos.boring_classes import BoringModel

    asking = _SourcesInRun()
    model = BoringModel()
    model.val_dataloader = model.val_dataloader  # an attribute, but nobody's own
    trainer(max_steps=1, limit_val_batches=1, callbacks=[asking]).fit(model)
    return [asking.found, asking.given]


def _kept_away() -> bool:
    made = trainer()
    made._accelerator_connector.use_distributed_sampler = False
    return made._accelerator_connector.use_distributed_sampler


ask_each(
    connector_alone=lambda: _flags(_AcceleratorConnector(accelerator="cpu", devices=1)),
    connector_precision=lambda: _flags(_AcceleratorConnector(accelerator="cpu", devices=1, precision="bf16-mixed")),
    connector_of_trainer=lambda: _flags(ONE._accelerator_connector),
    connector_keeps_samplers=_kept_away,
    connector_of_callbacks=lambda: [
        type(one).__name__ for one in ONE._callback_connector._reorder_callbacks([cb.ModelCheckpoint(), cb.Timer()])
    ],
    connector_of_loggers=lambda: [dict(ONE._logger_connector._logged_metrics), dict(ONE._logger_connector._callback_metrics)],
    loaders_in_a_run=_sources_in_run,
    loaders_before_a_run=lambda: _sources(trainer()),
    submodules_without_an_import=lambda: [
        L.fabric.strategies.fsdp.FSDPStrategy.__name__,
        pl.loops.fit_loop._FitLoop.__name__ is not None,
        pl.trainer.connectors.data_connector._DataLoaderSource.__name__,
        L.fabric.utilities.device_dtype_mixin.__name__ is not None,
        pl.utilities.rank_zero.rank_zero_only.__name__,
        hasattr(pl.callbacks, "no_such_module"),
    ],
)
MEMBERS = (
    *("callback_metrics", "checkpoint_callback", "checkpoint_callbacks", "ckpt_path", "current_epoch"),
    *("distributed_sampler_kwargs", "early_stopping_callback", "early_stopping_callbacks", "enable_validation"),
    *("estimated_stepping_batches", "evaluating", "global_rank", "global_step", "interrupted", "is_global_zero"),
    *("is_last_batch", "lightning_module", "local_rank", "logged_metrics", "logger", "loggers", "lr_scheduler_configs"),
    *("max_epochs", "max_steps", "min_epochs", "min_steps", "model", "node_rank", "num_nodes", "num_predict_batches"),
    *("num_test_batches", "num_training_batches", "optimizers", "precision", "predict_dataloaders", "predicting"),
    *("progress_bar_callback", "progress_bar_metrics", "received_sigterm", "sanity_checking", "scaler"),
    *("test_dataloaders", "testing", "train_dataloader", "training", "val_dataloaders", "validating", "world_size"),
)
