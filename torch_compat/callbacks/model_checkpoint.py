"""``ModelCheckpoint``: saves checkpoints by step, time, epoch and metric, and keeps the best."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import proxy

import torch
import yaml
from torch import Tensor

from torch_compat.callbacks.checkpoint_paths import CheckpointPaths, remove_empty
from torch_compat.stock_names.removed_arguments import OF_CHECKPOINT, naming_removed_arguments
from torch_compat.utilities.cloud_io import get_filesystem, is_local_path
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_info
from xlatrain.checkpoint import check_shared
from xlatrain.checkpoint import clean as clean_checkpoints
from xlatrain.cluster.distributed import world

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import STEP_OUTPUT

_warnings = WarningCache()
_STATE = (
    *("monitor", "best_model_score", "best_model_path", "current_score", "dirpath", "best_k_models", "kth_best_model_path"),
    *("kth_value", "last_model_path"),
)
_REMEMBERED = 4  # checkpoints that saves replaced; the removal of older ones is long done


class ModelCheckpoint(CheckpointPaths):
    """Saves a checkpoint every so many steps, epochs or minutes, and keeps the ``save_top_k`` best by a metric.

    A checkpoint is a file ``<dirpath>/<filename>.ckpt``, or a directory of that name where parameters are split over devices. It
    is written while training goes on; what it replaces is removed when it is committed, and ``fit`` returns after the last
    commit. Without ``dirpath`` it goes to ``<log_dir of the first logger>/checkpoints``, without loggers to
    ``<default_root_dir>/checkpoints``. Afterwards ``best_model_path``, ``best_model_score``, ``best_k_models`` and
    ``last_model_path`` say what was kept.

    ::

        saves = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
        trainer = pl.Trainer(callbacks=[saves])

    Args:
        dirpath: directory, local or remote (``gs://...``).
        filename: template without extension. ``"{epoch}-{val_loss:.2f}"`` gives ``epoch=2-val_loss=0.12.ckpt``; ``epoch``,
            ``step`` and all logged metrics can be used. Default ``"{epoch}-{step}"``.
        monitor: logged metric that decides what is best; None keeps the newest.
        verbose: report each decision.
        save_last: also keep ``last.ckpt`` for whatever was saved last; "link" makes it a symbolic link to it (local paths only).
        save_top_k: how many to keep; -1 all, 0 none; more than 1 needs ``monitor``.
        save_on_exception: save when an exception ends the run.
        save_weights_only: leave out optimizers, schedulers, loops and callbacks.
        mode: "min" or "max": which ``monitor`` is better.
        auto_insert_metric_name: put ``name=`` before values in the file name; switch it off for names with "/".
        every_n_train_steps: save every that many optimizer steps; excludes the two following.
        train_time_interval: save when that much time has passed since the last time.
        every_n_epochs: save every that many epochs; 1 if none of the three is given, 0 never.
        save_on_train_epoch_end: save at the end of the training epoch (True) or of validation (False). None: of validation
            if it does not run exactly once per epoch.
        enable_version_counter: append ``-v1``, ``-v2``, ... to a name that exists, instead of overwriting.

    A monitored metric that was not logged raises ``MisconfigurationException`` once validation has run, and warns before. With
    manual optimization and ``every_n_train_steps``, states that the module stored in ``self.saved_models[batch_idx]`` for its
    ``self.layer`` are what is saved, as in Lightning 2.6.

    Raises:
        MisconfigurationException: ``save_top_k`` below -1, negative or more than one of the intervals, ``save_top_k`` above 1
            without ``monitor``, a ``mode`` that is neither "min" nor "max".
        ValueError: ``save_last="link"`` with a remote ``dirpath`` (in ``setup``).

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.ModelCheckpoint.html
    """

    @naming_removed_arguments(OF_CHECKPOINT)
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        super().__init__()
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"`mode` can be min, max but got {mode}: is a smaller or a larger `monitor` better?")
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.filename = filename
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter

        by_default = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self._every_n_epochs: int = 1 if by_default else every_n_epochs or 0
        self._every_n_train_steps: int = every_n_train_steps or 0
        self._train_time_interval = train_time_interval
        self._check_arguments()

        if dirpath and is_local_path(dirpath):
            dirpath = os.path.realpath(os.path.expanduser(dirpath))
        self.dirpath: str | None = os.fspath(dirpath) if dirpath is not None else None
        self._fs = get_filesystem(self.dirpath or "")

        self.current_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)
        self.best_model_score: Tensor | None = None
        self.best_model_path = ""
        self.last_model_path = ""
        self.replaced: list[str] = []  # by this run's last saves, of which a kill may have left some
        self._left: list[str] = []  # by the run that this one continues
        self._last_checkpoint_saved = ""
        self._last_global_step_saved = 0  # nothing to save before the first step
        self._last_time_checked: float | None = None
        self._defer_save_until_validation = False
        self._validation_has_run = False

    def _check_arguments(self) -> None:
        if self.save_top_k < -1:
            raise MisconfigurationException(f"Invalid value for save_top_k={self.save_top_k}. Must be >= -1, which keeps all.")
        for name, value in (("every_n_train_steps", self._every_n_train_steps), ("every_n_epochs", self._every_n_epochs)):
            if value < 0:
                raise MisconfigurationException(f"Invalid value for {name}={value}. Must be >= 0, which is never.")
        intervals = [self._every_n_train_steps >= 1, self._every_n_epochs >= 1, self._train_time_interval is not None]
        if sum(intervals) > 1:
            raise MisconfigurationException(
                f"Combination of parameters every_n_train_steps={self._every_n_train_steps}, "
                f"every_n_epochs={self._every_n_epochs} and train_time_interval={self._train_time_interval} should be mutually "
                "exclusive: use a ModelCheckpoint for each."
            )
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise MisconfigurationException(
                f"ModelCheckpoint(save_top_k={self.save_top_k}, monitor=None): no metric, no {self.save_top_k} best. Pass"
                " `monitor`, or save_top_k=1 (the newest), 0 (none) or -1 (all)."
            )

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    @property
    def every_n_epochs(self) -> int | None:
        """Epochs between checkpoints; 0 if steps or time decide."""
        return self._every_n_epochs

    # -- when ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        dirpath: str = trainer.strategy.broadcast(self._resolve_dirpath(trainer))
        if self.save_last == "link" and not is_local_path(dirpath):
            raise ValueError(f"ModelCheckpoint(save_last='link') needs a local dirpath, not {dirpath!r}: use True.")
        self.dirpath = dirpath
        self._fs = get_filesystem(dirpath)
        several = world().process_count > 1 and trainer.strategy.checkpoint_io.collective
        if several and stage == "fit" and not trainer.fast_dev_run:
            check_shared(dirpath)  # before the first step rather than at the first save
        if trainer.is_global_zero and stage == "fit":
            if is_local_path(dirpath):
                clean_checkpoints(dirpath)  # what a killed run left of saves that it never committed
                self._warn_if_not_writable(dirpath)
            self._warn_if_not_empty(dirpath)
        if stage == "fit" and not trainer.fast_dev_run and (self.save_top_k != 0 or self.save_last):
            self._claim(trainer, dirpath)
            if trainer.is_global_zero and is_local_path(dirpath):
                remove_empty(Path(dirpath))

    def continues(self, replaced: Sequence[str]) -> None:
        """The run continues one of whose :attr:`replaced` this was said in the checkpoint."""
        self.replaced = list(replaced)
        self._left = list(replaced)

    def _remove_left(self, trainer: Trainer) -> None:
        """Remove what saves of the run before replaced, and it was killed before it could remove."""
        kept = {*self.best_k_models, self.best_model_path, self.kth_best_model_path, self.last_model_path}
        for path in self._left:
            if path not in kept and self._should_remove_checkpoint(trainer, path, ""):
                trainer.strategy.remove_checkpoint(path)
        self._left = []

    def _replaces(self, trainer: Trainer, previous: str, path: str) -> bool:
        """Whether the checkpoint to be saved at ``path`` replaces one; said in it, since a kill may leave both."""
        replaces = bool(previous) and self._should_remove_checkpoint(trainer, previous, path)
        if replaces:
            others = [one for one in self.replaced if one not in (previous, path)]
            self.replaced = [*others[1 - _REMEMBERED :], previous]
        return replaces

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_left(trainer)
        self._last_time_checked = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if not (self._step_is_due(trainer) or self._time_is_due(trainer)):
            return
        candidates = self._monitor_candidates(trainer)
        if self.monitor is not None and self.monitor not in candidates:
            self._defer_save_until_validation = True
            if self._validation_has_run:
                _warnings.warn(f"{self._missing_monitor(candidates)} No checkpoint is saved until it is logged.")
            return
        # The metric may be that of an earlier validation: with one due right after this batch, its result decides.
        if self.monitor is not None and pl_module.automatic_optimization and self._validation_follows(trainer):
            self._defer_save_until_validation = True
            return
        if self._should_skip_saving_checkpoint(trainer):
            return
        with self._state_before_manual_step(pl_module):
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._should_save_on_train_epoch_end(trainer) and not self._should_skip_saving_checkpoint(trainer):
            self._save_for_epoch(trainer, self._monitor_candidates(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._validation_has_run = not trainer.sanity_checking
        if self._should_save_on_train_epoch_end(trainer) or self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        if self._defer_save_until_validation:
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
            self._defer_save_until_validation = False
        else:
            self._save_for_epoch(trainer, candidates)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # `save_last` holds even if nothing else made a checkpoint during the run.
        if self.save_last and not self._last_checkpoint_saved:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        self._await_commit(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self.save_on_exception or self._has_nothing_to_save(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        path = self.format_checkpoint_name(candidates)
        self._save_checkpoint(trainer, path)
        self._save_last_checkpoint(trainer, candidates)
        self._await_commit(trainer)
        rank_zero_info(f"{type(exception).__name__}: {exception}. The state before it was saved to {path}")

    def _step_is_due(self, trainer: Trainer) -> bool:
        return self._every_n_train_steps >= 1 and trainer.global_step % self._every_n_train_steps == 0

    def _time_is_due(self, trainer: Trainer) -> bool:
        if self._train_time_interval is None:
            return False
        now, since = time.monotonic(), self._last_time_checked
        due = since is not None and now - since >= self._train_time_interval.total_seconds()
        # Clocks differ: process 0 decides, or some would wait in a save that the others never enter.
        due = trainer.strategy.broadcast(due)
        if due:
            self._last_time_checked = now
        return due

    def _validation_follows(self, trainer: Trainer) -> bool:
        if self._should_save_on_train_epoch_end(trainer) or not trainer.is_last_batch:
            return False
        if not trainer.enable_validation or not _total(trainer.num_val_batches):
            return False
        every = trainer.check_val_every_n_epoch
        return every is None or (trainer.current_epoch + 1) % every == 0

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return trainer.state.fn != "fit" or self._has_nothing_to_save(trainer)

    def _has_nothing_to_save(self, trainer: Trainer) -> bool:
        saved = self._last_global_step_saved == trainer.global_step
        return bool(trainer.fast_dev_run) or trainer.sanity_checking or saved

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        # Validation by time or over several epochs: it cannot be told here whether it has run for this epoch.
        if trainer.val_check_seconds is not None or trainer.check_val_every_n_epoch != 1:
            return False
        return _total(trainer.num_val_batches) == 0 or trainer.val_check_interval == 1.0

    # -- what ----------------------------------------------------------------------------------------------------------

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Copies of all metrics, with ``epoch`` and ``step`` as integers."""
        candidates = {name: torch.as_tensor(value).detach().clone() for name, value in trainer.callback_metrics.items()}
        for name, counter in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            candidates[name] = candidates[name].int() if name in candidates else torch.tensor(counter)
        return candidates

    def _save_for_epoch(self, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save_topk_checkpoint(trainer, candidates)
        saved_now = self._last_global_step_saved == trainer.global_step
        if saved_now or (self.save_last == "link" and self._last_checkpoint_saved):
            self._save_last_checkpoint(trainer, candidates)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        if self.monitor not in monitor_candidates:
            message = self._missing_monitor(monitor_candidates)
            if self._validation_has_run:
                raise MisconfigurationException(message)
            _warnings.warn(message)
        self._save_monitor_checkpoint(trainer, monitor_candidates)

    def _missing_monitor(self, candidates: dict[str, Tensor]) -> str:
        return (
            f"`ModelCheckpoint(monitor={self.monitor!r})` could not find the monitored key in the returned metrics: "
            f"{list(candidates)}. Call `self.log({self.monitor!r}, ...)` in the LightningModule, or monitor one of these."
        )

    def _save_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        assert self.monitor is not None
        current = monitor_candidates.get(self.monitor)
        if current is not None and self.check_monitor_top_k(trainer, current):
            self._update_best_and_save(current, trainer, monitor_candidates)
        elif self.verbose:
            rank_zero_info(f"{_when(monitor_candidates)}: {self.monitor!r} was not in top {self.save_top_k}")

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether ``current`` belongs to the ``save_top_k`` best; the same answer on every process."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        kth = self.best_k_models[self.kth_best_model_path]
        better = bool(current < kth) if self.mode == "min" else bool(current > kth)
        return trainer.strategy.reduce_boolean_decision(better)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        k = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        replaced = None
        if len(self.best_k_models) == k and k > 0:
            replaced = self.kth_best_model_path
            self.best_k_models.pop(replaced)

        worst, best = (max, min) if self.mode == "min" else (min, max)
        if torch.isnan(current):  # NaN compares with nothing: keep it as the worst
            current = torch.full_like(current, torch.inf if self.mode == "min" else -torch.inf)
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced)
        self.current_score = current
        self.best_k_models[path] = current
        if len(self.best_k_models) == k:
            self.kth_best_model_path = worst(self.best_k_models, key=self.best_k_models.__getitem__)
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        self.best_model_path = best(self.best_k_models, key=self.best_k_models.__getitem__)
        self.best_model_score = self.best_k_models[self.best_model_path]

        if self.verbose:
            rank_zero_info(
                f"{_when(monitor_candidates)}: {self.monitor!r} reached {current:0.5f} (best {self.best_model_score:0.5f}),"
                f" saving model to {path!r} as top {k}"
            )
        replaces = self._replaces(trainer, replaced or "", path)
        self._save_checkpoint(trainer, path)
        if replaced and replaces:
            self._remove_checkpoint(trainer, replaced)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, self.best_model_path)
        # The path is part of the state that is saved: set it before.
        previous, self.best_model_path = self.best_model_path, path
        replaces = self.save_top_k == 1 and self._replaces(trainer, previous, path)
        self._save_checkpoint(trainer, path)
        if replaces:
            self._remove_checkpoint(trainer, previous)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if not self.save_last:
            return
        path = self._unused_name(trainer, monitor_candidates, self.last_model_path, self.CHECKPOINT_NAME_LAST)
        previous, self.last_model_path = self.last_model_path, path
        replaces = self._replaces(trainer, previous, path)
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k != 0:
            self._link_checkpoint(trainer, self._last_checkpoint_saved, path)
        else:
            self._save_checkpoint(trainer, path)
        if replaces:
            self._remove_checkpoint(trainer, previous)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        with trainer.strategy.commits_in_background():
            trainer.save_checkpoint(filepath, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    @contextmanager
    def _state_before_manual_step(self, pl_module: LightningModule) -> Iterator[None]:
        """Put the newest of ``pl_module.saved_models`` into ``pl_module.layer`` while saving, with manual optimization."""
        if pl_module.automatic_optimization:
            yield
            return
        states, layer = getattr(pl_module, "saved_models", None), getattr(pl_module, "layer", None)
        if not (isinstance(states, dict) and states and isinstance(layer, torch.nn.Module)):
            _warnings.warn(
                "ModelCheckpoint(every_n_train_steps=...) with manual optimization saves the state after the optimizer's step."
                " For the state before it, set `self.saved_models[batch_idx] = {name: value.detach().clone() for name, value in"
                " self.layer.state_dict().items()}` in `training_step` before stepping."
            )
            yield
            return
        state = states[max(states)]
        if not isinstance(state, dict):
            raise TypeError(f"`{type(pl_module).__name__}.saved_models` must hold state dicts, not {type(state).__name__}.")
        current = {name: value.detach().clone() for name, value in layer.state_dict().items()}
        layer.load_state_dict(state)
        try:
            yield
        finally:
            layer.load_state_dict(current)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved_dirpath = state_dict.get("dirpath", self.dirpath)
        if self.dirpath == saved_dirpath:
            self.best_model_score = state_dict["best_model_score"]
            for name in ("kth_best_model_path", "kth_value", "best_k_models", "last_model_path"):  # old ones have not all of them
                setattr(self, name, state_dict.get(name, getattr(self, name)))
        else:
            warnings.warn(
                f"The dirpath has changed from {saved_dirpath!r} to {self.dirpath!r}. Of the old one only "
                "`best_model_path` is remembered, and no file in it will be deleted. To go on there, pass the old `dirpath`.",
                stacklevel=1,
            )
        self.best_model_path = state_dict["best_model_path"]

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Writes ``best_k_models`` (path: score) as YAML, to ``<dirpath>/best_k_models.yaml`` by default.

        Raises ValueError if there is neither a ``filepath`` nor a ``dirpath`` yet.
        """
        if filepath is None:
            if not self.dirpath:
                raise ValueError("ModelCheckpoint.to_yaml() before a run needs `filepath`: there is no `dirpath` yet.")
            filepath = os.path.join(self.dirpath, "best_k_models.yaml")
        with self._fs.open(filepath, "w") as file:
            yaml.dump({path: score.item() for path, score in self.best_k_models.items()}, file)


def _total(batches: int | float | list[int] | list[float] | list[int | float]) -> int | float:
    return sum(batches) if isinstance(batches, list) else batches


def _when(candidates: dict[str, Tensor]) -> str:
    return f"Epoch {candidates['epoch']:d}, global step {candidates['step']:d}"
