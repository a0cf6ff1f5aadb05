"""A Trainer and its module taken to the programs of their first steps, as ``fit`` would, but never to running them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch.utils.data import DataLoader

from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.model_summary import ModelSummary
from torch_compat.callbacks.progress import ProgressBar
from torch_compat.loggers.logger import DummyLogger
from torch_compat.preflight.errors import PreflightError
from torch_compat.preflight.steps import AbstractExecutor, AbstractSteps, ProgramFound
from torch_compat.run import hook_calls as call
from torch_compat.run.batches import flatten_batch
from torch_compat.run.states import RunningStage, TrainerFn, TrainerStatus
from torch_compat.step.optimization.automatic import AutomaticOptimization
from torch_compat.trainer.data.data_source import DataSource
from torch_compat.trainer.data.dataloaders import prepare_dataloader
from torch_compat.trainer.run import attach, set_up
from torch_compat.utilities.combined_loader import CombinedLoader
from xlatrain.bridge.errors import BridgeError
from xlatrain.mesh.batch_layout import BatchLayout
from xlatrain.mesh.mesh import data_parallel_size
from xlatrain.preflight import Step
from xlatrain.step.state import TrainState

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


@dataclass
class FoundSteps:
    """The programs that a run would compile.

    Attributes:
        steps: the programs, the training ones first.
        state: the training state by parameter path, abstract.
        batch: the arrays of a training batch, abstract.
        rows: of it, on the whole mesh.
        trainable: paths of the parameters that require grad.
        mesh: over the topology's devices.
        loops: what is rolled into loops, and what is not and why.
        attention: which kernels compute it, and why.
        notes: what was assumed.
    """

    mesh: Mesh
    steps: list[Step] = field(default_factory=list)
    state: TrainState | None = None
    batch: list[Any] = field(default_factory=list)
    rows: int = 0
    trainable: tuple[str, ...] = ()
    loops: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_steps(
    trainer: Trainer,
    module: LightningModule,
    train_loaders: Any,
    val_loaders: Any,
    datamodule: Any,
    *,
    evaluation: bool = True,
    divide: int = 1,
    configured: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    placed: Callable[[FoundSteps], None] = lambda found: None,
) -> FoundSteps:
    """The programs of the first training step, and of the first validation step if there is one.

    Args:
        trainer: made inside :func:`torch_compat.trainer.devices.described_devices`.
        evaluation: also the validation step.
        divide: take so much smaller training batches.
        configured: entered when ``configure_model`` has made the module whole.
        placed: told what is found before anything is captured: the mesh, the state and a batch.

    Raises:
        PreflightError: the steps would not be compiled, or need values; names what and where.
        MisconfigurationException: what ``fit`` itself would raise.
    """
    if trainer.strategy.launcher is not None:
        raise PreflightError(
            f"{type(trainer.strategy).__name__} starts processes on one host; a pod's are started from outside: use "
            "strategy='ddp'"
        )
    with attached(trainer, module, datamodule):
        trainer.should_stop = False
        trainer.state.stage = RunningStage.TRAINING
        trainer.fit_loop.source.reset(train_loaders)
        trainer.validate_loop.source.reset(val_loaders)
        set_up(trainer)
        with configured(), trainer.executor.running():
            trainer.strategy.setup(trainer)
            trainer.executor.start()
            call.hooks(trainer, "on_fit_start")
            trainer.strategy.pre_dispatch(trainer)
            trainer.executor.setup_optimizers()
            try:
                return _find(trainer, evaluation, divide, placed)
            except BridgeError as error:
                raise PreflightError(f"the step cannot be captured, so it would not run compiled: {error}") from error


@contextlib.contextmanager
def attached(trainer: Trainer, module: LightningModule, datamodule: Any) -> Iterator[None]:
    """The Trainer as in a run, but without what writes files or draws bars; afterwards as it was."""
    callbacks, loggers, executor = trainer.callbacks, trainer.loggers, trainer.executor
    trainer.callbacks = [one for one in callbacks if not isinstance(one, Checkpoint | ProgressBar | ModelSummary)]
    trainer.loggers = [DummyLogger() for _ in loggers]
    attach(trainer, module, datamodule)
    trainer.executor = AbstractExecutor(trainer)
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    try:
        yield
    finally:
        trainer.fit_loop.data.close()
        trainer.executor.release()
        trainer.strategy.teardown()
        trainer.callbacks, trainer.loggers, trainer.executor = callbacks, loggers, executor
        trainer.state.fn, trainer.state.stage, trainer.state.status = None, None, TrainerStatus.FINISHED


def _find(trainer: Trainer, evaluation: bool, divide: int, told: Callable[[FoundSteps], None]) -> FoundSteps:
    steps, optimization = trainer.executor.steps, trainer.executor.optimization
    assert isinstance(steps, AbstractSteps) and optimization is not None
    found = FoundSteps(mesh=steps.mesh)
    batch = _first_batch(trainer, trainer.fit_loop.source, steps, found.notes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of training batches")  # nothing is logged here
        trainer.fit_loop.data.load()
    steps.rows_divisor = divide
    placed = steps.place(batch)
    found.batch, found.rows = list(placed.arrays), placed.size
    found.trainable = tuple(name for name, one in steps.model.params.items() if one.requires_grad)
    found.notes.append(f"a training batch has {found.rows} rows on the whole mesh")
    found.state = steps.model.state
    told(found)
    with torch.enable_grad():
        for hook in ("on_train_start", "on_train_epoch_start"):
            call.hooks(trainer, hook)
        call.hooks(trainer, "on_train_batch_start", batch, 0)
        if trainer.accumulate_grad_batches > 1 and isinstance(optimization, AutomaticOptimization):
            program = _program(optimization.run, batch, 0, False)
            found.steps.append(Step("accumulate", program.program, program.args, program.work(steps.mesh)))
            _accumulate(steps, program)
        program = _program(optimization.run, batch, max(trainer.accumulate_grad_batches - 1, 0), True)
    found.steps.append(Step("train", program.program, program.args, program.work(steps.mesh)))
    found.state = steps.model.state
    if isinstance(optimization, AutomaticOptimization) and optimization._overridden:
        _, (grads, _) = jax.eval_shape(program.program, *program.args)
        shardings = steps.model.param_shardings
        grads = {
            name: None if one is None else jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=shardings[name])
            for name, one in grads.items()
        }
        found.steps.append(
            Step("update", steps.programs.update(None), (steps.model.state, grads, optimization.update.numbers()[0]))
        )
        hooks = ", ".join(sorted(optimization._overridden))
        found.notes.append(f"gradients leave the program, because these are overridden: {hooks}")
    found.loops = list(steps.log.loops)
    found.attention = list(steps.log.attention)
    found.notes += steps.log.losses
    if evaluation and trainer.enable_validation:
        found.steps.append(_validation(trainer, steps))
    return found


def _accumulate(steps: AbstractSteps, program: ProgramFound) -> None:
    new, _ = jax.eval_shape(program.program, *program.args)
    by_path = {key: leaf for key, leaf in new.accumulated.items() if not hasattr(key, "paths")}
    for key, leaf in new.accumulated.items():
        for path in getattr(key, "paths", ()):
            by_path[path] = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    steps.model.accumulate(by_path)  # pyright: ignore[reportAttributeAccessIssue]  an AbstractModelState


def _validation(trainer: Trainer, steps: AbstractSteps) -> Step:
    trainer.state.stage = RunningStage.VALIDATING
    steps.rows_divisor = 1
    module = trainer.lightning_module
    modes = {one: one.training for one in module.modules()}
    try:
        with torch.no_grad():
            batch = _first_batch(trainer, trainer.validate_loop.source, steps, [])
            trainer.validate_loop.setup_data()
            trainer.validate_loop.results = trainer.validate_loop._new_results()
            call.module_hook(trainer, "on_validation_model_eval")
            for hook in ("on_validation_start", "on_validation_epoch_start"):
                call.hooks(trainer, hook)
            several = len(trainer.validate_loop.max_batches) > 1
            program = _program(trainer.executor._evaluate, "validation_step", batch, (0, 0) if several else (0,))
    finally:
        for one, mode in modes.items():
            one.training = mode
        trainer.state.stage = RunningStage.TRAINING
    return Step("validation", program.program, program.args)


def _program(run: Any, *args: Any) -> ProgramFound:
    try:
        run(*args)
    except ProgramFound as found:
        found.__traceback__ = None  # its frames hold what the capture made
        return found
    raise AssertionError("the step ended without a program")


def _first_batch(trainer: Trainer, source: DataSource, steps: AbstractSteps, notes: list[str]) -> Any:
    """The first batch of the user's own loader, through the transfer hooks; how many make a global one is noted.

    Args:
        notes: told where the second batch has other shapes.
    """
    loaders = source._ask()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, source.mode)  # pyright: ignore
    combined = CombinedLoader(combined.iterables, combined._mode)  # pyright: ignore[reportArgumentType]
    combined.flattened = [prepare_dataloader(one, 1) for one in combined.flattened]
    first = next(iter(combined.flattened), ())
    layout = BatchLayout.from_mesh(steps.mesh)
    rebatched = isinstance(first, DataLoader) and first.batch_sampler is not None and trainer.use_distributed_sampler
    steps.rows_factor = data_parallel_size(steps.mesh) if rebatched else layout.processes
    plain = len(combined.flattened) == 1 and not isinstance(combined.iterables, dict | list | tuple)
    try:
        if plain or source.prefix != "train":
            batches = iter(first)
            batch = next(batches)
        else:
            batches = (one for one, _, _ in combined)
            batch = next(batches)
    except StopIteration:
        raise PreflightError(f"{source.prefix}_dataloader gives no batch, so the shape of a batch is not known") from None
    second = next(batches, None)
    if second is not None and (before := _shapes(batch)) != (after := _shapes(second)):
        notes.append(
            f"batches differ in shape: {before} and {after}. Every shape is compiled as a program of its own, and only the first "
            "was examined: pad to fixed shapes, or examine the largest batch"
        )
    return trainer.transfer(batch, 0)


def _shapes(batch: Any) -> str:
    leaves, _ = flatten_batch(batch)
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in leaves)
