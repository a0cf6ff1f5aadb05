"""The Trainer. API: ``lightning.pytorch.Trainer`` 2.6."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch_compat.accelerators import Accelerator
from torch_compat.callbacks.callback import Callback
from torch_compat.checkpoint.torch_load import patch_torch_load
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.loggers.logger import Logger
from torch_compat.profilers import Profiler
from torch_compat.run import eras
from torch_compat.run.profiling import action, make_profiler
from torch_compat.run.states import RunningStage, TrainerFn, TrainerState
from torch_compat.run.tracebacks import short_tracebacks
from torch_compat.step.dispatcher import StepDispatcher
from torch_compat.stock_names.removed_arguments import OF_EVALUATION, OF_FIT, OF_TRAINER, naming_removed_arguments
from torch_compat.strategies import Strategy
from torch_compat.strategies.on_device import DeviceStrategy
from torch_compat.trainer import arguments, attachments, restarts, state_io
from torch_compat.trainer.accounting import RunTime
from torch_compat.trainer.argument_types import PluginInput, PrecisionInput
from torch_compat.trainer.counters import LoopCounters
from torch_compat.trainer.data.data_source import loaders_and_datamodule
from torch_compat.trainer.devices import find_devices
from torch_compat.trainer.evaluation_loop import EvaluationLoop
from torch_compat.trainer.fit_loop import FitLoop
from torch_compat.trainer.metric_log import MetricLog
from torch_compat.trainer.prediction_loop import PredictionLoop
from torch_compat.trainer.preemption import Preemption
from torch_compat.trainer.properties import TrainerProperties
from torch_compat.trainer.resolve import resolve
from torch_compat.trainer.run import run
from torch_compat.trainer.stock_names import refuse_private_trainer_methods
from torch_compat.utilities.argparse import _defaults_from_env_vars
from torch_compat.utilities.types import LRSchedulerConfig
from torch_compat.utilities.wide_types import wide_types
from xlatrain.checkpoint import Claim

if TYPE_CHECKING:
    from xlatrain.step.jax_module import JaxModule


class Trainer(TrainerProperties):
    """Runs a LightningModule: fits, validates, tests, predicts, compiled by XLA over a device mesh.

    Every argument of Lightning 2.6's Trainer is here with its default and meaning; what an XLA mesh has no use for is refused by
    name. See ``docs/lightning_compat.md`` for each.

    ::

        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=8, strategy="fsdp")
        trainer.fit(module, loader)
        trainer.save_checkpoint("last.ckpt")

    Args:
        accelerator: ``"auto"`` (what JAX finds), ``"cpu"``, ``"gpu"``/``"cuda"``, ``"tpu"``, or an accelerator object.
        strategy: ``"auto"``, ``"ddp"``, ``"fsdp"``, ``"mesh"``, or a strategy object.
        devices: devices per process: a number, indices, or ``"auto"``/-1 for all.
        num_nodes: number of processes that must have joined.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-mixed"``, ``"16-true"``, ``"64-true"``;
            ``"int8-mixed"``, ``"float8-mixed"``, ``"transformer-engine"``: linear layers multiply in eight bits.
        logger: a logger or several; True, the default: TensorBoard's, or CSV files where it is not installed; False: none.
        callbacks: a callback or several.
        fast_dev_run: run that many batches of each stage (True: one), without loggers and checkpoints.
        max_epochs: epochs to train at most; -1: no limit. Default: 1000, unless ``max_steps`` is given.
        min_epochs: epochs to train at least, whatever asks to stop.
        max_steps: optimizer steps at most; -1: no limit.
        min_steps: optimizer steps at least, whatever asks to stop.
        max_time: time to train at most: ``"DD:HH:MM:SS"``, a timedelta, or its arguments in a dict.
        limit_train_batches: training batches of an epoch: a number, or a fraction as a float.
        limit_val_batches: validation batches of each loader: a number, or a fraction as a float.
        limit_test_batches: test batches of each loader: a number, or a fraction as a float.
        limit_predict_batches: prediction batches of each loader: a number, or a fraction as a float.
        overfit_batches: train and validate on these training batches only: a number, or a fraction as a float.
        val_check_interval: when to validate: after a fraction of an epoch (float), a number of batches, or a time.
        check_val_every_n_epoch: validate after every n-th epoch; None: count ``val_check_interval`` across epochs.
        num_sanity_val_steps: validation batches to run before training; -1: all. Default: 2.
        log_every_n_steps: training steps between two rows of the loggers. Default: 50.
        enable_checkpointing: save checkpoints where no callback is given that does. Default: True.
        enable_progress_bar: show a progress bar. Default: True.
        enable_model_summary: print a summary of the module's layers. Default: True.
        accumulate_grad_batches: batches whose gradients are summed before each optimizer step.
        gradient_clip_val: the limit of the gradients' norm or values; None: no clipping.
        gradient_clip_algorithm: ``"norm"`` (default) or ``"value"``.
        deterministic: use deterministic algorithms only; ``"warn"``: warn where there is none.
        benchmark: accepted and told: XLA tunes kernels when it compiles.
        inference_mode: evaluate without gradients; False: under ``torch.no_grad``.
        use_distributed_sampler: let each process load its part of the batches; False: the loaders divide the data themselves.
        profiler: ``"simple"``, ``"advanced"``, ``"xla"`` or a :class:`~torch_compat.profilers.Profiler`; see ``self.profiler``.
        detect_anomaly: run eagerly under torch's anomaly detection, which names the line where a NaN came up.
        barebones: leave out all that costs time beside the steps: logging, checkpoints, bar, summary, sanity check.
        plugins: precision, checkpoint, cluster-environment or layer-sync plugins.
        sync_batchnorm: batch norm over the global batch, which a mesh does in any case.
        reload_dataloaders_every_n_epochs: make the loaders anew after that many epochs; 0: never.
        default_root_dir: folder of logs and checkpoints that have no other. Default: the current one.
        enable_autolog_hparams: write hyperparameters to the loggers as a run begins.
        model_registry: refused: a model registry is a service of Lightning's.

    Raises:
        MisconfigurationException: an argument of a wrong kind, or arguments that contradict each other.
    """

    @naming_removed_arguments(OF_TRAINER)
    @_defaults_from_env_vars
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: PrecisionInput | None = None,
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
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: PluginInput | list[PluginInput] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        given = dict(locals())
        given.pop("self")
        refuse_private_trainer_methods(self)
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
        self._default_root_dir = os.getcwd() if default_root_dir is None else os.path.expanduser(os.fspath(default_root_dir))

        self.strategy: Strategy
        self.strategy, chosen_precision = resolve(
            strategy, accelerator, devices, num_nodes, precision, plugins, sync_batchnorm=bool(sync_batchnorm)
        )
        self._wide = chosen_precision.needs_x64
        self.state = TrainerState()
        self.should_stop = False
        self.received_sigterm = False
        self.preemption: Preemption | None = None
        self._ckpt_path: str | None = None
        self._manages_ckpt_path = False
        self._found_ckpt_path = False  # it was found among what this run's earlier starts saved, not named by the user
        self._claims: list[Claim] = []  # to the directories that this run writes checkpoints to
        self._fit_number = 0  # in this process, where a run may be started again
        self.datamodule: LightningDataModule | None = None  # the last that a run was given
        self.run_datamodule: LightningDataModule | None = None  # of the current or last run
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self._module: LightningModule | None = None
        self.era: Any = None  # the run's hooks of eras 1.3 to 1.6, where it has objects of theirs
        self.executor = StepDispatcher(self)
        self.run_time = RunTime()  # of the current or last run
        self._announced = ""  # how its steps run, as it was said
        self.metric_log = MetricLog(self)
        self.transfer: Callable[[Any, int], Any]

        self.fit_loop = FitLoop(self, min_epochs, options.max_epochs, min_steps, options.max_steps)
        self.loop_counters = LoopCounters(self)
        self.validate_loop = EvaluationLoop(self, "validation", "val")
        self.test_loop = EvaluationLoop(self, "test", "test")
        self.predict_loop = PredictionLoop(self)
        self._loggers = attachments.make_loggers(options.logger, self._default_root_dir)
        self.callbacks: list[Callback] = attachments.make_callbacks(callbacks, options)
        self.profiler: Profiler = make_profiler(profiler)
        eras.init_hooks(self)

    def __repr__(self) -> str:
        state = self.state
        run = f"{state.fn.value} {state.status.value}, global_step {self.global_step}" if state.fn else "nothing has run"
        return f"<{type(self).__name__}: {self.strategy!r}, precision {self.precision}; {run}>"

    def __getstate__(self) -> dict[str, Any]:
        # What is copied or sent to another process leaves compiled programs and arrays behind, and knows where it ran.
        state = {name: value for name, value in vars(self).items() if name not in ("executor", "transfer", "preemption")}
        return {**state, "_ran_on": self._devices_to_find()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        wanted = state.pop("_ran_on")
        vars(self).update(state)
        self.executor, self.preemption = StepDispatcher(self), None
        if wanted is not None and not self.strategy.has_devices:
            self.strategy.take_devices(find_devices(*wanted))

    def _devices_to_find(self) -> tuple[str, int, int] | None:
        """Platform, devices of a process and processes; None for a strategy that finds its devices itself."""
        if self.strategy.launcher is not None or isinstance(self.strategy, DeviceStrategy) or not self.strategy.has_devices:
            return None
        return self.strategy.mesh.devices.flat[0].platform, self.num_devices, self.num_nodes

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on process 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make modules inside without spending memory: ``with trainer.init_module(): model = Model()``.

        ::

            with trainer.init_module():
                module = BoringModel()

        Parameters have the dtype of the precision, and get their values directly on their shards when the model is run.

        Args:
            empty_init: leave out the functions of ``torch.nn.init``, for a model whose checkpoint is loaded next.
        """
        with wide_types(self._wide), self.strategy.model_sharded_context(), self.strategy.tensor_init_context(empty_init):
            yield

    # -- public functions ------------------------------------------------------------------------------------------

    @short_tracebacks
    @naming_removed_arguments(OF_FIT)
    def fit(
        self,
        model: LightningModule | JaxModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train ``model``.

        ::

            trainer.fit(module, loader, val_dataloaders=loader)

        Args:
            model: the module.
            train_dataloaders: loaders, or a datamodule; default: the module's hook.
            val_dataloaders: loaders for validation.
            datamodule: gives all loaders.
            ckpt_path: continue from this checkpoint: a path, ``"last"``, ``"best"``, or ``"auto"``: the newest complete one
                of this run's directories, or from the beginning if there is none.
            weights_only: False unpickles whatever the checkpoint holds: only for checkpoints that you trust.
        """
        train_dataloaders, datamodule = loaders_and_datamodule(train_dataloaders, datamodule, val_dataloaders, "fit")

        def prepare() -> str | None:
            self.fit_loop.set_epoch_limits()
            self.should_stop = False
            self.state.stage = RunningStage.TRAINING
            self.fit_loop.forget_results()
            self._take_loaders(train=train_dataloaders, val=val_dataloaders)
            self.validate_loop.step_counts.clear()
            return state_io.find(self, ckpt_path, provided_model=True)

        run(self, model, datamodule, TrainerFn.FITTING, prepare, weights_only)

    @short_tracebacks
    @naming_removed_arguments(OF_EVALUATION)
    def validate(
        self,
        model: LightningModule | JaxModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Run a pass over the validation set; the epoch's metrics, a dict for each loader.

        ::

            loss = trainer.validate(module, loader)[0]["val_loss"]
        """
        return self._evaluate(
            TrainerFn.VALIDATING, self.validate_loop, model, dataloaders, ckpt_path, verbose, datamodule, weights_only
        )

    @short_tracebacks
    @naming_removed_arguments(OF_EVALUATION)
    def test(
        self,
        model: LightningModule | JaxModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Run a pass over the test set; the epoch's metrics, a dict for each loader.

        ::

            loss = trainer.test(module, loader)[0]["test_loss"]
        """
        return self._evaluate(TrainerFn.TESTING, self.test_loop, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def _evaluate(
        self,
        fn: TrainerFn,
        loop: EvaluationLoop,
        model: LightningModule | JaxModule | None,
        dataloaders: Any,
        ckpt_path: str | Path | None,
        verbose: bool,
        datamodule: LightningDataModule | None,
        weights_only: bool | None,
    ) -> list[Mapping[str, float]]:
        dataloaders, datamodule = loaders_and_datamodule(dataloaders, datamodule, None, fn.value)
        module = self._model_for(model, fn.value)
        loop.verbose = verbose

        def prepare() -> str | None:
            self.state.stage = RunningStage.VALIDATING if fn == TrainerFn.VALIDATING else RunningStage.TESTING
            loop.forget_results()
            self._take_loaders(**{loop.source.prefix: dataloaders})
            loop.step_counts.clear()
            return state_io.find(self, ckpt_path, provided_model=model is not None)

        return run(self, module, datamodule, fn, prepare, weights_only)

    def predict(
        self,
        model: LightningModule | JaxModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Run a prediction pass; a list of ``predict_step``'s outputs (this process's rows), or a list for each loader.

        ::

            outputs = torch.cat(trainer.predict(module, loader))
        """
        dataloaders, datamodule = loaders_and_datamodule(dataloaders, datamodule, None, "predict")
        module = self._model_for(model, "predict")

        def prepare() -> str | None:
            self.state.stage = RunningStage.PREDICTING
            self.predict_loop.set_return_predictions(return_predictions)
            self._take_loaders(predict=dataloaders)
            return state_io.find(self, ckpt_path, provided_model=model is not None)

        return run(self, module, datamodule, TrainerFn.PREDICTING, prepare, weights_only)

    def _take_loaders(self, **given: Any) -> None:
        """Forget the loaders of the run before; ``given`` are those that this one was passed, by stage."""
        for loop in (self.fit_loop, self.validate_loop, self.test_loop, self.predict_loop):
            loop.source.reset(given.get(loop.source.prefix))

    def preflight(
        self,
        model: LightningModule | JaxModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        *,
        topology: str,
        num_slices: int = 1,
        **options: Any,
    ) -> Any:
        """Compile the first steps of ``fit`` for a pod that is not here, e.g. ``topology="v5e:16x16"``; nothing is run.

        See :func:`torch_compat.preflight.preflight` for the other arguments, and for what it raises.

        ::

            trainer = pl.Trainer(accelerator="cpu", devices=8, strategy="fsdp")
            report = trainer.preflight(module, loader, topology="cpu:8")
            assert report.fits

        Returns:
            An :class:`xlatrain.preflight.report.Report`: whether it fits, bytes per chip, collectives, an estimate of the time.
        """
        from torch_compat.preflight import preflight

        given = (self, model, train_dataloaders, val_dataloaders, datamodule)
        return preflight(*given, topology=topology, num_slices=num_slices, **options)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Save a checkpoint; every process must call this. Returns when it is committed.

        ::

            trainer.fit(module, loader)
            trainer.save_checkpoint("last.ckpt")

        Raises:
            AttributeError: no module was run yet.
        """
        if self._module is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer, which "
                "`fit`, `validate`, `test` and `predict` do: call one of them first, or `trainer.strategy.connect(model)`."
            )
        with wide_types(self._wide), self.run_time.account.span("save"), action(self, "save_checkpoint"):
            checkpoint = state_io.dump(self, bool(weights_only))
            self.strategy.save_checkpoint(checkpoint, filepath, storage_options)
        if not weights_only:
            restarts.note(self, filepath)

    def _model_for(self, model: LightningModule | JaxModule | None, fn: str) -> LightningModule | JaxModule:
        if model is None and self._module is None:
            raise TypeError(f"`Trainer.{fn}()` requires a `LightningModule` when it hasn't been passed in a previous run")
        return model if model is not None else self.lightning_module
