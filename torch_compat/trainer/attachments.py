"""Loggers and callbacks of a Trainer: those that were given and those that it adds."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.batch_size_finder import BatchSizeFinder
from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.corruption_check import VARIABLE as SDC_CHECK
from torch_compat.callbacks.corruption_check import SilentDataCorruptionCheck
from torch_compat.callbacks.lr_finder import LearningRateFinder
from torch_compat.callbacks.model_checkpoint import ModelCheckpoint
from torch_compat.callbacks.model_summary import ModelSummary
from torch_compat.callbacks.non_finite_guard import VARIABLE as NON_FINITE
from torch_compat.callbacks.non_finite_guard import NonFiniteGuard
from torch_compat.callbacks.progress import ProgressBar, RichProgressBar
from torch_compat.callbacks.rich_model_summary import RichModelSummary
from torch_compat.callbacks.timer import Timer
from torch_compat.loggers.csv_logs import CSVLogger
from torch_compat.loggers.logger import DummyLogger, Logger
from torch_compat.run import hook_calls as call
from torch_compat.utilities.exceptions import ArgumentTypeError, MisconfigurationException
from torch_compat.utilities.external_callbacks import external_callbacks
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.arguments import Options
    from torch_compat.trainer.trainer import Trainer


def make_loggers(logger: Any, root: str) -> list[Logger]:
    """The loggers of ``Trainer(logger=…)``: True or None is TensorBoard (CSV files where it is missing), False is none.

    Raises:
        MisconfigurationException: something that is no logger.
    """
    if logger == "dummy":
        return [DummyLogger()]
    if logger is None or logger is True:
        return [_default_logger(root)]
    if logger is False:
        return []
    is_one = isinstance(logger, Logger) or (not isinstance(logger, list | tuple) and _answers(logger, "log_metrics"))
    found: list[Any] = [logger] if is_one or not isinstance(logger, Iterable) else list(logger)
    for one in found:
        if not isinstance(one, Logger) and not _answers(one, "log_metrics", "log_hyperparams", "save", "finalize"):
            raise MisconfigurationException(f"Trainer(logger={one!r}): expected a Logger, a list of them, True or False")
    return found


def _answers(one: Any, *names: str) -> bool:
    """Whether an object that is of no class of ours, a mock perhaps, has these methods."""
    return all(callable(getattr(one, name, None)) for name in names)


def _default_logger(root: str) -> Logger:
    try:
        from torch_compat.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger(save_dir=root, version=None, name="lightning_logs")
    except ModuleNotFoundError:
        rank_zero_warn("TensorBoard is not installed, so metrics are written by CSVLogger: pip install tensorboard")
        return CSVLogger(root)


def make_callbacks(given: Any, options: Options) -> list[Callback]:
    """The callbacks of ``Trainer(callbacks=…)``, the default ones and those of installed packages, in the order of ``in_order``.

    Raises:
        MisconfigurationException: something that is no callback, or one that contradicts an ``enable_*`` argument.
    """
    if given is not None and not isinstance(given, Callback | list | tuple):
        raise ArgumentTypeError(f"Trainer(callbacks={given!r}): expected a Callback or a list of them")
    callbacks = [] if given is None else [given] if isinstance(given, Callback) else list(given)
    for callback in callbacks:
        if not isinstance(callback, Callback) and not _answers(callback, "setup", "on_fit_start", "on_train_batch_end"):
            raise MisconfigurationException(f"Trainer(callbacks=…): {callback!r} is no Callback")
    _add_checkpointing(callbacks, options)
    _add_timer(callbacks, options)
    _add_progress_bar(callbacks, options)
    _add_model_summary(callbacks, options)
    if (action := os.environ.get(NON_FINITE)) and not any(isinstance(callback, NonFiniteGuard) for callback in callbacks):
        callbacks.append(NonFiniteGuard(action))  # pyright: ignore[reportArgumentType]  it checks
    if (steps := os.environ.get(SDC_CHECK)) and not any(isinstance(one, SilentDataCorruptionCheck) for one in callbacks):
        callbacks.append(SilentDataCorruptionCheck(int(steps) if steps.isdecimal() else steps))  # pyright: ignore[reportArgumentType]  it checks
    callbacks.extend(external_callbacks("lightning.pytorch.callbacks_factory"))
    _check_unique(callbacks)
    return in_order(callbacks)


def _add_checkpointing(callbacks: list[Callback], options: Options) -> None:
    has = any(isinstance(callback, Checkpoint) for callback in callbacks)
    if has and not options.enable_checkpointing:
        raise MisconfigurationException(
            "Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint` in callbacks list: leave "
            "out one of the two."
        )
    if not has and options.enable_checkpointing:
        callbacks.append(ModelCheckpoint())


def _add_progress_bar(callbacks: list[Callback], options: Options) -> None:
    bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        raise MisconfigurationException(
            f"You added multiple progress bar callbacks to the Trainer, {[type(bar).__name__ for bar in bars]}: keep one of them."
        )
    if bars and not options.enable_progress_bar:
        raise MisconfigurationException(
            f"Trainer was configured with `enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks list: "
            "remove one of them."
        )
    if not bars and options.enable_progress_bar:
        callbacks.append(RichProgressBar())


def _add_timer(callbacks: list[Callback], options: Options) -> None:
    if options.max_time is None:
        return
    if any(isinstance(callback, Timer) for callback in callbacks):
        rank_zero_info("Ignoring `Trainer(max_time=...)`, callbacks list already contains a Timer.")
        return
    callbacks.append(Timer(duration=options.max_time, interval="step"))


def _add_model_summary(callbacks: list[Callback], options: Options) -> None:
    if not options.enable_model_summary:
        return
    found = [type(callback) for callback in callbacks if isinstance(callback, ModelSummary)]
    if found:
        rank_zero_info(f"Trainer already configured with model summary callbacks: {found}. No default `ModelSummary` is added.")
        return
    callbacks.append(RichModelSummary())


def _check_unique(callbacks: Sequence[Callback]) -> None:
    seen: set[str] = set()
    for callback in callbacks:
        if not call.is_overridden("state_dict", callback):
            continue
        if callback.state_key in seen:
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}`. In a checkpoint the state of each "
                f"has its `state_key` as name, and these have the same, {callback.state_key!r}: override `state_key` so that "
                "they differ, or keep one of them."
            )
        seen.add(callback.state_key)


def in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks in their order, those of the tuner before all others, those that save checkpoints after them."""

    def place(callback: Callback) -> int:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            return -1
        return int(isinstance(callback, Checkpoint))

    return sorted(callbacks, key=place)


