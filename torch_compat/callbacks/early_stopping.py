"""``EarlyStopping``: ends training when a metric no longer improves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import LOGGER_NAME, rank_prefixed_message, rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

log = logging.getLogger(f"{LOGGER_NAME}.callbacks.early_stopping")


class EarlyStoppingReason(Enum):
    """Why ``EarlyStopping`` ended training."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Ends training when ``monitor`` has not improved in ``patience`` checks, or has left its bounds.

    ::

        trainer = pl.Trainer(callbacks=[EarlyStopping("val_loss", patience=3)])

    Args:
        monitor: logged metric to watch.
        min_delta: an improvement must be larger than this.
        patience: checks without improvement after which training ends. A check is a validation run, or a training epoch.
        verbose: report improvements and the reason of the end.
        mode: "min" or "max": which ``monitor`` is better.
        strict: raise if ``monitor`` was not logged; otherwise there is no check (and a warning with ``verbose``).
        check_finite: end when ``monitor`` is NaN or infinite.
        stopping_threshold: end when ``monitor`` is better than this.
        divergence_threshold: end when ``monitor`` is worse than this.
        check_on_train_epoch_end: check at the end of training epochs (True) or of validation (False). None: of training epochs
            if validation runs exactly once in each.
        log_rank_zero_only: report on process 0 only.

    Afterwards ``stopped_epoch`` (0 if not stopped), ``stopping_reason`` and ``stopping_reason_message`` say what happened.

    Raises:
        MisconfigurationException: ``mode`` is neither "min" nor "max".
        RuntimeError: ``monitor`` was not logged (in a run, with ``strict``).

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.EarlyStopping.html
    """

    mode_dict: ClassVar[dict[str, Callable[..., Tensor]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        if mode not in self.mode_dict:
            raise MisconfigurationException(f"`mode` can be min, max, got {mode}: is a smaller or a larger `monitor` better?")
        self.monitor = monitor
        self.mode = mode
        self.min_delta = min_delta if mode == "max" else -min_delta
        self.patience = patience
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.best_score = torch.tensor(torch.inf if mode == "min" else -torch.inf)
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._check_on_train_epoch_end = check_on_train_epoch_end

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """``torch.lt`` or ``torch.gt``: whether the first argument is better than the second."""
        return self.mode_dict[self.mode]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._check_on_train_epoch_end is None:
            self._check_on_train_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._check_on_train_epoch_end and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._check_on_train_epoch_end and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def _should_skip_check(self, trainer: Trainer) -> bool:
        return trainer.state.fn != "fit" or trainer.sanity_checking

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run or not self._validate_condition_metric(trainer.callback_metrics):
            return
        current = torch.as_tensor(trainer.callback_metrics[self.monitor]).detach().clone().squeeze()
        should_stop, message = self._evaluate_stopping_criteria(current)
        # One process that stops stops all: a metric that was not synchronised may differ between them.
        should_stop = trainer.strategy.reduce_boolean_decision(should_stop, all=False)
        trainer.should_stop = trainer.should_stop or should_stop
        if should_stop:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
        if message and self.verbose:
            self._log_info(trainer, message, self.log_rank_zero_only)

    def _validate_condition_metric(self, logs: dict[str, Tensor]) -> bool:
        if self.monitor in logs:
            return True
        message = (
            f"Early stopping conditioned on metric `{self.monitor}` which is not available: logged were only {list(logs)}."
            f" Call `self.log({self.monitor!r}, ...)` in the LightningModule, or monitor one of these."
        )
        if self.strict:
            raise RuntimeError(message)
        if self.verbose:
            rank_zero_warn(message, category=RuntimeWarning)
        return False

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Whether to stop, and what to report."""
        stop = self._bound_left(current)
        if stop is not None:
            self.stopping_reason, message = stop
            return True, f"{message} Signaling Trainer to stop."
        if self.monitor_op(current - self.min_delta, self.best_score.to(current.device)):
            message = self._improvement_message(current)
            self.best_score = current
            self.wait_count = 0
            return False, message
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
        return True, (
            f"Monitored metric {self.monitor} did not improve in the last {self.wait_count} records."
            f" Best score: {self.best_score:.3f}. Signaling Trainer to stop."
        )

    def _bound_left(self, current: Tensor) -> tuple[EarlyStoppingReason, str] | None:
        if self.check_finite and not torch.isfinite(current):
            message = f"Monitored metric {self.monitor} = {current} is not finite. Previous best value was {self.best_score:.3f}."
            return EarlyStoppingReason.NON_FINITE_METRIC, message
        order = self.order_dict[self.mode]
        if self.stopping_threshold is not None and self.monitor_op(current, self.stopping_threshold):
            message = f"Stopping threshold reached: {self.monitor} = {current} {order} {self.stopping_threshold}."
            return EarlyStoppingReason.STOPPING_THRESHOLD, message
        if self.divergence_threshold is not None and self.monitor_op(-current, -self.divergence_threshold):
            message = f"Divergence threshold reached: {self.monitor} = {current} {order} {self.divergence_threshold}."
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, message
        return None

    def _improvement_message(self, current: Tensor) -> str:
        if not torch.isfinite(self.best_score):
            return f"Metric {self.monitor} improved. New best score: {current:.3f}"
        return (
            f"Metric {self.monitor} improved by {abs(self.best_score - current):.3f} >= min_delta = {abs(self.min_delta)}."
            f" New best score: {current:.3f}"
        )

    @staticmethod
    def _log_info(trainer: Trainer, message: str, log_rank_zero_only: bool) -> None:
        rank = trainer.global_rank if trainer.num_nodes > 1 else None  # one process speaks for all of its devices
        if rank is None or not log_rank_zero_only or rank == 0:
            log.info(rank_prefixed_message(message, rank))

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = state_dict["best_score"]
        self.patience = state_dict["patience"]
        # Lightning before 2.6 saved no reason.
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", EarlyStoppingReason.NOT_STOPPED.value))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
