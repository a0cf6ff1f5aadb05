"""Search for the largest batch size that fits into memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch_compat.tuner.trial import Snapshot, evaluation_loop_of_a_trial, fit_loop_of_a_trial, trial
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.memory import garbage_collection_cuda, is_oom_error
from torch_compat.utilities.parsing import lightning_getattr, lightning_setattr
from torch_compat.utilities.rank_zero import LOGGER_NAME, rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

log = logging.getLogger(f"{LOGGER_NAME}.tuner.batch_size_scaling")


def scale_batch_size(
    trainer: Trainer,
    mode: str = "power",
    steps_per_trial: int = 3,
    init_val: int = 2,
    max_trials: int = 25,
    batch_arg_name: str = "batch_size",
    margin: float = 0.05,
    max_val: int = 8192,
) -> int | None:
    """Search inside of a run that is set up; see :meth:`torch_compat.tuner.Tuner.scale_batch_size`."""
    if trainer.fast_dev_run:
        rank_zero_warn("Skipping batch size scaler since `fast_dev_run` is enabled.")
        return None
    with trial(trainer) as snapshot:
        search = _Search(trainer, snapshot, steps_per_trial, max_trials, batch_arg_name, max_val)
        search.set(init_val)
        size = search.by_powers() if mode == "power" else search.by_halves(margin)
        search.end()
        garbage_collection_cuda()
        log.info(f"Finished batch size finder, will continue with full run using batch size {size}")
    return size


def check_loaders(trainer: Trainer) -> None:
    """Whether the run's loaders can be made again with another batch size.

    Raises:
        MisconfigurationException: they were passed to the Trainer, or there are several.
    """
    loop: Any = _active_loop(trainer)
    if loop.source.given is not None:
        raise MisconfigurationException(
            "The batch scaling feature cannot be used with dataloaders passed directly to `.fit()`: it makes"
            " loaders of several sizes. Implement `train_dataloader` in the module or a LightningDataModule, with the batch size"
            " as an attribute."
        )
    if trainer.state.fn != "fit" and loop.source.count() > 1:
        raise MisconfigurationException(
            f"The Batch size finder cannot be used with multiple {loop.source.prefix} dataloaders: pass `batch_size` yourself."
        )


class _Search:
    """Tries batch sizes one after the other, each in a loop of its own; the first on the loaders of the size before."""

    def __init__(self, trainer: Trainer, snapshot: Snapshot, steps: int, max_trials: int, attribute: str, max_val: int) -> None:
        self._trainer = trainer
        self._snapshot = snapshot
        self._steps = steps
        self._max_trials = max_trials
        self._attribute = attribute
        self._max_val = max_val
        self._fits_model = trainer.state.fn == "fit"
        self._own: Any = (trainer.fit_loop, trainer.validate_loop) if self._fits_model else _active_loop(trainer)
        self._limits = {
            name: getattr(trainer, name) for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches")
        }
        self._loop: Any = None
        if self._fits_model:
            trainer.limit_train_batches, trainer.limit_val_batches = 1.0, steps
        elif trainer.state.fn != "predict":
            trainer.limit_val_batches = trainer.limit_test_batches = steps
        self._new_loop(goes_on=True)

    def _new_loop(self, *, goes_on: bool = False) -> None:
        trainer = self._trainer
        if self._fits_model:
            if self._loop is not None:
                self._loop.data.close()
                trainer.fit_loop, trainer.validate_loop = self._own
            self._loop = fit_loop_of_a_trial(trainer, self._steps, goes_on=goes_on)
        else:
            self._loop = evaluation_loop_of_a_trial(trainer)

    @property
    def size(self) -> int:
        return int(lightning_getattr(self._trainer.lightning_module, self._attribute))

    def set(self, size: int, because: str | None = None) -> bool:
        """Set the size, unless the one before had the whole dataset in one batch; whether it changed."""
        before = self.size
        length = self._dataset_length()
        if length is not None and before * self._trainer.strategy.data_parallel_size >= length:
            rank_zero_info(
                f"The batch size {before} is greater or equal than the length of your dataset: {length}. No larger one is tried."
            )
            return False
        if size > self._max_val:
            if because:
                rank_zero_info(f"Batch size {size} exceeds max_val limit {self._max_val}, capping at {self._max_val}")
            size = self._max_val
        if because:
            rank_zero_info(f"Batch size {before} {because}, trying batch size {size}")
        lightning_setattr(self._trainer.lightning_module, self._attribute, size)
        return size != before

    def by_powers(self) -> int:
        """Double the size until it does not fit."""
        succeeded = False
        for number in range(1, self._max_trials + 1):
            if self._is_largest():
                break
            if self._fits():
                if number == self._max_trials or not self.set(2 * self.size, "succeeded"):
                    break
                succeeded = True
                self._load()
            else:
                self.set(self.size // 2, "failed")
                self._load()
                if succeeded:
                    break
        return self.size

    def by_halves(self, margin: float) -> int:
        """Double the size until it does not fit, then halve the interval; the result is made smaller by ``margin``."""
        low, high, count = 1, None, 0
        while not self._is_largest():
            if self._fits():
                count += 1
                if count >= self._max_trials:
                    break
                low = self.size
                if high is not None and high - low <= 1:
                    break
                if not self.set(2 * low if high is None else (high + low) // 2, "succeeded"):
                    break
                self._load()
            else:
                high = self.size
                self.set((high + low) // 2, "failed")
                self._load()
                if high - low <= 1:
                    break
        smaller = max(1, int(self.size * (1 - margin)))
        if smaller != self.size:
            rank_zero_info(f"Applying margin of {margin:.1%}, reducing batch size from {self.size} to {smaller}")
            lightning_setattr(self._trainer.lightning_module, self._attribute, smaller)
        return self.size

    def end(self) -> None:
        """Give the run its own loops again, with loaders of the size that was found."""
        trainer = self._trainer
        for name, limit in self._limits.items():
            setattr(trainer, name, limit)
        if not self._fits_model:
            loop = self._own
            setattr(trainer, f"{_name(trainer)}_loop", loop)
            loop.begin_again()
            return
        self._loop.data.close()
        trainer.fit_loop, trainer.validate_loop = self._own
        for loop in self._own:
            loop.source.combined = None
        self._load_all()

    def _load(self) -> None:
        """Ask for the loaders again, with the size that is set, for the next trial."""
        if self._fits_model:
            self._new_loop()
            self._load_all()
        else:
            self._loop.source.load()

    def _load_all(self) -> None:
        trainer = self._trainer
        trainer.fit_loop.setup_data()
        if not trainer.validate_loop.skip:
            trainer.validate_loop.setup_data()

    def _is_largest(self) -> bool:
        if self.size >= self._max_val:
            rank_zero_info(f"Reached the maximum batch size limit of {self._max_val}. Stopping search.")
            return True
        return False

    def _fits(self) -> bool:
        """Whether some steps with the present size run.

        Raises:
            RuntimeError: any but that memory ran out.
        """
        garbage_collection_cuda()
        if not self._fits_model:
            self._new_loop()
        try:
            self._loop.run()
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
        else:
            return True
        self._snapshot.restore()  # the step that failed may have taken its arrays with it
        return False

    def _dataset_length(self) -> int | None:
        """Samples of the loaders, None if unknown."""
        if self._fits_model:
            self._loop.setup_data()
        else:
            self._loop.source.load()
        try:
            return sum(len(loader.dataset) for loader in self._loop.source.combined.flattened)  # a mesh's has the user's dataset
        except (TypeError, AttributeError, NotImplementedError):
            return None


def _name(trainer: Trainer) -> str:
    assert trainer.state.fn is not None
    return trainer.state.fn.value


def _active_loop(trainer: Trainer) -> Any:
    return getattr(trainer, f"{_name(trainer)}_loop")
