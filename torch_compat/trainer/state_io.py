"""The contents of a Trainer's checkpoint, and how a run takes them up again. Layout: Lightning's checkpoint dict.

A checkpoint is taken up in two phases, between which the model comes to lie on the mesh (``trainer/run.py``):

1. :func:`restore_modules`, before ``StepDispatcher.start``: datamodule, weights, callbacks, and the hooks ``on_load_checkpoint``,
   which may change the dict for the second phase too. Weights go into the module's tensors, which are then placed once. With
   ``Strategy.restore_checkpoint_after_setup`` this phase comes right before the second, and writes into what is placed.
2. :func:`restore_training`, after ``StepDispatcher.setup_optimizers`` and only where ``fit`` runs: loops, optimizers, schedulers,
   loss scale, random streams, the place in the data. Optimizers do not exist before, and their state belongs on the mesh.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.corruption_check import check_before_save
from torch_compat.callbacks.model_checkpoint import ModelCheckpoint
from torch_compat.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from torch_compat.callbacks.tiered_checkpoint import TieredCheckpoint
from torch_compat.checkpoint.checkpoint_dict import read_opened
from torch_compat.core.hparams import is_omegaconf
from torch_compat.run import hook_calls as call
from torch_compat.run.profiling import profiled_hook
from torch_compat.run.states import TrainerFn
from torch_compat.step import mesh_state
from torch_compat.trainer import requeue, restarts
from torch_compat.trainer.agreement import check_same_checkpoint
from torch_compat.trainer.data import in_flight
from torch_compat.trainer.loops_state import loops_state
from torch_compat.trainer.preemption import checkpoint_of
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from xlatrain import checkpoint as sharded
from xlatrain.checkpoint.snapshots import is_snapshot, open_snapshot

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

OURS = "xlatrain"
"""Key of what stock's checkpoints do not have: random streams, the position in the data, more counters."""

VERSION = "2.6.6"
"""The Lightning version whose checkpoint layout is written."""


def dump(trainer: Trainer, weights_only: bool = False) -> dict[str, Any]:
    """The checkpoint dict of the run as it stands; tensors are live views of what is on the mesh."""
    trainer.executor.look()
    check_before_save(trainer)
    module = trainer.lightning_module
    ours = {"counters": trainer.fit_loop.counters(), "written": trainer.fit_loop.state_dict()}
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": VERSION,
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "loops": loops_state(trainer.fit_loop),
    }
    if not weights_only:
        checkpoint["callbacks"] = {
            callback.state_key: state for callback in trainer.callbacks if (state := callback.state_dict())
        }
        checkpoint["optimizer_states"] = [trainer.strategy.optimizer_state(one) for one in trainer.optimizers]
        checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        if state := mesh_state.loss_scale_state(trainer) or trainer.precision_plugin.state_dict():
            checkpoint[type(trainer.precision_plugin).__qualname__] = state
        trainer.precision_plugin.on_save_checkpoint(checkpoint)
    for owner in (module, trainer.datamodule):
        _dump_hparams(checkpoint, owner)
    if trainer.datamodule is not None and (state := profiled_hook(trainer, trainer.datamodule, "state_dict")()):
        checkpoint[type(trainer.datamodule).__qualname__] = state
    if not weights_only:
        call.callback_hooks(trainer, "on_save_checkpoint", checkpoint)
    call.module_hook(trainer, "on_save_checkpoint", checkpoint)
    if not weights_only:  # hooks see what stock's see
        checkpoint[OURS] = {"loops": ours, **mesh_state.random_state(trainer), "in_flight": in_flight.dump(trainer)}
        if replaced := {callback.state_key: callback.replaced for callback in _checkpoints(trainer) if callback.replaced}:
            checkpoint[OURS]["replaced"] = replaced
    return checkpoint


def _checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _dump_hparams(checkpoint: dict[str, Any], owner: Any) -> None:
    hparams = getattr(owner, "hparams", None)
    if owner is None or not hparams:
        return
    if hasattr(owner, "_hparams_name"):
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
    if is_omegaconf(hparams):
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = hparams
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    else:
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(hparams)


