"""A run: a call of ``fit``, ``validate``, ``test`` or ``predict``, from its module's hooks to their teardown."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.device_backends.dispatcher import DeviceStepDispatcher
from torch_compat.run import eras, profiling, report
from torch_compat.run import hook_calls as call
from torch_compat.run.first_error import run_all
from torch_compat.run.profiling import profiled_hook
from torch_compat.run.states import RunningStage, TrainerFn, TrainerStatus
from torch_compat.step.device_memory import explained_shortage
from torch_compat.step.dispatcher import StepDispatcher
from torch_compat.step.update.several_optimizers import refuse_optimizer_idx
from torch_compat.strategies.on_device import DeviceStrategy
from torch_compat.trainer import attachments, state_io
from torch_compat.trainer.accounting import RunTime
from torch_compat.trainer.agreement import check_same_run
from torch_compat.trainer.jax_modules import advice_on, check_run, jax_host, lightning_module
from torch_compat.trainer.preemption import Preempted, around_training, listening, save_and_end
from torch_compat.trainer.results_table import print_results
from torch_compat.trainer.spawned_run import run_spawned
from torch_compat.utilities.device_transfer import convert_tensors_to_scalars
from torch_compat.utilities.exceptions import MisconfigurationException, _TunerExitException
from torch_compat.utilities.parsing import clean_namespace
from torch_compat.utilities.rank_zero import rank_zero_info
from torch_compat.utilities.seed import isolate_rng
from torch_compat.utilities.wide_types import wide_types
from xlatrain.cluster import distributed, watch
from xlatrain.cluster.distributed.objects import TIMEOUT_S
from xlatrain.host.host_memory import given_limit

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer
    from xlatrain.step.jax_module import JaxModule


def run(
    trainer: Trainer,
    model: LightningModule | JaxModule,
    datamodule: LightningDataModule | None,
    fn: TrainerFn,
    prepare: Callable[[], str | None],
    weights_only: bool | None,
) -> Any:
    """Run ``model``, and leave everything in order after an exception, too.

    Args:
        prepare: sets stage and loaders, and gives the path of the checkpoint to start from, or None.
        weights_only: how it is read.

    Raises:
        TypeError: ``model`` is no LightningModule.
        RuntimeError: this Trainer runs already.
    """
    module = lightning_module(getattr(model, "_orig_mod", model))  # torch.compile'd modules: XLA compiles them
    if not isinstance(module, LightningModule):
        raise TypeError(
            f"`model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got `{type(model).__qualname__}`"
            f"{advice_on(model)}"
        )
    if trainer.state.status == TrainerStatus.RUNNING:
        raise RuntimeError(f"Trainer.{fn.value}() was called while this Trainer runs; make another Trainer")
    if trainer.strategy.launcher is not None:
        found = run_spawned(trainer, module, datamodule, fn, prepare(), weights_only)
        if (host := jax_host(module)) is not None:
            host.sync_whole()
        return found
    attach(trainer, module, datamodule)
    trainer.state.fn = fn
    trainer.state.status = TrainerStatus.RUNNING
    trainer.run_time = RunTime()
    claims, trainer._claims = trainer._claims, []
    try:
        fits = fn == TrainerFn.FITTING
        with (
            wide_types(trainer._wide),
            around_training(trainer) if fits else contextlib.nullcontext(),
            watch.armed(getattr(trainer.strategy, "timeout_s", TIMEOUT_S)),  # a strategy of the user's own may have none
        ):
            return _run(trainer, prepare(), weights_only)
    except _TunerExitException:
        return _leave(trainer)
    except KeyboardInterrupt as interrupt:
        rank_zero_info(
            "\nDetected KeyboardInterrupt, attempting graceful shutdown: workers are ended, hooks and loggers are told"
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _interrupt(trainer, interrupt)
        sys.exit(1)
    except BaseException as exception:
        _interrupt(trainer, exception)
        raise
    finally:
        ours, trainer._claims = trainer._claims, claims
        host = jax_host(module)
        run_all([*([] if host is None else [host.sync_whole]), *[claim.release for claim in ours]], sys.exception())


def attach(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Let Trainer, module and datamodule know each other."""
    trainer._module = module
    module.trainer = trainer
    trainer.run_datamodule = datamodule
    if datamodule is not None:  # one of a run before stays, as in stock: it is set up again, its loaders are not used
        trainer.datamodule = datamodule
        datamodule.trainer = trainer
    trainer.executor = (DeviceStepDispatcher if isinstance(trainer.strategy, DeviceStrategy) else StepDispatcher)(trainer)
    if isinstance(module.hparams, MutableMapping):
        clean_namespace(module.hparams)
    trainer.strategy.connect(module)


