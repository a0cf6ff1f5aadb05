"""The limits of a fit: how long it goes on, and how many batches its epochs have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch_compat.trainer.counted_loop import CountedFitLoop, Phase
from torch_compat.trainer.data.data_source import DataSource
from torch_compat.trainer.epoch_limits import epoch_limits
from torch_compat.trainer.validation_schedule import ValidationSchedule
from torch_compat.utilities.exceptions import ArgumentTypeError, MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class LimitedFitLoop(CountedFitLoop):
    """The limits of a fit loop.

    Args:
        trainer: the Trainer.
        min_epochs, max_epochs, min_steps, max_steps: limits, -1 or None for none.

    Attributes:
        source: where training batches come from.
        validation: when batches are followed by a validation.

    Raises:
        MisconfigurationException: a limit below -1, or epochs that are no whole number.
        ArgumentTypeError: steps that are no whole number.
    """

    def __init__(
        self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None, min_steps: int | None, max_steps: int
    ) -> None:
        if max_epochs is not None and (not isinstance(max_epochs, int) or max_epochs < -1):
            raise MisconfigurationException(f"`max_epochs` must be a non-negative integer or -1, no limit; found {max_epochs!r}")
        if not isinstance(max_steps, int) or max_steps < -1:
            kind = MisconfigurationException if isinstance(max_steps, int) else ArgumentTypeError
            raise kind(f"`max_steps` must be a non-negative integer or -1, no limit; found {max_steps!r}")
        super().__init__(trainer)
        self.min_epochs = min_epochs
        self.max_epochs = max_epochs
        self.min_steps = min_steps
        self.max_steps = max_steps
        self.source = DataSource(trainer, "train", "max_size_cycle")
        self.validation = ValidationSchedule(trainer)

    @property
    def done(self) -> bool:
        """Whether training is over before another epoch."""
        if self.max_batches == 0:
            rank_zero_info("`Trainer.fit` stopped: No training batches.")
            return True
        if self._reached(self.progress.global_step, self.max_steps):
            rank_zero_info(f"`Trainer.fit` stopped: `max_steps={self.max_steps!r}` reached.")
            return True
        if self._reached(self._epochs_over, self.max_epochs):
            rank_zero_info(f"`Trainer.fit` stopped: `max_epochs={self.max_epochs!r}` reached.")
            return True
        if self._trainer.should_stop and self.can_stop_early(say=True):
            rank_zero_debug("`Trainer.fit` stopped: `trainer.should_stop` was set.")
            return True
        return False

    @property
    def _epochs_over(self) -> int:
        """Epochs whose batches are over: in ``on_train_epoch_end`` the current one, too."""
        return self.progress.epoch + (self._phase is Phase.ENDING)

    @staticmethod
    def _reached(value: int, limit: int | None) -> bool:
        return limit not in (None, -1) and value >= limit  # pyright: ignore[reportOperatorIssue]

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train: as :attr:`done`, or no batch is allowed."""
        return self.done or self._trainer.limit_train_batches == 0

    @property
    def _can_stop_early(self) -> bool:
        return self.can_stop_early()

    @property
    def _combined_loader(self) -> Any:
        return self.source.combined

    def can_stop_early(self, *, say: bool = False) -> bool:
        """Whether ``should_stop`` may end training: the minimum of epochs and steps is reached."""
        met = (not self.min_epochs or self._epochs_over >= self.min_epochs) and (
            not self.min_steps or self.progress.global_step >= self.min_steps
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
        return (
            self.progress.batch >= self.max_batches
            or self.is_last_batch
            or self._reached(self.progress.global_step, self.max_steps)
            or (self._trainer.should_stop and self.can_stop_early())
        )

    def accumulates(self) -> bool:
        """Whether the current batch only adds its gradients."""
        full = (self.progress.batch + 1) % self._trainer.accumulate_grad_batches == 0
        return not (full or self.all_batches_done)

    def stepping_batches(self) -> int | float:
        """Optimizer steps that a run will take; loads the training loader if that has not happened."""
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        if self._trainer._module is None:  # nothing to ask for a loader
            return self.max_steps
        if self.source.combined is None:
            rank_zero_info("Loading `train_dataloader` to estimate number of stepping batches.")
            self.setup_data()
        if self.max_batches == float("inf"):
            return self.max_steps
        steps = math.ceil(self.max_batches / self._trainer.accumulate_grad_batches) * max(self.max_epochs or 1, 1)
        return min(self.max_steps, steps) if self.max_steps != -1 else steps

    # -- batches of an epoch ---------------------------------------------------------------------------------------

    def setup_data(self) -> None:
        """Load the training loader, again where ``reload_dataloaders_every_n_epochs`` says so, and make its iterator.

        Where no batch is allowed, none is asked for.
        """
        every = self._trainer.reload_dataloaders_every_n_epochs
        due = every and self._trainer.current_epoch - self.source.loaded_at_epoch >= every
        if (self.source.combined is None or due) and self._trainer.limit_train_batches != 0:
            self.load_data()
            self.begin_data()

    def begin_data(self) -> None:
        """Make the iterators of loaders that were just loaded: here, as in stock, since they draw from the random streams."""
        raise NotImplementedError

    def load_data(self) -> None:
        """Load the training loader, and count its batches.

        Raises:
            ValueError: loaders of which one is to follow the other.
        """
        trainer = self._trainer
        self.source.load()
        self.source.loaded_at_epoch = trainer.current_epoch
        self.source.limit(trainer.limit_train_batches)
        if self.source.is_sequential:
            raise ValueError(
                '`_FitLoop` does not support the `CombinedLoader(mode="sequential")` mode: a step takes a batch of every '
                "training loader. Choose 'min_size', 'max_size', or 'max_size_cycle', or concatenate the datasets (ConcatDataset)"
            )
        self.max_batches = self.source.length()
        if self.max_batches == 0:
            self.source.warn_of_no_batches()
        self.validation.set_batches(self.max_batches)
        if trainer.loggers and self.max_batches < trainer.log_every_n_steps and not trainer.fast_dev_run:
            rank_zero_warn(
                f"The number of training batches ({self.max_batches}) is smaller than the logging interval "
                f"Trainer(log_every_n_steps={trainer.log_every_n_steps}). Values of single steps may be missing in "
                f"the logs: pass `log_every_n_steps={self.max_batches}` or less.",
                category=PossibleUserWarning,
            )