def find(trainer: Trainer, ckpt_path: str | Path | None, *, provided_model: bool) -> str | None:
    """The path behind ``ckpt_path``, which may be ``"best"``, ``"last"``, ``"hpc"``, ``"auto"`` or a path.

    Raises:
        ValueError: there is no such checkpoint.
    """
    trainer._found_ckpt_path = False
    if trainer._manages_ckpt_path:
        if not ckpt_path:
            return trainer.ckpt_path
        rank_zero_warn(
            f"`trainer.ckpt_path = {trainer.ckpt_path!r}` was called but then you passed `trainer.fit(ckpt_path={ckpt_path!r})`, "
            "which counts."
        )
        trainer.ckpt_path = None
    if ckpt_path is None:
        if trainer.state.fn == TrainerFn.FITTING:
            found = restarts.newest(trainer, _commit_time_ns)
            trainer._found_ckpt_path = found is not None
            found = found or requeue.newest_checkpoint(trainer)
            return found or (_last_of_exceptions(trainer) if _exception_checkpoints(trainer) else None)
        if provided_model:
            return None
        ckpt_path = "best"
        fn = trainer.state.fn.value if trainer.state.fn is not None else "fit"
        rank_zero_warn(
            f"`.{fn}(ckpt_path=None)` was called without a model. The best checkpoint of the last `fit` is loaded. "
            f"To choose, call `.{fn}(ckpt_path='best')` or `.{fn}(ckpt_path='last')`."
        )
    if ckpt_path == "best":
        return _best(trainer)
    if ckpt_path == "last":
        return _last(trainer)
    if ckpt_path == "auto":
        trainer._found_ckpt_path = True
        return _auto(trainer)
    if ckpt_path == "hpc":
        return requeue.newest(trainer)
    if str(ckpt_path).startswith("registry"):
        raise ValueError(
            f"ckpt_path={str(ckpt_path)!r}: Lightning's model registry (litmodels) is not supported; download the checkpoint "
            "and pass its path"
        )
    return str(ckpt_path)


def _best(trainer: Trainer) -> str:
    fn = trainer.state.fn.value if trainer.state.fn is not None else "fit"
    if len(trainer.checkpoint_callbacks) > 1:
        rank_zero_warn(
            f'`.{fn}(ckpt_path="best")` is called with Trainer configured with multiple `ModelCheckpoint` callbacks. The first '
            "one's best checkpoint is taken; for another's pass its `best_model_path`."
        )
    callback = trainer.checkpoint_callback
    if callback is None:
        raise ValueError(f'`.{fn}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured.')
    if trainer.fast_dev_run:
        raise ValueError(
            f'You cannot execute `.{fn}(ckpt_path="best")` with `fast_dev_run=True`, which saves no checkpoint. Pass a path, '
            "or set `fast_dev_run=False`"
        )
    best = getattr(callback, "best_model_path", "")
    if not best:
        raise ValueError(
            f'`.{fn}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save the best model, or has saved '
            "nothing yet in this Trainer; run fit() first, or pass a path"
        )
    return best


def _exception_checkpoints(trainer: Trainer) -> list[OnExceptionCheckpoint]:
    return [one for one in trainer.callbacks if isinstance(one, OnExceptionCheckpoint)]


def _last_of_exceptions(trainer: Trainer) -> str | None:
    rank_zero_warn(
        "`.fit(ckpt_path=None)` was called with an `OnExceptionCheckpoint`: the run continues from its last "
        "save, if there is one. To choose, call `fit(ckpt_path='last')` or `fit(ckpt_path='best')`."
    )
    return _last(trainer)