def _leave(trainer: Trainer) -> None:
    """End a run that only a tuner wanted."""
    _teardown(trainer)
    _take_leave(trainer)
    trainer.profiler.teardown(stage=None if trainer.state.fn is None else trainer.state.fn.value)
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None


def _interrupt(trainer: Trainer, exception: BaseException) -> None:
    trainer.state.status = TrainerStatus.INTERRUPTED
    trainer.run_time.end(trainer, f"ended by {type(exception).__name__}")
    with contextlib.suppress(Exception):  # values that earlier steps logged outlive the run, if they can still be read
        trainer.metric_log.interrupt()
    try:
        call.on_exception(trainer, exception)
        trainer.strategy.on_exception(exception)
        for logger in trainer.loggers:
            logger.finalize("failed")
    finally:
        stage = trainer.state.fn.value if trainer.state.fn else None
        run_all([functools.partial(trainer.profiler.teardown, stage=stage)], exception)
        _teardown(trainer, exception)
        if not isinstance(exception, KeyboardInterrupt):
            trainer.state.stage = None


def set_up(trainer: Trainer) -> None:
    """The hooks of a run up to ``configure_model``; nothing is placed."""
    attachments.attach_module_callbacks(trainer)
    attachments.let_callbacks_log(trainer)
    attachments.check_module(trainer, trainer.lightning_module)
    check_run(trainer, trainer.lightning_module)
    eras.refuse_removed_hooks(trainer.lightning_module, str(getattr(trainer.state.fn, "value", "")))
    trainer.era = eras.hooks_of_run(trainer)
    if trainer.state.fn == TrainerFn.FITTING:
        refuse_optimizer_idx(trainer)
    trainer.transfer = call.TransferHooks(trainer)
    strategy = trainer.strategy
    _prepare_data(trainer)
    call.old_hooks(trainer, "on_before_accelerator_backend_setup")
    strategy.setup_environment()
    if profiling.records(trainer):
        assert trainer.state.fn is not None
        process = trainer.node_rank if trainer.num_nodes > 1 else None
        trainer.profiler.setup(stage=trainer.state.fn.value, local_rank=process, log_dir=trainer.log_dir)
    call.setup_hooks(trainer)
    call.configure_model(trainer)


def _run(trainer: Trainer, ckpt_path: str | None, weights_only: bool | None) -> Any:
    set_up(trainer)
    trainer._ckpt_path = ckpt_path
    check_same_run(trainer)
    report.check_path()
    given_limit()
    strategy = trainer.strategy
    checkpoint = None if ckpt_path is None else state_io.load(trainer, ckpt_path, weights_only)
    if checkpoint is not None and not strategy.restore_checkpoint_after_setup:
        state_io.restore_modules(trainer, checkpoint)
    with trainer.executor.running(), explained_shortage(trainer):
        _apply_layer_sync(trainer)
        strategy.setup(trainer)
        trainer.executor.start()  # a strategy's own setup need not have
        return _run_placed(trainer, checkpoint)


def _apply_layer_sync(trainer: Trainer) -> None:
    sync = trainer.strategy.layer_sync
    if sync is not None and trainer.lightning_module is not sync.apply(trainer.lightning_module):
        raise MisconfigurationException(
            f"{type(sync).__name__}.apply returned another module: change the layers of the module that it is given, in place"
        )


def _prepare_data(trainer: Trainer) -> None:
    for owner in (trainer.datamodule, trainer.lightning_module):
        if owner is None or not call.is_overridden("prepare_data", owner):
            continue
        if trainer.is_global_zero or (owner.prepare_data_per_node and distributed.world().local_process_id == 0):
            profiled_hook(trainer, owner, "prepare_data")()
    trainer.strategy.barrier("prepare_data")


