"""The limits of a fit: how long it goes on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_compat.trainer.epoch_limits import epoch_limits
from torch_compat.trainer.fit_counts import FitCounts
from torch_compat.utilities.exceptions import ArgumentTypeError, MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_debug, rank_zero_info

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class FitLimits:
    """The limits of a fit.

    Args:
        trainer: the Trainer.
        counts: what is limited.
        min_epochs, max_epochs, min_steps, max_steps: limits, -1 or None for none.

    Raises:
        MisconfigurationException: a limit below -1, or epochs that are no whole number.
        ArgumentTypeError: steps that are no whole number.
    """

    def __init__(
        self,
        trainer: Trainer,
        counts: FitCounts,
        min_epochs: int | None,
        max_epochs: int | None,
        min_steps: int | None,
        max_steps: int,
    ) -> None:
        if max_epochs is not None and (not isinstance(max_epochs, int) or max_epochs < -1):
            raise MisconfigurationException(f"`max_epochs` must be a non-negative integer or -1, no limit; found {max_epochs!r}")
        if not isinstance(max_steps, int) or max_steps < -1:
            kind = MisconfigurationException if isinstance(max_steps, int) else ArgumentTypeError
            raise kind(f"`max_steps` must be a non-negative integer or -1, no limit; found {max_steps!r}")
        self._trainer = trainer
        self._counts = counts
        self.min_epochs = min_epochs
        self.max_epochs = max_epochs
        self.min_steps = min_steps
        self.max_steps = max_steps

    @property
    def done(self) -> bool:
        """Whether training is over before another epoch."""
        if self._counts.max_batches == 0:
            rank_zero_info("`Trainer.fit` stopped: No training batches.")
            return True
        if self._reached(self._counts.progress.global_step, self.max_steps):
            rank_zero_info(f"`Trainer.fit` stopped: `max_steps={self.max_steps!r}` reached.")
            return True
        if self._reached(self._counts.epochs_over, self.max_epochs):
            rank_zero_info(f"`Trainer.fit` stopped: `max_epochs={self.max_epochs!r}` reached.")
            return True
        if self._trainer.should_stop and self.can_stop_early(say=True):
            rank_zero_debug("`Trainer.fit` stopped: `trainer.should_stop` was set.")
            return True
        return False

    @staticmethod
    def _reached(value: int, limit: int | None) -> bool:
        return limit not in (None, -1) and value >= limit  # pyright: ignore[reportOperatorIssue]

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train: as :attr:`done`, or no batch is allowed."""
        return self.done or self._trainer.limit_train_batches == 0

    @property
    def stopping(self) -> bool:
        """Whether ``should_stop`` ends training."""
        return self._trainer.should_stop and self.can_stop_early()

    def can_stop_early(self, *, say: bool = False) -> bool:
        """Whether ``should_stop`` may end training: the minimum of epochs and steps is reached."""
        met = (not self.min_epochs or self._counts.epochs_over >= self.min_epochs) and (
            not self.min_steps or self._counts.progress.global_step >= self.min_steps
        )
        if say and not met:
            rank_zero_info(
                f"Trainer was signaled to stop but the required `min_epochs={self.min_epochs!r}` or "
                f"`min_steps={self.min_steps!r}` is not reached: training goes on until then."
            )
        return met

    def set_epoch_limits(self) -> None:
        """Fill in, as a fit begins, the limits in epochs that were not given."""
        limits = (self.min_steps, self.max_steps, self.min_epochs, self.max_epochs)
        self.min_epochs, self.max_epochs = epoch_limits(*limits, self._trainer)

    def epoch_done(self) -> bool:
        """Whether no more batches of the epoch are taken."""
        counts = self._counts
        over = counts.progress.batch >= counts.max_batches or counts.is_last_batch
        return over or self._reached(counts.progress.global_step, self.max_steps) or self.stopping

    def stepping_batches(self) -> int | float:
        """Optimizer steps that a run will take, by the batches of its epochs."""
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        if self._counts.max_batches == float("inf"):
            return self.max_steps
        updates = math.ceil(self._counts.max_batches / self._trainer.accumulate_grad_batches)
        steps = updates * max(self.max_epochs or 1, 1)
        return min(self.max_steps, steps) if self.max_steps != -1 else steps