def attach_module_callbacks(trainer: Trainer) -> None:
    """Add what the module's ``configure_callbacks`` returns; it replaces the Trainer's of the same class or a class above it."""
    found = call.module_hook(trainer, "configure_callbacks")
    if not found:
        return
    extra = [found] if isinstance(found, Callback) else list(found)
    classes = {type(own) for own in trainer.callbacks} - {Callback}
    replaced = {kind for kind in classes if any(isinstance(one, kind) for one in extra)}
    if replaced:
        rank_zero_info(
            "The following callbacks returned in `LightningModule.configure_callbacks` will override existing callbacks "
            "passed to Trainer: " + ", ".join(sorted(kind.__name__ for kind in replaced))
        )
    trainer.callbacks = in_order([*(own for own in trainer.callbacks if type(own) not in replaced), *extra])


def let_callbacks_log(trainer: Trainer) -> None:
    """Callbacks log as the module does, by ``self.log`` and ``self.log_dict``."""
    module = trainer.lightning_module
    for callback in trainer.callbacks:
        callback.log = module.log  # pyright: ignore[reportAttributeAccessIssue]  as in stock: a member of the object
        callback.log_dict = module.log_dict  # pyright: ignore[reportAttributeAccessIssue]


def check_module(trainer: Trainer, module: LightningModule) -> None:
    """Whether the module has what the run needs.

    Raises:
        MisconfigurationException: a missing step, loader or optimizer, named.
    """
    fn = trainer.state.fn
    assert fn is not None
    _refuse_iterators(module)
    if fn == "predict":
        if module.predict_step is None:
            raise MisconfigurationException("`predict_step` cannot be None to run `Trainer.predict`: leave it out for `forward`.")
        if not call.is_overridden("predict_step", module) and not call.is_overridden("forward", module):
            raise MisconfigurationException("`Trainer.predict` requires `forward` method to run, or a `predict_step`.")
        _need_loader(trainer, "predict")
        return
    if fn == "fit":
        for name in ("training_step", "configure_optimizers"):
            if not call.is_overridden(name, module):
                raise MisconfigurationException(
                    f"No `{name}()` method defined. Lightning `Trainer` expects as minimum `training_step()` and "
                    "`configure_optimizers()`, and `train_dataloader()` or a loader as argument of `fit`."
                )
        _need_loader(trainer, "train")
        _check_validation(trainer, module)
        _check_manual_optimization(trainer, module)
        return
    name = "validation" if fn == "validate" else "test"
    if not call.is_overridden(f"{name}_step", module):
        raise MisconfigurationException(f"No `{name}_step()` method defined to run `Trainer.{fn.value}`.")
    _need_loader(trainer, "val" if name == "validation" else "test")


