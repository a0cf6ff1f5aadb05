"""The training loaders of a fit, and the iterators of its epochs."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from torch_compat.trainer.data import host_random, in_flight
from torch_compat.trainer.data.data_source import DataSource
from torch_compat.trainer.data.epoch_batches import EpochBatches
from torch_compat.trainer.fit_counts import FitCounts
from torch_compat.trainer.validation_schedule import ValidationSchedule
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from torch_compat.trainer.results import Results
    from torch_compat.trainer.resumption import Resumption
    from torch_compat.trainer.trainer import Trainer


class TrainingData:
    """The batches of a fit.

    Args:
        trainer: the Trainer.
        counts: where training is; they are told how many batches an epoch has.
        validation: the schedule that is told as well.
        resumption: where a checkpoint lets the fit go on.

    Attributes:
        source: where training batches come from.
    """

    def __init__(self, trainer: Trainer, counts: FitCounts, validation: ValidationSchedule, resumption: Resumption) -> None:
        self._trainer = trainer
        self._counts = counts
        self._validation = validation
        self._resumption = resumption
        self.source = DataSource(trainer, "train", "max_size_cycle")
        self._epoch: EpochBatches | None = None

    def setup(self) -> None:
        """Load the training loader, again where ``reload_dataloaders_every_n_epochs`` says so, and make its iterator.

        Where no batch is allowed, none is asked for.
        """
        every = self._trainer.reload_dataloaders_every_n_epochs
        due = every and self._trainer.current_epoch - self.source.loaded_at_epoch >= every
        if (self.source.combined is None or due) and self._trainer.limit_train_batches != 0:
            self.load()
            self._begin()

    def load(self) -> None:
        """Load the training loader, and count its batches.

        Raises:
            ValueError: loaders of which one is to follow the other.
        """
        trainer = self._trainer
        self.source.load()
        self.source.loaded_at_epoch = trainer.current_epoch
        self._count()

    def _count(self) -> None:
        trainer = self._trainer
        self.source.limit(trainer.limit_train_batches)
        if self.source.is_sequential:
            raise ValueError(
                '`_FitLoop` does not support the `CombinedLoader(mode="sequential")` mode: a step takes a batch of every '
                "training loader. Choose 'min_size', 'max_size', or 'max_size_cycle', or concatenate the datasets (ConcatDataset)"
            )
        batches = self._counts.max_batches = self.source.length()
        if batches == 0:
            self.source.warn_of_no_batches()
        self._validation.set_batches(batches)
        if trainer.loggers and batches < trainer.log_every_n_steps and not trainer.fast_dev_run:
            rank_zero_warn(
                f"The number of training batches ({batches}) is smaller than the logging interval "
                f"Trainer(log_every_n_steps={trainer.log_every_n_steps}). Values of single steps may be missing in "
                f"the logs: pass `log_every_n_steps={batches}` or less.",
                category=PossibleUserWarning,
            )

    def share(self, other: TrainingData) -> None:
        """Take the loaders of another fit, if it has loaded them, and their iterators."""
        if other.source.combined is not None:
            self.source.combined, self.source.loaded_at_epoch = other.source.combined, other.source.loaded_at_epoch
            self._count()
            self._epoch = other._epoch

    def _begin(self) -> None:
        """Make the iterators of loaders that were just loaded: here, as in stock, since they draw from the random streams.

        Where a checkpoint says where they are, draw what that draws.
        """
        if self._resumption.state is not None:
            self.source.draw_as_begun()
            return
        self.close()
        self._epoch = self.source.epoch_batches()
        with self._reading():
            self._epoch.begin()

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        """The loader is waited for outside of the batches."""
        preemption = self._trainer.preemption
        return contextlib.nullcontext() if preemption is None else preemption.reading_again()

    def begin_epoch(self, resumed: int, results: Results) -> EpochBatches:
        """Begin the epoch's data, or continue it where a checkpoint was saved, metrics in flight and random streams included.

        The iterators that were made when the loaders were loaded serve the first epoch, or that of a checkpoint.

        Args:
            resumed: batches of the epoch that have been taken before.
            results: what its batches have logged.
        """
        with self._reading():
            state, self._resumption.state = self._resumption.state, None
            if state is not None:
                self.close()
                self._epoch = self.source.epoch_batches()
                self._epoch.resume(state["train"]["position"], resumed)
                if state["train"]["inside"]:
                    results.load_state_dict(state["results"], self._trainer.lightning_module)
                    self._trainer.metric_log.first_batch = True  # was the one before, or an earlier one
                    host_random.set_streams(state["streams"])
                return self._epoch
            if self._epoch is None or self._begins_anew:
                self._begin()
            assert self._epoch is not None
            for _ in itertools.islice(self._epoch, resumed):  # of a checkpoint that does not say how its epoch began
                pass
            return self._epoch

    @property
    def _begins_anew(self) -> bool:
        """Whether an epoch makes iterators although there are some that have not been used: all but the first, as in stock."""
        return self._counts.progress.epoch > 0 and not self._resumption.loaded

    def state(self) -> dict[str, Any]:
        """The position of the loaders after the steps that have run; of this process."""
        counts = self._counts
        batches = counts.progress.batch + int(counts.step_ran) if counts.is_inside else 0
        if self._epoch is None or (self._begins_anew and not counts.is_inside):
            return {"inside": False, "loaders": in_flight.loaders_between(self.source.combined)}
        return {"inside": counts.is_inside, "batches": batches, "position": self._epoch.position(batches)}

    def resume_between_epochs(self) -> None:
        """Restore random streams and the loaders' lasting state; the training loaders' where no epoch is continued."""
        state = self._resumption.state
        if state is None:
            return
        in_flight.resume_loaders(self._trainer.validate_loop.source.combined, state["val"], "val_dataloader")
        host_random.set_streams(state["streams"])
        if "position" not in state["train"]:
            self.close()
            in_flight.resume_loaders(self.source.combined, state["train"]["loaders"], "train_dataloader")
            self._resumption.state = None

    def close(self) -> None:
        """Let the loaders' iterators and their workers go."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None