def _last(trainer: Trainer) -> str | None:
    paths = [callback.ckpt_path for callback in _exception_checkpoints(trainer)]
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            paths += [*callback._find_last_checkpoints(trainer), checkpoint_of(callback._resolve_dirpath(trainer))]
    candidates = {path: time for path in paths if (time := _commit_time_ns(path)) is not None}
    if not candidates:
        fn = trainer.state.fn.value if trainer.state.fn is not None else "fit"
        rank_zero_warn(
            f'.{fn}(ckpt_path="last") is set, but there is no last checkpoint: nothing is loaded. '
            "`ModelCheckpoint(..., save_last=True)` keeps one."
        )
        return None
    return max(candidates, key=lambda path: candidates[path])


def _auto(trainer: Trainer) -> str | None:
    """The newest complete checkpoint in the directories of this Trainer's ``ModelCheckpoint``; process 0 decides."""
    found: dict[str, int] = {}
    for callback in trainer.checkpoint_callbacks if trainer.is_global_zero else ():
        if not isinstance(callback, ModelCheckpoint):
            continue
        directory = callback._resolve_dirpath(trainer)
        found |= {str(entry.path): entry.committed_ns for entry in sharded.entries(directory) if not entry.problem}
        if isinstance(callback, TieredCheckpoint):
            found |= callback.fetch_if_newer(directory, max(found.values(), default=0))
    path = trainer.strategy.broadcast(max(found, key=lambda one: found[one]) if found else None)
    rank_zero_info(f"ckpt_path='auto': {f'continuing from {path}' if path else 'no complete checkpoint; starting afresh'}")
    return path


def _commit_time_ns(path: str) -> int | None:
    """The time of a checkpoint, by its commit record, or of a stock file its time; None for what a killed first save left."""
    committed = sharded.commit_time_ns(path)
    return Path(path).stat().st_mtime_ns if committed is None and Path(path).is_file() else committed


