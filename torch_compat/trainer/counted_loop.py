"""The counters of the fit loop, under our names and stock's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torch_compat.trainer import counters
from torch_compat.trainer.counters import Began, Stage
from torch_compat.trainer.epoch_loop import TrainingEpochLoop
from torch_compat.trainer.loop import Loop
from torch_compat.trainer.progress import _Progress
from torch_compat.trainer.results import Results

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


class CountedFitLoop(Loop):
    """Counters of a fit loop, and how stock shows them.

    Attributes:
        progress: the counters.
        batch_stage: how far the current batch is.
        began: the counters when the current epoch's batches began.
        scheduler_steps: steps that the Trainer made of schedulers.
        shown_batches: batches of the epoch before, until this one's begin; then None.
        epoch_loop: the loop over an epoch's batches, for whoever looks for the counters there.
    """

    results: Results
    min_steps: int | None
    max_steps: int

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.progress = Progress()
        self.max_batches: int | float = float("inf")
        self.is_last_batch = False
        self._ended_with_last = False  # the epoch before: its last batch was taken
        self._phase = Phase.BETWEEN
        self.batch_stage = Stage.NONE
        self.began = Began()
        self.scheduler_steps = 0
        self.shown_batches: int | None = None
        self._resumed: dict[str, Any] | None = None  # this process's part of a checkpoint, until it is taken up
        self.resumed_batches = 0
        self.epoch_loop = TrainingEpochLoop(self)

    @property
    def epoch_progress(self) -> _Progress:
        """Counts of epochs."""
        return counters.epochs(self)

    @property
    def epoch_stage(self) -> Stage:
        """The stage of the current epoch."""
        return Stage(self._phase)

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch; -1 before the first."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch over all epochs; -1 before the first."""
        return self.epoch_loop.total_batch_idx

    @property
    def restarting(self) -> bool:
        """Whether the run goes on inside of an epoch, from a checkpoint, and has not taken a batch yet."""
        return bool(self.resumed_batches)

    @property
    def shown_last_batch(self) -> bool:
        """Whether the current batch, or where none is current the one before, is its epoch's last."""
        if self.shown_batches is not None or not self.batch_stage:
            return self._phase is not Phase.BATCHES and self._ended_with_last
        return self.all_batches_done

    @property
    def is_automatic(self) -> bool:
        """Whether the Trainer optimizes; before a module is known, it will."""
        module = self._trainer._module
        return module is None or module.automatic_optimization

    @property
    def has_gradients(self) -> bool:
        """Whether the last batch only added its gradients."""
        done = self.progress.batch + (self.batch_stage >= Stage.PROCESSED)
        return self._phase is Phase.BATCHES and done % self._trainer.accumulate_grad_batches != 0 and not self._all_done(done)

    def _all_done(self, batches: int) -> bool:
        return batches >= self.max_batches or (self.is_last_batch and batches > self.progress.batch)

    def epoch_done(self) -> bool:
        """Whether no more batches of the epoch are taken."""
        raise NotImplementedError

    def accumulates(self) -> bool:
        """Whether the current batch only adds its gradients."""
        raise NotImplementedError

    def _should_accumulate(self) -> bool:
        return self.accumulates()

    @property
    def all_batches_done(self) -> bool:
        """Whether the current batch is the epoch's last."""
        return self.is_last_batch or self.progress.batch + 1 >= self.max_batches

    @property
    def _results(self) -> Results:
        return self.results