def _run_placed(trainer: Trainer, checkpoint: dict[str, Any] | None) -> Any:
    """The rest of a run, once the model is on the mesh."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    trainer.metric_log.clear()
    if fitting:
        call.hooks(trainer, "on_fit_start")
        call.old_hooks(trainer, "on_pretrain_routine_start")
    if trainer.loggers and trainer.enable_autolog_hparams:
        attachments.log_hyperparameters(trainer)
    trainer.strategy.pre_dispatch(trainer)
    if fitting:
        trainer.executor.setup_optimizers()  # a strategy's own setup need not have
        trainer.executor.is_set_up = True
    if checkpoint is not None and trainer.strategy.restore_checkpoint_after_setup:
        state_io.restore_modules(trainer, checkpoint)
    if fitting and checkpoint is not None:
        state_io.restore_training(trainer, checkpoint)
    if fitting:
        call.old_hooks(trainer, "on_pretrain_routine_end")
    try:
        results = trainer.strategy.run_stage(trainer, functools.partial(_run_stage, trainer))
    except BaseException as exception:
        run_all([functools.partial(_report, trainer)], exception)  # of a run that was stopped or failed too
        raise
    _report(trainer)
    _teardown(trainer)
    if fitting:
        call.hooks(trainer, "on_fit_end")
    _take_leave(trainer)
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None
    trainer.run_time.end(trainer, "finished")
    return results


def _take_leave(trainer: Trainer) -> None:
    """Tell hooks, the profiler and loggers that a run has ended well."""
    call.teardown_hooks(trainer)
    if profiling.records(trainer):
        trainer.profiler.describe()
    for logger in trainer.loggers:
        logger.finalize("success")


def _teardown(trainer: Trainer, failed: BaseException | None = None) -> None:
    """Give the module ordinary tensors again, and let the loaders' workers and the strategy go.

    Args:
        trainer: whose run is over.
        failed: the error that has ended it.
    """
    parts = [
        trainer.fit_loop.data.close,
        functools.partial(trainer.executor.release, failed=failed is not None),
        trainer.strategy.teardown,
    ]
    if (sync := trainer.strategy.layer_sync) is not None:
        parts.append(functools.partial(sync.revert, trainer.lightning_module))
    run_all(parts, failed)


def _run_stage(trainer: Trainer) -> Any:
    trainer.strategy.barrier("run-stage")
    trainer.lightning_module.zero_grad()  # of a run before, as stock does
    fn = trainer.state.fn
    assert fn is not None
    if fn == TrainerFn.PREDICTING:
        return trainer.predict_loop.run()
    if fn in (TrainerFn.VALIDATING, TrainerFn.TESTING):
        loop = trainer.validate_loop if fn == TrainerFn.VALIDATING else trainer.test_loop
        if loop.limit == 0:
            return []
        with _ending_where_asked(trainer):
            results = loop.run()
        if loop.verbose and trainer.is_global_zero:
            print_results(results, fn.value)
        return convert_tensors_to_scalars(results)
    with _ending_where_asked(trainer):
        _sanity_check(trainer)
        trainer.state.stage = RunningStage.TRAINING
        trainer.fit_loop.run()
    return None


@contextlib.contextmanager
def _ending_where_asked(trainer: Trainer) -> Iterator[None]:
    """Listen to SIGTERM in the block, which ends with :class:`Preempted` where that is to end the run."""
    with listening(trainer):
        try:
            yield
        except Preempted:
            save_and_end(trainer)
        else:
            if trainer.preemption is not None:
                trainer.preemption.finish()


def _sanity_check(trainer: Trainer) -> None:
    loop = trainer.validate_loop
    if not trainer.enable_validation or trainer.num_sanity_val_steps == 0 or trainer.fit_loop.restarts:
        return
    trainer.state.stage = RunningStage.SANITY_CHECKING
    trainer.metric_log.clear()  # those of the run that a checkpoint continues
    loop.forget_results()
    with isolate_rng(), trainer.fit_loop.as_it_was_saved(), trainer.run_time.account.span("validation"):
        call.callback_hooks(trainer, "on_sanity_check_start")
        loop.run()
        call.callback_hooks(trainer, "on_sanity_check_end")
    if (steps := trainer.executor.steps) is not None:
        trainer.run_time.compiled_before = steps.log.seconds
    trainer.metric_log.clear()
    loop.forget_results()
    loop.step_counts.clear()


def _report(trainer: Trainer) -> None:
    steps, fn = trainer.executor.steps, trainer.state.fn
    assert steps is not None and fn is not None
    ran = steps.log.run(fn.value, steps.executor, trainer.strategy.mesh, trainer.precision)
    report.add_run({**ran, **trainer.run_time.facts()})