def load(trainer: Trainer, path: str, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint, or a snapshot in the hosts' memory; on every process."""
    if is_snapshot(path):
        check_same_checkpoint(path, None)
        return read_opened(open_snapshot(path), weights_only is not False, lazy=True)
    check_same_checkpoint(path, _commit_time_ns(path))
    rank_zero_info(f"Restoring states from the checkpoint path at {path}")
    return trainer.strategy.load_checkpoint(path, weights_only=weights_only)


def restore_modules(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Weights of the module, state of datamodule and callbacks; before parameters are placed."""
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in checkpoint:
        profiled_hook(trainer, datamodule, "load_state_dict")(checkpoint[type(datamodule).__qualname__])
    module = trainer.lightning_module
    with _as_in_stock(checkpoint):
        call.module_hook(trainer, "on_load_checkpoint", checkpoint)
    try:
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    except RuntimeError as error:
        if str(error).startswith("Error(s) in loading state_dict"):  # torch's own, whose text users compare
            error.add_note(
                f"The checkpoint at {trainer.ckpt_path} was saved from another {type(module).__name__}: take that one. "
                "To begin with the weights whose names fit: load_from_checkpoint(path, strict=False), and no ckpt_path. What has "
                "another name or shape is renamed, or taken out of checkpoint['state_dict'], in on_load_checkpoint"
            )
        raise
    with _as_in_stock(checkpoint):
        call.callback_hooks(trainer, "on_load_checkpoint", checkpoint)
    _restore_callbacks(trainer, checkpoint.get("callbacks") or {})
    replaced = checkpoint.get(OURS, {}).get("replaced", {})
    for callback in _checkpoints(trainer):
        callback.continues(replaced.get(callback.state_key, ()))
    if trainer.state.fn != TrainerFn.FITTING:
        rank_zero_info(f"Loaded model weights from the checkpoint at {trainer.ckpt_path}")


@contextlib.contextmanager
def around_a_trial(trainer: Trainer) -> Iterator[None]:
    """Hooks see a checkpoint saved before the block and loaded after it, as in stock, which keeps a run so that it tries things.

    What holds the tensors is the caller's to keep and to put back, before the end of the block.
    """
    checkpoint = dump(trainer)
    del checkpoint[OURS]
    views = {name: checkpoint.pop(name) for name in ("state_dict", "optimizer_states") if name in checkpoint}
    kept = copy.deepcopy(checkpoint)
    yield
    loaded = {**kept, **views}
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in loaded:
        profiled_hook(trainer, datamodule, "load_state_dict")(loaded[type(datamodule).__qualname__])
    call.module_hook(trainer, "on_load_checkpoint", loaded)
    call.callback_hooks(trainer, "on_load_checkpoint", loaded)
    _restore_callbacks(trainer, loaded.get("callbacks") or {})


@contextlib.contextmanager
def _as_in_stock(checkpoint: dict[str, Any]) -> Iterator[None]:
    """Hooks see, and may change, what a checkpoint of stock's has."""
    kept = checkpoint.pop(OURS, None)
    try:
        yield
    finally:
        if kept is not None:
            checkpoint[OURS] = kept


def _restore_callbacks(trainer: Trainer, states: Mapping[Any, Any]) -> None:
    known = {callback.state_key for callback in trainer.callbacks} | {
        callback._legacy_state_key for callback in trainer.callbacks
    }
    if missing := [key for key in states if key not in known]:
        rank_zero_warn(
            "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint are not made from it: it has a state "
            f"of {missing}, which no callback takes. Pass them in `Trainer(callbacks=[…])`."
        )
    for callback in trainer.callbacks:
        state = states.get(callback.state_key, states.get(callback._legacy_state_key))
        if state:
            callback.load_state_dict(dict(state))


def restore_training(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Optimizers, schedulers, loop counters, random streams; after parameters were placed.

    Raises:
        KeyError: a checkpoint that was saved with ``weights_only=True``.
        MisconfigurationException: it has another number of schedulers; it is past ``max_epochs``.
    """
    _restore_loops(trainer, checkpoint)
    if trainer.strategy.lightning_restore_optimizer:
        _check_present(checkpoint, "optimizer_states", "optimizer")
        trainer.strategy.load_optimizer_state_dict(checkpoint)
    _check_present(checkpoint, "lr_schedulers", "learning rate scheduler")
    configs = trainer.lr_scheduler_configs
    if len(configs) != len(checkpoint["lr_schedulers"]):
        raise MisconfigurationException(
            f"the checkpoint has {len(checkpoint['lr_schedulers'])} schedulers, configure_optimizers returned {len(configs)}"
        )
    for config, state in zip(configs, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    trainer.precision_plugin.on_load_checkpoint(dict(checkpoint))
    name = type(trainer.precision_plugin).__qualname__
    if name in checkpoint:
        if trainer.scaler is not None:
            mesh_state.load_loss_scale_state(trainer, checkpoint[name])
        else:
            trainer.precision_plugin.load_state_dict(checkpoint[name])
    if OURS in checkpoint:
        mesh_state.load_random_state(trainer, checkpoint[OURS])
        if "in_flight" in checkpoint[OURS]:
            in_flight.load(trainer, checkpoint[OURS]["in_flight"])
    rank_zero_info(f"Restored all states from the checkpoint at {trainer.ckpt_path}")


def _check_present(checkpoint: Mapping[str, Any], key: str, what: str) -> None:
    if key not in checkpoint:
        raise KeyError(
            f"Trying to restore {what} state but checkpoint contains only the model: it has no {key!r}. This is probably due to "
            "`ModelCheckpoint.save_weights_only` being set to `True`. Load the weights with Module.load_from_checkpoint, and "
            "leave ckpt_path out"
        )


def _restore_loops(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    loops = checkpoint.get("loops")
    if loops is not None:  # a script of the user's may have written it without
        trainer.fit_loop.load_state_dict(loops["fit_loop"], checkpoint.get(OURS, {}).get("loops"))
    if trainer.max_epochs not in (None, -1) and trainer.fit_loop.progress.epoch > trainer.max_epochs:  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]
        raise MisconfigurationException(
            f"You restored a checkpoint with current_epoch={trainer.fit_loop.progress.epoch}, but you have set "
            f"Trainer(max_epochs={trainer.max_epochs}): raise it."
        )
