"""The Trainer. API: ``lightning.pytorch.Trainer`` 2.6."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.utils.data import DataLoader

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.early_stopping import EarlyStopping
from torch_compat.callbacks.progress import ProgressBar
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.logging import LogOptions
from torch_compat.core.logging import resolve as resolve_logging
from torch_compat.core.module import LightningModule
from torch_compat.core.optimizer import LightningOptimizer
from torch_compat.functional.host_arrays import host_value, to_torch
from torch_compat.functional.host_scalars import ScalarTracer
from torch_compat.functional.model_state import ModelState
from torch_compat.functional.optimizers import FunctionalOptimizer
from torch_compat.functional.param_group import UnsupportedOptimizerError
from torch_compat.functional.recording import LogRecorder
from torch_compat.functional.step import TraceContext
from torch_compat.loggers.logger import Logger
from torch_compat.plugins.precision import Precision
from torch_compat.strategies import Strategy
from torch_compat.torch_load import patch_torch_load
from torch_compat.trainer import arguments, attachments, call, report, state_io
from torch_compat.trainer.compiled import CompiledSteps, StepOutcome, StepServices
from torch_compat.trainer.data_source import DataSource
from torch_compat.trainer.devices import find_devices, platform_of
from torch_compat.trainer.eager import EagerOptimization, EagerSteps
from torch_compat.trainer.evaluation_loop import EvaluationLoop
from torch_compat.trainer.fit_loop import FitLoop
from torch_compat.trainer.optimization import AutomaticOptimization
from torch_compat.trainer.prediction_loop import PredictionLoop
from torch_compat.trainer.resolve import resolve
from torch_compat.trainer.results import Metrics, Results
from torch_compat.trainer.schedulers import LRSchedulerConfig, configure_optimizers
from torch_compat.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch_compat.utilities.seed import isolate_rng
from xlatrain.bridge.errors import BridgeError
from xlatrain.data import BatchPlacer
from xlatrain.lockstep import lockstep
from xlatrain.loss_scale import LossScaler

log = logging.getLogger(__name__)


class Trainer:
    """Runs a LightningModule: fits, validates, tests, predicts, compiled by XLA over a device mesh.

    Every argument of Lightning 2.6's Trainer is here with its default and meaning; what an XLA mesh has no use for is refused by
    name. See ``docs/lightning_compat.md`` for each.

    Args:
        accelerator: ``"auto"`` (what JAX finds), ``"cpu"``, ``"gpu"``/``"cuda"``, ``"tpu"``.
        strategy: ``"auto"``, ``"ddp"``, ``"fsdp"``, ``"mesh"``, or a strategy object.
        devices: devices per process: a number, indices, or ``"auto"``/-1 for all.
        num_nodes: number of processes that must have joined.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-mixed"``, ``"16-true"``, ``"64-true"``.

    Raises:
        MisconfigurationException: an argument of a wrong kind, or arguments that contradict each other.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        given = dict(locals())
        given.pop("self")
        options = arguments.check(given)
        patch_torch_load()
        self.barebones = barebones
        self.fast_dev_run = options.fast_dev_run
        self.overfit_batches = options.overfit_batches
        self.limit_train_batches = options.limit_train_batches
        self.limit_val_batches = options.limit_val_batches
        self.limit_test_batches = options.limit_test_batches
        self.limit_predict_batches = options.limit_predict_batches
        self.val_check_interval = options.val_check_interval
        self.val_check_seconds = options.val_check_seconds
        self.check_val_every_n_epoch = options.check_val_every_n_epoch
        self.num_sanity_val_steps = options.num_sanity_val_steps
        self.log_every_n_steps = options.log_every_n_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.use_distributed_sampler = use_distributed_sampler
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.enable_autolog_hparams = enable_autolog_hparams
        self._detect_anomaly = detect_anomaly
        self._default_root_dir = os.fspath(default_root_dir) if default_root_dir is not None else os.getcwd()

        found = find_devices(platform_of(accelerator), devices, num_nodes)
        choice = resolve(strategy, precision, plugins, len(found), found[0].platform)
        if choice.precision.needs_x64:
            jax.config.update("jax_enable_x64", True)
        self.strategy: Strategy = choice.strategy
        self.strategy.precision_plugin = choice.precision
        self.strategy.setup_environment(found)
        self._placer = BatchPlacer(self.strategy.mesh)

        self.state = TrainerState()
        self.should_stop = False
        self.compiling = False
        self.at_epoch_end = False
        self.received_sigterm = False
        self.ckpt_path: str | None = None
        self.datamodule: LightningDataModule | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self._module: LightningModule | None = None
        self._functional: FunctionalOptimizer | None = None
        self._steps: CompiledSteps | EagerSteps | None = None
        self._fallback: str | None = None
        self._running = contextlib.ExitStack()
        self._transfer_hooks: list[str] = []
        self.optimization: AutomaticOptimization | EagerOptimization
        self._recorder: LogRecorder | None = None
        self._tracer: ScalarTracer | None = None
        self._callback_metrics: dict[str, torch.Tensor] = {}
        self._logged_metrics: dict[str, torch.Tensor] = {}
        self._progress_bar_metrics: dict[str, float] = {}

        self.fit_loop = FitLoop(self, min_epochs, options.max_epochs, min_steps, options.max_steps)
        self.validate_loop = EvaluationLoop(self, "validation", "val")
        self.test_loop = EvaluationLoop(self, "test", "test")
        self.predict_loop = PredictionLoop(self)
        self._loggers = attachments.make_loggers(options.logger, self._default_root_dir)
        self.callbacks: list[Callback] = attachments.make_callbacks(callbacks, options)

    # -- the world -------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Devices in the mesh, over all processes."""
        return self.strategy.world_size

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

    @property
    def global_rank(self) -> int:
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        return self.strategy.node_rank

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.is_global_zero

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self.strategy.distributed_sampler_kwargs

    @property
    def precision_plugin(self) -> Precision:
        return self.strategy.precision_plugin

    @property
    def precision(self) -> str:
        return self.precision_plugin.precision

    @property
    def scaler(self) -> LossScaler | None:
        """Dynamic loss scaling, where the precision has it."""
        return self.precision_plugin.scaler

    # -- what runs -------------------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> LightningModule:
        """The module of the current or last run."""
        if self._module is None:
            raise RuntimeError("this Trainer has run no module yet: call fit, validate, test or predict")
        return self._module

    @property
    def model(self) -> LightningModule | None:
        return self._module

    @property
    def training(self) -> bool:
        return self.state.stage == RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        self.state.stage = RunningStage.TRAINING if value else None

    @property
    def validating(self) -> bool:
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        return self.state.stage == RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        return self.state.stage == RunningStage.PREDICTING

    @property
    def sanity_checking(self) -> bool:
        return self.state.stage == RunningStage.SANITY_CHECKING

    @property
    def evaluating(self) -> bool:
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        return self.state.status == TrainerStatus.INTERRUPTED

    @property
    def current_epoch(self) -> int:
        """Epochs finished."""
        if self._tracer is not None:
            return self._tracer.counter("current_epoch")  # pyright: ignore[reportReturnType]  passes for an int
        return self.fit_loop.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        if self._tracer is not None:
            return self._tracer.counter("global_step")  # pyright: ignore[reportReturnType]  passes for an int
        return self.fit_loop.progress.global_step

    @property
    def max_epochs(self) -> int | None:
        return self.fit_loop.max_epochs

    @property
    def min_epochs(self) -> int | None:
        return self.fit_loop.min_epochs

    @property
    def max_steps(self) -> int:
        return self.fit_loop.max_steps

    @property
    def min_steps(self) -> int | None:
        return self.fit_loop.min_steps

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the epoch's last."""
        return self.fit_loop.all_batches_done

    @property
    def num_training_batches(self) -> int | float:
        return self.fit_loop.max_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        return self.validate_loop.max_batches

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        return [min(self.num_sanity_val_steps, limit) for limit in self.validate_loop.max_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        return self.test_loop.max_batches

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self.predict_loop.max_batches

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
        loop = self.fit_loop
        if loop.max_epochs == -1:
            return float("inf") if loop.max_steps == -1 else loop.max_steps
        if loop.source.combined is None:
            rank_zero_info("Loading `train_dataloader` to estimate number of stepping batches.")
            loop.setup_data()
        if loop.max_batches == float("inf"):
            return loop.max_steps
        steps = math.ceil(loop.max_batches / self.accumulate_grad_batches) * max(loop.max_epochs or 1, 1)
        return min(loop.max_steps, steps) if loop.max_steps != -1 else steps

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
    def loggers(self) -> list[Logger]:
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger] | None) -> None:
        self._loggers = list(loggers or [])

    @property
    def logger(self) -> Logger | None:
        return self._loggers[0] if self._loggers else None

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

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on process 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

    # -- metrics ---------------------------------------------------------------------------------------------------

    @property
    def _results(self) -> Results | None:
        """The metrics of the loop that runs."""
        stage = self.state.stage
        if stage == RunningStage.TRAINING:
            return self.fit_loop.results
        if stage in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
            return self.validate_loop.results
        return self.test_loop.results if stage == RunningStage.TESTING else None

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Metrics for callbacks: 0-d tensors by name."""
        if (results := self._results) is not None:
            self.keep_metrics(results, on_step=not self.at_epoch_end)
        return self._callback_metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Metrics sent to loggers: 0-d tensors by name."""
        if (results := self._results) is not None:
            self.keep_metrics(results, on_step=not self.at_epoch_end)
        return self._logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Metrics for the progress bar: numbers by name."""
        if (results := self._results) is not None:
            self.keep_metrics(results, on_step=not self.at_epoch_end)
        return self._progress_bar_metrics

    def keep_metrics(self, results: Results, *, on_step: bool) -> Metrics:
        """Make a loop's current values those that outlive it."""
        found = results.metrics(on_step)
        self._callback_metrics.update(found.callback)
        self._logged_metrics.update(found.log)
        self._progress_bar_metrics.update(found.progress_bar)
        return found

    def should_log(self) -> bool:
        """Whether the current training step's metrics go to the loggers."""
        if not self._loggers:
            return False
        every = self.log_every_n_steps
        return self.should_stop or (every > 0 and (self.fit_loop.progress.logged_step + 1) % every == 0)

    def log_metrics(self, metrics: Mapping[str, torch.Tensor], step: int | None = None) -> None:
        """Send metrics to the loggers; a metric called ``step`` sets the step."""
        if not self._loggers or not metrics:
            return
        self._logged_metrics.update(metrics)
        scalars: dict[str, Any] = {name: value.item() for name, value in metrics.items()}
        if step is None and "step" in scalars:
            step = int(scalars.pop("step"))
            self._logged_metrics.pop("step", None)
        if step is None:
            scalars.setdefault("epoch", self.current_epoch)
            step = self.fit_loop.progress.logged_step
        for logger in self._loggers:
            logger.log_metrics(metrics=scalars, step=step)
            logger.save()

    def _log(self, module: LightningModule, name: str, value: Any, options: LogOptions) -> None:
        """What ``LightningModule.log`` calls."""
        hook = module._current_fx_name
        if hook is None or self._results is None:
            raise MisconfigurationException(
                f"You can't `self.log({name!r}, …)` outside of the loops, or inside `{hook}`: log from a step or a "
                "training, validation "
                "or test hook, or use `self.logger.experiment`"
            )
        if self._recorder is not None:
            resolve_logging(options, hook)  # a wrong combination is an error at the user's line
            self._recorder.record(hook, name, value, options)
        else:
            self._results.log(hook, name, value, options)

    def _reduce_value(self, value: float, reduction: str) -> float:
        return self.strategy.reduce_value(value, reduction)

    # -- public functions ------------------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train ``model``.

        Args:
            model: the module.
            train_dataloaders: loaders, or a datamodule; default: the module's hook.
            val_dataloaders: loaders for validation.
            datamodule: gives all loaders.
            ckpt_path: continue from this checkpoint: a path, ``"last"`` or ``"best"``.
            weights_only: False unpickles whatever the checkpoint holds: only for checkpoints that you trust.
        """
        train_dataloaders, datamodule = _datamodule(train_dataloaders, datamodule, val_dataloaders, "fit")

        def run() -> None:
            self.should_stop = False
            self.state.stage = RunningStage.TRAINING
            self.fit_loop.source.reset(train_dataloaders)
            self.validate_loop.source.reset(val_dataloaders)
            path = state_io.find(self, ckpt_path, provided_model=True)
            self._run(path, weights_only)

        self._guarded(model, datamodule, TrainerFn.FITTING, run)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """One pass over the validation set; the epoch's metrics, a dict for each loader."""
        return self._evaluate(
            TrainerFn.VALIDATING, self.validate_loop, model, dataloaders, ckpt_path, verbose, datamodule, weights_only
        )

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """One pass over the test set; the epoch's metrics, a dict for each loader."""
        return self._evaluate(TrainerFn.TESTING, self.test_loop, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def _evaluate(
        self,
        fn: TrainerFn,
        loop: EvaluationLoop,
        model: LightningModule | None,
        dataloaders: Any,
        ckpt_path: str | Path | None,
        verbose: bool,
        datamodule: LightningDataModule | None,
        weights_only: bool | None,
    ) -> list[Mapping[str, float]]:
        dataloaders, datamodule = _datamodule(dataloaders, datamodule, None, fn.value)
        module = self._model_for(model, fn.value)
        loop.verbose = verbose

        def run() -> Any:
            self.state.stage = RunningStage.VALIDATING if fn == TrainerFn.VALIDATING else RunningStage.TESTING
            loop.source.reset(dataloaders)
            return self._run(state_io.find(self, ckpt_path, provided_model=model is not None), weights_only)

        return self._guarded(module, datamodule, fn, run)

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """What ``predict_step`` returns for each batch (this process's rows): a list, or one for each of several loaders."""
        dataloaders, datamodule = _datamodule(dataloaders, datamodule, None, "predict")
        module = self._model_for(model, "predict")

        def run() -> Any:
            self.state.stage = RunningStage.PREDICTING
            self.predict_loop.set_return_predictions(return_predictions)
            self.predict_loop.source.reset(dataloaders)
            return self._run(state_io.find(self, ckpt_path, provided_model=model is not None), weights_only)

        return self._guarded(module, datamodule, TrainerFn.PREDICTING, run)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Save a checkpoint; every process must call this. Returns when it is committed.

        Raises:
            AttributeError: no module was run yet.
        """
        if self._module is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call "
                "`Trainer.save_checkpoint()` "
                "before calling `Trainer.{fit,validate,test,predict}`?"
            )
        checkpoint = state_io.dump(self, bool(weights_only))
        self.strategy.save_checkpoint(checkpoint, filepath, storage_options)

    def _model_for(self, model: LightningModule | None, fn: str) -> LightningModule:
        if model is None and self._module is None:
            raise TypeError(f"`Trainer.{fn}()` requires a `LightningModule` when it hasn't been passed in a previous run")
        return model if model is not None else self.lightning_module

    # -- one run ---------------------------------------------------------------------------------------------------

    def _guarded(
        self, model: LightningModule, datamodule: LightningDataModule | None, fn: TrainerFn, run: Callable[[], Any]
    ) -> Any:
        """Attach the model, run, and see to it that an exception leaves everything in order."""
        module = getattr(model, "_orig_mod", model)  # torch.compile'd modules: XLA compiles them
        if not isinstance(module, LightningModule):
            raise TypeError(f"`Trainer.{fn.value}()` requires a `LightningModule`, got: {type(model).__qualname__}")
        if self.state.status == TrainerStatus.RUNNING:
            raise RuntimeError(f"Trainer.{fn.value}() was called while this Trainer runs; make another Trainer")
        self._module = module
        module.trainer = self
        self.datamodule = datamodule
        if datamodule is not None:
            datamodule.trainer = self
        self.state.fn = fn
        self.state.status = TrainerStatus.RUNNING
        try:
            return run()
        except KeyboardInterrupt as interrupt:
            rank_zero_info("\nDetected KeyboardInterrupt, attempting graceful shutdown ...")
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._interrupt(interrupt)
            sys.exit(1)
        except BaseException as exception:
            self._interrupt(exception)
            raise

    def _interrupt(self, exception: BaseException) -> None:
        self.state.status = TrainerStatus.INTERRUPTED
        try:
            call.callback_hooks(self, "on_exception", exception)
            for logger in self._loggers:
                logger.finalize("failed")
        finally:
            self._release()
            self.state.stage = None

    def _run(self, ckpt_path: str | None, weights_only: bool | None) -> Any:
        module = self.lightning_module
        self.ckpt_path = ckpt_path
        self._callback_metrics, self._logged_metrics, self._progress_bar_metrics = {}, {}, {}
        attachments.attach_module_callbacks(self, module)
        attachments.check_module(self, module)
        self._transfer_hooks = self._overridden_transfer_hooks()
        self._prepare_data()
        call.setup_hooks(self)
        call.module_hook(self, "configure_model")
        checkpoint = None if ckpt_path is None else state_io.load(self, ckpt_path, weights_only)
        if checkpoint is not None:
            state_io.restore_modules(self, checkpoint)
        with contextlib.ExitStack() as self._running:
            self._start_executor()
            return self._run_placed(checkpoint)

    def _overridden_transfer_hooks(self) -> list[str]:
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        owners = (self.lightning_module, self.datamodule)
        return [name for name in names if any(call.is_overridden(name, owner) for owner in owners)]

    def _run_placed(self, checkpoint: Mapping[str, Any] | None) -> Any:
        fitting = self.state.fn == TrainerFn.FITTING
        if fitting:
            self._setup_optimizers()
            call.hooks(self, "on_fit_start")
        self._log_hyperparameters()
        if fitting and checkpoint is not None:
            state_io.restore_training(self, checkpoint)
        try:
            results = self._run_stage()
        finally:
            self._report()  # of a run that was stopped or failed too
        self._release()
        if fitting:
            call.hooks(self, "on_fit_end")
        call.teardown_hooks(self)
        for logger in self._loggers:
            logger.finalize("success")
        self.state.status = TrainerStatus.FINISHED
        self.state.stage = None
        return results

    def _run_stage(self) -> Any:
        self.strategy.barrier("run-stage")
        fn = self.state.fn
        if fn == TrainerFn.PREDICTING:
            return self.predict_loop.run()
        if fn in (TrainerFn.VALIDATING, TrainerFn.TESTING):
            loop = self.validate_loop if fn == TrainerFn.VALIDATING else self.test_loop
            if loop.limit == 0:
                return []
            results = loop.run()
            if loop.verbose and self.is_global_zero:
                attachments.print_results(results, loop.name)
            return results
        self._sanity_check()
        self.state.stage = RunningStage.TRAINING
        self.fit_loop.run()
        return None

    def _sanity_check(self) -> None:
        loop = self.validate_loop
        if not self.enable_validation or self.num_sanity_val_steps == 0 or self.fit_loop.progress.total_batch > 0:
            if self.enable_validation:
                loop.setup_data()
            return
        self.state.stage = RunningStage.SANITY_CHECKING
        with isolate_rng():
            call.callback_hooks(self, "on_sanity_check_start")
            loop.run()
            call.callback_hooks(self, "on_sanity_check_end")
        self._callback_metrics, self._logged_metrics, self._progress_bar_metrics = {}, {}, {}
        loop.step_counts.clear()

    def _prepare_data(self) -> None:
        for owner in (self.datamodule, self.lightning_module):
            if owner is None or not call.is_overridden("prepare_data", owner):
                continue
            if self.is_global_zero or owner.prepare_data_per_node:
                owner.prepare_data()
        self.strategy.barrier("prepare_data")

    def _log_hyperparameters(self) -> None:
        if not self._loggers or not self.enable_autolog_hparams:
            return
        attachments.log_hyperparameters(self)

    def _report(self) -> None:
        assert self._steps is not None
        mesh = self.strategy.mesh
        counted = self._steps.log
        report.add_run(
            {
                "stage": self.state.fn.value if self.state.fn else None,
                "executor": self._steps.executor,
                "mesh_size": mesh.devices.size,
                "mesh": dict(mesh.shape),
                "processes": jax.process_count(),
                "platform": mesh.devices.flat[0].platform,
                "precision": self.precision,
                "variants": counted.variants,
                "fallback": self._fallback,
                "compile_s": round(counted.seconds, 3),
                "steps": counted.steps,
            }
        )

    # -- the model on the mesh -------------------------------------------------------------------------------------

    def _start_executor(self) -> None:
        """Decide how steps run (``XLATRAIN_EXECUTOR``), and place the model."""
        self._fallback = None
        wanted = executor_choice()
        fitting = self.state.fn == TrainerFn.FITTING
        if wanted == "eager":
            self._steps = self._eager_steps("XLATRAIN_EXECUTOR=eager")
        elif fitting and (reason := self._uncompilable()) is not None:
            self._must_fall_back(wanted, reason)
            self._steps = self._eager_steps(reason)
        else:
            self._steps = self._compiled_steps()
        self._running.enter_context(self._steps.running())

    def _uncompilable(self) -> str | None:
        """Why this module's training cannot be compiled whatever its step does, or None."""
        module = self.lightning_module
        if not module.automatic_optimization:
            return "automatic_optimization = False: manual optimization is not compiled in this version"
        if self._detect_anomaly and self.num_nodes == 1 and executor_choice() == "auto":
            return "detect_anomaly=True: operations are checked one by one, in plain torch"
        if call.is_overridden("backward", module):
            return (
                "LightningModule.backward is overridden, but in a compiled step the backward pass is part of the program; scale "
                "or transform the loss in training_step, or change gradients in on_after_backward"
            )
        return None

    def _compiled_steps(self) -> CompiledSteps:
        module = self.precision_plugin.convert_module(self.lightning_module)
        seed = self.strategy.broadcast(torch.initial_seed())
        model = ModelState(module, self.strategy.mesh, self.strategy.rules, seed)
        self.strategy.model = model
        services = StepServices(
            roots=self._effect_roots(),
            trace=TraceContext(live=model.live.traced_as, logging=self._recording, forward=self.precision_plugin.forward_context),
            convert=self.precision_plugin.convert_input,
            compiling=self._set_compiling,
        )
        return CompiledSteps(module, model, self.strategy.mesh, self._placer, services)

    def _eager_steps(self, reason: str) -> EagerSteps:
        if self.num_nodes > 1:
            raise MisconfigurationException(
                f"{reason}: the eager executor runs on one process, but {self.num_nodes} have joined; make the step compilable"
            )
        self._fallback = reason
        if self._detect_anomaly:
            self._running.enter_context(torch.autograd.set_detect_anomaly(True))
        self.precision_plugin.convert_module(self.lightning_module)
        return EagerSteps(self.precision_plugin)

    def _must_fall_back(self, wanted: str, reason: str) -> None:
        """Say once that steps run eagerly; an error where that was forbidden."""
        if wanted == "compiled":
            raise MisconfigurationException(f"XLATRAIN_EXECUTOR=compiled, but the step cannot be compiled: {reason}")
        rank_zero_warn(f"Steps run eagerly on one CPU, not compiled over the mesh. {reason}")

    def fall_back(self, error: BridgeError) -> None:
        """Go on eagerly after a step could not be compiled; nothing of that step has run.

        Raises:
            BridgeError: ``error`` itself, where only compiled steps are wanted, or several processes run.
        """
        if executor_choice() == "compiled" or self.num_nodes > 1 or not error.recoverable:
            raise error
        self._must_fall_back("auto", str(error))
        states = self.optimizer_states()
        model = self.strategy.model
        accumulated = {} if model is None else {name: to_torch(grad) for name, grad in model.state.accumulated.items()}
        self._release()
        if model is not None:
            for name, grad in accumulated.items():
                model.params[name].grad = grad
        self._steps = self._eager_steps(str(error).splitlines()[0])
        if self.state.fn == TrainerFn.FITTING:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
            self._functional = None
            self._wrap_optimizers()
            self.optimization = EagerOptimization(self, self._steps, self.optimizers)

    def _effect_roots(self) -> dict[str, Any]:
        roots: dict[str, Any] = {"self": self.lightning_module}
        roots.update({f"trainer.callbacks[{i}]": callback for i, callback in enumerate(self.callbacks)})
        if self.datamodule is not None:
            roots["trainer.datamodule"] = self.datamodule
        return roots

    @contextlib.contextmanager
    def _recording(self, recorder: LogRecorder, tracer: ScalarTracer) -> Iterator[None]:
        """While a step is captured: ``self.log`` is recorded, and counters are the tracer's."""
        self._recorder, self._tracer = recorder, tracer
        try:
            yield
        finally:
            self._recorder = self._tracer = None

    def _set_compiling(self, value: bool) -> None:
        self.compiling = value
        if (bar := self.progress_bar_callback) is not None:
            bar.show_compiling(value)

    def _setup_optimizers(self) -> None:
        module = self.lightning_module
        self._functional = None
        self.optimizers, self.lr_scheduler_configs = configure_optimizers(module, self)
        if len(self.optimizers) > 1 and module.automatic_optimization:
            raise MisconfigurationException(
                "Training with multiple optimizers is only supported with manual optimization. Remove the "
                "`optimizer_idx` argument from "
                "`training_step`, set `self.automatic_optimization = False` and access your optimizers in `training_step` with "
                "`opt1, opt2, ... = self.optimizers()`."
            )
        self._wrap_optimizers()
        if isinstance(self._steps, CompiledSteps):
            try:
                self._compile_optimizer(self._steps)
            except UnsupportedOptimizerError as error:
                self._must_fall_back(executor_choice(), str(error))
                self._release()
                self._wrap_optimizers()
                self._steps = self._eager_steps(str(error))
        if isinstance(self._steps, EagerSteps):
            self.optimization = EagerOptimization(self, self._steps, self.optimizers)

    def _wrap_optimizers(self) -> None:
        self.strategy.optimizers = self.optimizers
        self.strategy._lightning_optimizers = [
            one if isinstance(one, LightningOptimizer) else LightningOptimizer(one) for one in self.optimizers
        ]

    def _compile_optimizer(self, steps: CompiledSteps) -> None:
        model = steps.model
        if self.optimizers:
            names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.params.items()}
            self._functional = FunctionalOptimizer.from_torch(self.optimizers[0], names)
            model.add_optimizer(self._functional.init)
            if self.optimizers[0].state:
                model.load_optimizer(self._functional.import_state)
        else:
            model.add_optimizer(lambda params: {})
        if self.precision_plugin.scaler is not None:
            model.scale_loss(self.precision_plugin.scaler.init())
        self.optimization = AutomaticOptimization(self, steps, self.optimizers[0] if self.optimizers else None, self._functional)

    def optimizer_states(self) -> list[dict[str, Any]]:
        """``state_dict()`` of each optimizer, with the state that is on the mesh."""
        if self._functional is None or self.strategy.model is None:
            return [optimizer.state_dict() for optimizer in self.optimizers]
        return [self._functional.export_state(self.strategy.model.state.opt_state)]

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizers the state of a checkpoint, on the mesh."""
        if len(states) != len(self.optimizers):
            raise MisconfigurationException(
                f"the checkpoint has the state of {len(states)} optimizers, configure_optimizers returned {len(self.optimizers)}"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(dict(state))
        if self._functional is not None and self.strategy.model is not None:
            self.strategy.model.load_optimizer(self._functional.import_state)

    def loss_scale_state(self) -> dict[str, Any]:
        """State of dynamic loss scaling, as ``torch.amp.GradScaler`` has it; empty without."""
        scaler, model = self.precision_plugin.scaler, self.strategy.model
        if scaler is None or model is None or not model.state.loss_scale:
            return {}
        return scaler.state_dict(jax.tree.map(host_value, model.state.loss_scale))

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        """Continue the loss scaling of a checkpoint."""
        if self.precision_plugin.scaler is not None and self.strategy.model is not None:
            self.precision_plugin.scaler, loss_scale = LossScaler.from_state_dict(state)
            self.strategy.model.scale_loss(loss_scale)

    def random_state(self) -> dict[str, Any]:
        """The streams of compiled steps, and torch's host generator."""
        model = self.strategy.model
        if model is None:
            return {}
        return {
            "key": np.asarray(model.state.key.addressable_data(0)).tolist(),
            "draws": int(model.state.draws.addressable_data(0)),
            "torch_rng": torch.get_rng_state(),
        }

    def load_random_state(self, state: Mapping[str, Any]) -> None:
        """Continue the random streams of a checkpoint."""
        model = self.strategy.model
        if model is not None and state:
            model.set_streams(state["key"], state["draws"])
            torch.set_rng_state(state["torch_rng"])

    def _release(self) -> None:
        """Give the module ordinary host tensors again, and forget what is on the mesh."""
        model = self.strategy.model
        if model is None:
            self.strategy.teardown()
            return
        if self._functional is not None:
            with contextlib.suppress(RuntimeError):  # deleted arrays after an error inside a step
                self._functional.export_state(model.state.opt_state)
        model.release()
        self.strategy.teardown()

    # -- what the loops ask for ------------------------------------------------------------------------------------

    def batches(self, loader: Any, what: str) -> Iterator[Any]:
        """The batches of ``loader``; on several processes all must have the same number."""
        if self._steps is not None:
            self._steps.copy_batches = self._may_change_batches(loader)
        return lockstep(loader, what)

    def _may_change_batches(self, loader: Any) -> bool:
        """Whether a batch may be overwritten while its step still runs: by a loader that reuses memory, or by a user's hook."""
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return True
        own = [callback for callback in self.callbacks if not type(callback).__module__.startswith("torch_compat.")]
        hooks = [f"on_{stage}_batch_end" for stage in ("train", "validation", "test", "predict")]
        return any(call.is_overridden(hook, owner) for hook in hooks for owner in (self.lightning_module, *own))

    def transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The three transfer hooks, on this process's rows."""
        for name in self._transfer_hooks:
            extra = (self.strategy.root_device,) if name == "transfer_batch_to_device" else ()
            batch = call.data_source_hook(self, name, batch, *extra, dataloader_idx)
        return batch

    def call_step(self, name: str, batch: Any, *indices: Any) -> Any:
        """Call the module's step with the batch and as many of the indices as it accepts."""
        return call.module_hook(self, name, *call.step_arguments(self.lightning_module, name, batch, indices))

    def counters(self, batch_idx: int) -> dict[str, int]:
        """The loop's counters, as captured steps know them."""
        progress = self.fit_loop.progress
        return {"batch_idx": batch_idx, "current_epoch": progress.epoch, "global_step": progress.global_step}

    def run_evaluation_step(self, name: str, batch: Any, indices: tuple[int, ...]) -> StepOutcome:
        """One validation, test or predict step."""
        batch_idx, *rest = indices

        def run() -> StepOutcome:
            steps = self._steps
            assert steps is not None
            placed = steps.place(batch)
            if self._results is not None:
                self._results.batch_size = placed.size
            if isinstance(steps, EagerSteps):
                return steps.evaluate(name, placed, lambda real: self.call_step(name, real, *indices))  # pyright: ignore[reportArgumentType]

            def step(traced: Any, tracer: ScalarTracer) -> Any:
                return self.call_step(name, traced, tracer.counter("batch_idx"), *rest)

            return steps.evaluate(name, placed, tuple(rest), self.counters(batch_idx), step)  # pyright: ignore[reportArgumentType]

        try:
            return run()
        except BridgeError as error:
            self.fall_back(error)
            return run()

    def run_training_step(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """One training batch: gradients, and the update if ``stepped``."""
        try:
            outcome = self.optimization.run(batch, batch_idx, stepped)
        except BridgeError as error:
            self.fall_back(error)
            outcome = self.optimization.run(batch, batch_idx, stepped)
        if self._detect_anomaly and np.isnan(np.asarray(outcome.packed)).any():
            raise RuntimeError(
                f"detect_anomaly: the loss or a logged value of batch {batch_idx} of epoch {self.current_epoch} is NaN. "
                "To see which "
                "operation made it, run on one process without XLATRAIN_EXECUTOR=compiled"
            )
        return outcome


def executor_choice() -> str:
    """``XLATRAIN_EXECUTOR``: ``auto`` (compiled, eager where that is impossible), ``compiled`` or ``eager``.

    Raises:
        MisconfigurationException: another value.
    """
    choice = os.environ.get("XLATRAIN_EXECUTOR", "auto")
    if choice not in ("auto", "compiled", "eager"):
        raise MisconfigurationException(f"XLATRAIN_EXECUTOR={choice!r}; expected 'auto', 'compiled' or 'eager'")
    return choice


def _loaders(source: DataSource) -> Any:
    return None if source.combined is None else source.combined.iterables


def _datamodule(loaders: Any, datamodule: Any, others: Any, fn: str) -> tuple[Any, LightningDataModule | None]:
    """Loaders and datamodule; a datamodule may be passed as loaders."""
    if isinstance(loaders, LightningDataModule):
        return None, loaders
    if (loaders is not None or others is not None) and datamodule is not None:
        raise MisconfigurationException(
            f"You cannot pass dataloaders and a datamodule to `Trainer.{fn}` at once; pass one of them"
        )
    return loaders, datamodule
