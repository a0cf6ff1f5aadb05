"""Properties of a Trainer that scripts read: the world, the state of the run, loaders, callbacks, loggers and metrics.

API: ``lightning.pytorch.Trainer`` 2.6. Nothing here does anything: each property asks the part of the run that knows.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import jax
import torch

from torch_compat.accelerators import Accelerator
from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.early_stopping import EarlyStopping
from torch_compat.callbacks.progress import ProgressBar
from torch_compat.core.module import LightningModule
from torch_compat.loggers.logger import Logger
from torch_compat.plugins.precision import Precision
from torch_compat.run import hook_calls as call
from torch_compat.run.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch_compat.step.dispatcher import StepDispatcher
from torch_compat.stock_names import removed_names
from torch_compat.strategies import SingleDeviceStrategy, Strategy
from torch_compat.trainer.connectors import Connected
from torch_compat.trainer.data.data_source import DataSource
from torch_compat.trainer.evaluation_loop import EvaluationLoop
from torch_compat.trainer.fit_loop import FitLoop
from torch_compat.trainer.metric_log import MetricLog
from torch_compat.trainer.prediction_loop import PredictionLoop
from torch_compat.trainer.stock_names import StockNames
from torch_compat.utilities.parts import of
from xlatrain.step.loss_scale import LossScaler


def _flag(stage: RunningStage) -> property:
    """Whether the run is in the stage; setting it begins, or ends, the stage."""

    def get(self: TrainerProperties) -> bool:
        return self.state.stage == stage

    def set_(self: TrainerProperties, value: bool) -> None:
        self.state.stage = stage if value else None

    return property(get, set_)


class TrainerProperties(StockNames, Connected):
    """The properties of a :class:`~torch_compat.Trainer`."""

    strategy: Strategy
    state: TrainerState
    executor: StepDispatcher
    fit_loop: FitLoop
    validate_loop: EvaluationLoop
    test_loop: EvaluationLoop
    predict_loop: PredictionLoop
    metric_log: MetricLog
    callbacks: list[Callback]
    limit_val_batches: int | float
    num_sanity_val_steps: int | float
    _module: LightningModule | None
    _loggers: list[Logger]
    _default_root_dir: str

    # -- the world -------------------------------------------------------------------------------------------------

    world_size: int = of("strategy.world_size", "Devices in the mesh, over all processes.")

    @property
    def num_devices(self) -> int:
        """Devices of this process in the mesh."""
        mine = jax.process_index()
        return sum(device.process_index == mine for device in self.strategy.mesh.devices.flat)

    @property
    def device_ids(self) -> list[int]:
        """Indices of this process's devices."""
        return list(range(self.num_devices))

    @property
    def num_nodes(self) -> int:
        """Processes: one on each host."""
        return jax.process_count()

    global_rank: int = of("strategy.global_rank")
    local_rank: int = of("strategy.local_rank")
    node_rank: int = of("strategy.node_rank")
    is_global_zero: bool = of("strategy.is_global_zero")

    @property
    def accelerator(self) -> Accelerator:
        """The hardware plugin."""
        accelerator = self.strategy.accelerator
        assert accelerator is not None
        return accelerator

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that ``configure_optimizers`` returned in the last fit."""
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer] | None) -> None:
        self.strategy.optimizers = optimizers or []

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """The arguments for a user's own ``DistributedSampler``; None on one device."""
        return None if isinstance(self.strategy, SingleDeviceStrategy) else self.strategy.distributed_sampler_kwargs

    precision_plugin: Precision = of("strategy.precision_plugin")
    precision: str = of("precision_plugin.precision")
    scaler: LossScaler | None = of("precision_plugin.scaler", "Dynamic loss scaling, where the precision has it.")

    # -- what runs -------------------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> LightningModule:
        """The module of the current or last run."""
        return self._module  # pyright: ignore[reportReturnType]  None before the first run, as in stock

    @property
    def model(self) -> LightningModule | None:
        return self._module

    training = _flag(RunningStage.TRAINING)
    validating = _flag(RunningStage.VALIDATING)
    testing = _flag(RunningStage.TESTING)
    predicting = _flag(RunningStage.PREDICTING)
    sanity_checking = _flag(RunningStage.SANITY_CHECKING)

    @property
    def evaluating(self) -> bool:
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        return self.state.status == TrainerStatus.INTERRUPTED

    @property
    def current_epoch(self) -> int:
        """Epochs finished."""
        if (tracer := self.executor.tracer) is not None:
            return tracer.counter("current_epoch")  # pyright: ignore[reportReturnType]  passes for an int
        return self.fit_loop.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        if (tracer := self.executor.tracer) is not None:
            return tracer.counter("global_step")  # pyright: ignore[reportReturnType]  passes for an int
        return self.fit_loop.progress.global_step

    max_epochs: int | None = of("fit_loop.max_epochs")
    min_epochs: int | None = of("fit_loop.min_epochs")
    max_steps: int = of("fit_loop.max_steps")
    min_steps: int | None = of("fit_loop.min_steps")

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch, or where none is current the one before, is its epoch's last."""
        if (tracer := self.executor.tracer) is not None:
            return tracer.counter("is_last_batch")  # pyright: ignore[reportReturnType]  passes for a bool
        return self.fit_loop.shown_last_batch

    num_training_batches: int | float = of("fit_loop.max_batches")

    @property
    def num_val_batches(self) -> list[int | float]:
        return self.validate_loop.batches_of_loaders(fitting=self.state.fn != TrainerFn.VALIDATING)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        return [min(self.num_sanity_val_steps, limit) for limit in self.validate_loop.batches_of_loaders(fitting=True)]

    num_test_batches: list[int | float] = of("test_loop.max_batches")
    num_predict_batches: list[int | float] = of("predict_loop.max_batches")

    @property
    def enable_validation(self) -> bool:
        """Whether validation runs during fit."""
        loop = self.validate_loop
        return loop.source.is_defined and call.is_overridden("validation_step", self._module) and self.limit_val_batches > 0

    @property
    def train_dataloader(self) -> Any:
        return _loaders(self.fit_loop.source)

    @property
    def val_dataloaders(self) -> Any:
        return _loaders(self.validate_loop.source)

    @property
    def test_dataloaders(self) -> Any:
        return _loaders(self.test_loop.source)

    @property
    def predict_dataloaders(self) -> Any:
        return _loaders(self.predict_loop.source)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that ``fit`` will take; loads the training loader if that has not happened.

        Raises:
            MisconfigurationException: training has no limit in epochs and batches, so there is no estimate.
        """
        return self.fit_loop.stepping_batches()

    # -- callbacks and loggers -------------------------------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        return self._default_root_dir

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the last run began with. One that is assigned is what every run begins with, until None is."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | os.PathLike[str] | None) -> None:
        self._ckpt_path = None if path is None else os.fspath(path)
        self._manages_ckpt_path = bool(path)

    @property
    def loggers(self) -> list[Logger]:
        """The loggers; while a step is captured, objects that record what it calls of them."""
        recorder = self.executor.recorder
        return self._loggers if recorder is None else [recorder.stand_in(logger) for logger in self._loggers]

    @loggers.setter
    def loggers(self, loggers: list[Logger] | None) -> None:
        self._loggers = list(loggers or [])

    @property
    def logger(self) -> Logger | None:
        return next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self._loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str | None:
        """The first logger's directory, the same on every process; without a logger the root directory."""
        if not self._loggers:
            directory = self.default_root_dir
        else:
            first = self._loggers[0]
            directory = getattr(first, "log_dir", None) or first.save_dir
        return self.strategy.broadcast(directory)

    # -- metrics ---------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Metrics for callbacks: 0-d tensors by name."""
        return self.metric_log.current("callback")

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Metrics sent to loggers: 0-d tensors by name."""
        return self.metric_log.current("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Metrics for the progress bar: numbers by name."""
        return self.metric_log.current("progress_bar")

    # -- names of earlier versions ----------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # a checker that saw it would take every name for a member
        add_argparse_args = removed_names.RemovedMember()
        from_argparse_args = removed_names.RemovedMember()

        def __getattr__(self, name: str) -> Any:
            if name == "training_type_plugin" and (plugin := getattr(self.strategy, "plugin", None)) is not None:
                return plugin  # the one of 1.4 or 1.5 that the Trainer was given
            if instead := removed_names.of_trainer(name):
                text = f"{type(self).__name__!r} object has no attribute {name!r}{instead}"
                raise AttributeError(text, name=name, obj=self)
            return super().__getattr__(name)


def _loaders(source: DataSource) -> Any:
    return None if source.combined is None else source.combined.iterables
