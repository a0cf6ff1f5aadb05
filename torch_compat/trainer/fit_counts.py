"""The counts of a fit: where training is. :mod:`torch_compat.trainer.counters` gives them in the form of stock's trackers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from torch_compat.trainer.counters import Began, Stage

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class Phase(IntEnum):
    """The phase of an epoch that the loop is in."""

    BETWEEN = Stage.NONE
    STARTING = Stage.READY
    BATCHES = Stage.STARTED
    ENDING = Stage.PROCESSED


@dataclass
class Progress:
    """The progress of training; saved in checkpoints.

    Attributes:
        epoch: epochs finished.
        batch: batches of the current epoch whose step ran (or was skipped).
        total_batch: the same over all epochs.
        global_step: optimizer steps.
        logged_step: batches that ended with an optimizer step: the loggers' step.
    """

    epoch: int = 0
    batch: int = 0
    total_batch: int = 0
    global_step: int = 0
    logged_step: int = 0


class FitCounts:
    """The counts of a fit, and what follows from them.

    Args:
        trainer: the Trainer, whose ``accumulate_grad_batches`` may be assigned anew.

    Attributes:
        progress: the counters.
        phase: of the epoch.
        batch_stage: how far the current batch is.
        step_ran: the current batch's step has run, its counters have not moved yet.
        began: the counters when the current epoch's batches began.
        max_batches: batches of an epoch; infinite where the loader has no length.
        is_last_batch: the current batch is known to be its epoch's last.
        ended_with_last: the epoch before: its last batch was taken.
        scheduler_steps: steps that the Trainer made of schedulers.
        shown_batches: batches of the epoch before, until this one's begin; then None.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.progress = Progress()
        self.phase = Phase.BETWEEN
        self.batch_stage = Stage.NONE
        self.step_ran = False
        self.began = Began()
        self.max_batches: int | float = float("inf")
        self.is_last_batch = False
        self.ended_with_last = False
        self.scheduler_steps = 0
        self.shown_batches: int | None = None

    @property
    def epoch_stage(self) -> Stage:
        """The stage of the current epoch."""
        return Stage(self.phase)

    @property
    def is_inside(self) -> bool:
        """Whether the batches of an epoch are being taken."""
        return self.phase is Phase.BATCHES

    @property
    def epochs_over(self) -> int:
        """Epochs whose batches are over: in ``on_train_epoch_end`` the current one, too."""
        return self.progress.epoch + (self.phase is Phase.ENDING)

    @property
    def all_batches_done(self) -> bool:
        """Whether the current batch is the epoch's last."""
        return self.is_last_batch or self.progress.batch + 1 >= self.max_batches

    @property
    def shown_last_batch(self) -> bool:
        """Whether the current batch, or where none is current the one before, is its epoch's last."""
        if self.shown_batches is not None or not self.batch_stage:
            return not self.is_inside and self.ended_with_last
        return self.all_batches_done

    @property
    def has_gradients(self) -> bool:
        """Whether the last batch only added its gradients."""
        done = self.progress.batch + (self.batch_stage >= Stage.PROCESSED)
        all_done = done >= self.max_batches or (self.is_last_batch and done > self.progress.batch)
        return self.is_inside and done % self._trainer.accumulate_grad_batches != 0 and not all_done

    def accumulates(self) -> bool:
        """Whether the current batch only adds its gradients."""
        full = (self.progress.batch + 1) % self._trainer.accumulate_grad_batches == 0
        return not (full or self.all_batches_done)

    def begin_epoch(self, batches: int, *, loaded: bool) -> None:
        """An epoch begins after so many batches of it, which a checkpoint (``loaded``) has seen."""
        self.phase = Phase.STARTING
        if not loaded:
            self.shown_batches = self.progress.batch
        self.is_last_batch = False
        self.progress.batch = batches

    def begin_batches(self) -> None:
        """The batches of an epoch begin."""
        self.began = Began(self.progress.global_step, self.scheduler_steps)
        self.phase = Phase.BATCHES

    def end_batches(self) -> None:
        """No more batches of an epoch are taken."""
        self.ended_with_last = self.is_last_batch or self.progress.batch >= self.max_batches
        self.phase = Phase.ENDING

    def end_batch(self, batches: int = 1) -> None:
        """The current batch is over, with all of its hooks; -1: it is current again."""
        self.progress.batch += batches
        self.progress.total_batch += batches
        self.step_ran = batches < 0
        self.batch_stage = Stage.COMPLETED if batches < 0 else Stage.NONE
