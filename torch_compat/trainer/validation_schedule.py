"""The schedule of the validations inside of a fit: after so many batches, after an epoch's last, or after a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch_compat.trainer.fit_counts import Progress
from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class ValidationSchedule:
    """The schedule of validations, as the Trainer's arguments have it.

    Args:
        trainer: the Trainer, whose arguments may be assigned anew.

    Attributes:
        check_batch: batches between validations; infinite for one after each epoch, None where time decides.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.check_batch: int | float | None = None
        self._last = 0.0

    def begin(self) -> None:
        """Count the time from here on: training begins, or a validation has ended."""
        self._last = time.monotonic()

    def set_batches(self, max_batches: int | float) -> None:
        """Find :attr:`check_batch` for epochs of ``max_batches``, infinite where the loader has no length.

        Raises:
            ValueError: more batches than an epoch has.
            MisconfigurationException: a part of an epoch without a length.
        """
        trainer = self._trainer
        interval = trainer.val_check_interval
        if trainer.val_check_seconds is not None:
            self.check_batch = None
        elif isinstance(interval, int):
            self.check_batch = interval
            if interval > max_batches and trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0:
                raise ValueError(
                    f"`val_check_interval` ({interval}) must be less than or equal to an epoch's number of batches, "
                    f"{max_batches}: nothing would be validated. To count training batches over all epochs pass "
                    "`check_val_every_n_epoch=None`; to validate never, `limit_val_batches=0`."
                )
        elif max_batches == float("inf"):
            if interval != 1.0:
                raise MisconfigurationException(
                    "When using an IterableDataset for `train_dataloader`, `Trainer(val_check_interval)` must be `1.0` or an "
                    "int, a number of batches: the loader has no length to take a part of."
                )
            self.check_batch = float("inf")
        else:
            self.check_batch = max(1, int(max_batches * interval))

    def has_epoch(self, epoch: int) -> bool:
        """Whether the epoch of this index is one of those with validation."""
        every = self._trainer.check_val_every_n_epoch
        return (every is None or not (epoch + 1) % every) and self._trainer.enable_validation

    def is_due(self, progress: Progress, batch_idx: int, *, last: bool, stopping: bool) -> bool:
        """Whether a validation follows a batch; where time decides all processes must call this.

        Args:
            progress: of training, before the batch counts.
            batch_idx: of the batch in its epoch.
            last: whether it is the epoch's last.
            stopping: whether training ends after it.
        """
        return self._interval_is_over(progress, batch_idx, last=last, stopping=stopping) and self.has_epoch(progress.epoch)

    def _interval_is_over(self, progress: Progress, batch_idx: int, *, last: bool, stopping: bool) -> bool:
        trainer = self._trainer
        if (last and self.check_batch == float("inf")) or stopping:
            return True
        if trainer.val_check_seconds is not None:
            due = time.monotonic() - self._last >= trainer.val_check_seconds
            return trainer.strategy.broadcast(due)
        if self.check_batch == float("inf"):
            return False
        assert self.check_batch is not None
        done = (progress.total_batch if trainer.check_val_every_n_epoch is None else batch_idx) + 1
        return done % self.check_batch == 0