def _refuse_iterators(module: LightningModule) -> None:
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, name)
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            raise MisconfigurationException(
                f"`{type(module).__name__}.{name}(dataloader_iter)` is not supported: a compiled step gets its batch, it cannot "
                f"draw it. Use `{name}(batch, batch_idx)`, and a batch sampler or `collate_fn` for batches of another make."
            )


def _check_manual_optimization(trainer: Trainer, module: LightningModule) -> None:
    if module.automatic_optimization:
        return
    for what, argument, given in (
        ("clipping", "gradient_clip_val", trainer.gradient_clip_val is not None and trainer.gradient_clip_val > 0),
        ("accumulation", "accumulate_grad_batches", trainer.accumulate_grad_batches != 1),
    ):
        if given:
            raise MisconfigurationException(
                f"Automatic gradient {what} is not supported for manual optimization. Remove "
                f"`Trainer({argument}={getattr(trainer, argument)})` and clip or accumulate in training_step."
            )


def _check_validation(trainer: Trainer, module: LightningModule) -> None:
    has_loader = trainer.validate_loop.source.is_defined
    has_step = call.is_overridden("validation_step", module)
    if has_loader and not has_step:
        rank_zero_warn("You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop: nothing is validated.")
    if has_step and not has_loader:
        rank_zero_warn(
            "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop: nothing is validated.",
            category=PossibleUserWarning,
        )


def _need_loader(trainer: Trainer, prefix: str) -> None:
    assert trainer.state.fn is not None
    loops = {"train": trainer.fit_loop, "val": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}
    source = loops[prefix].source
    if not source.is_defined:
        if getattr(source.owner, f"{prefix}_dataloader", source) is None:
            fn = trainer.state.fn.value
            raise ArgumentTypeError(
                f"An invalid dataloader was passed to `Trainer.{fn}({'train_' if fn == 'fit' else ''}dataloaders=...)`. Found "
                f"None. Either pass the dataloader to the `.{fn}()` method or implement `{prefix}_dataloader` in "
                f"{type(source.owner).__name__}, where it is None"
            )
        instead = "" if trainer.run_datamodule is None else " (with a datamodule the module's own loaders are not used)"
        raise MisconfigurationException(
            f"`{prefix}_dataloader` must be implemented to be used with the Lightning Trainer: "
            f"`Trainer.{trainer.state.fn.value}` needs batches; pass dataloaders or a datamodule, "
            f"or define `{prefix}_dataloader` in {type(source.owner).__name__}{instead}"
        )


def log_hyperparameters(trainer: Trainer) -> None:
    """Send the hyperparameters of module and datamodule to the loggers.

    Raises:
        RuntimeError: the two disagree about a name.
    """
    module, datamodule = trainer.lightning_module, trainer.datamodule
    parts: list[Mapping[str, Any]] = [
        owner.hparams_initial for owner in (module, datamodule) if owner is not None and owner._log_hyperparams
    ]
    merged: dict[str, Any] = {}
    for part in parts:
        # Where a command line chose the classes, each keeps its own in checkpoints; it is no hyperparameter.
        part = {name: value for name, value in part.items() if name != "_class_path"}
        clashes = [name for name, value in part.items() if name in merged and not _same(merged[name], value)]
        if clashes:
            raise RuntimeError(
                f"Error while merging hparams: the keys {clashes} are present in both the LightningModule and "
                "the LightningDataModule, with other values. Loggers write one set: rename them in one of the two, or "
                "leave them out there with `save_hyperparameters(ignore=[...])`."
            )
        merged.update(part)
    for logger in trainer.loggers:
        if parts:
            logger.log_hyperparams(merged)
        logger.log_graph(module)
        logger.save()


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # arrays have no truth value
        return a is b
