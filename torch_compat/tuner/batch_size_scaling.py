"""Search for the largest batch size that fits into memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch_compat.tuner.trial import Snapshot, run_evaluation, run_fit, trial
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
    garbage_collection_cuda()
    log.info(f"Finished batch size finder, will continue with full run using batch size {size}")
    _reload(trainer)
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
    if loop.source.combined is None:
        loop.setup_data()
    assert loop.source.combined is not None
    if len(loop.source.combined.flattened) > 1:
        raise MisconfigurationException(
            f"The Batch size finder cannot be used with multiple {loop.source.prefix} dataloaders: pass `batch_size` yourself."
        )


class _Search:
    """Tries batch sizes one after the other."""

    def __init__(self, trainer: Trainer, snapshot: Snapshot, steps: int, max_trials: int, attribute: str, max_val: int) -> None:
        self._trainer = trainer
        self._snapshot = snapshot
        self._steps = steps
        self._max_trials = max_trials
        self._attribute = attribute
        self._max_val = max_val

    @property
    def size(self) -> int:
        return int(lightning_getattr(self._trainer.lightning_module, self._attribute))

    def set(self, size: int, because: str | None = None) -> bool:
        """Set the size, unless the one that succeeded had the whole dataset in one batch; whether it changed."""
        before = self.size
        length = self._dataset_length() if because == "succeeded" else None
        if length is not None and before * self._trainer.strategy.data_parallel_size >= length:
            rank_zero_info(
                f"The batch size {before} is greater or equal than the length of your dataset: {length}. No larger one is tried."
            )
            return False
        if because:
            rank_zero_info(f"Batch size {before} {because}, trying batch size {size}")
        lightning_setattr(self._trainer.lightning_module, self._attribute, size)
        return size != before

    def by_powers(self) -> int:
        """Double the size until it does not fit."""
        succeeded = False
        for number in range(1, self._max_trials + 1):
            if self._fits():
                if number == self._max_trials or self.size >= self._max_val:
                    break
                if not self.set(min(2 * self.size, self._max_val), "succeeded"):
                    break
                succeeded = True
            else:
                self.set(self.size // 2, "failed")
                if succeeded:
                    break
        return self.size

    def by_halves(self, margin: float) -> int:
        """Double the size until it does not fit, then halve the interval; the result is made smaller by ``margin``."""
        low, high, count = 1, None, 0
        while True:
            if self._fits():
                count += 1
                if count >= self._max_trials or self.size >= self._max_val:
                    break
                low = self.size
                if high is not None and high - low <= 1:
                    break
                following = 2 * low if high is None else (high + low) // 2
                if not self.set(min(following, self._max_val), "succeeded"):
                    break
            else:
                high = self.size
                self.set((high + low) // 2, "failed")
                if high - low <= 1:
                    break
        smaller = max(1, int(self.size * (1 - margin)))
        if smaller != self.size:
            rank_zero_info(f"Applying margin of {margin:.1%}, reducing batch size from {self.size} to {smaller}")
            lightning_setattr(self._trainer.lightning_module, self._attribute, smaller)
        return self.size

    def _fits(self) -> bool:
        """Whether some steps with the present size run.

        Raises:
            RuntimeError: any but that memory ran out.
        """
        garbage_collection_cuda()
        try:
            if self._trainer.state.fn == "fit":
                run_fit(self._trainer, self._steps)
            else:
                run_evaluation(self._trainer, self._steps)
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
        else:
            return True
        self._snapshot.restore()  # the step that failed may have taken its arrays with it
        return False

    def _dataset_length(self) -> int | None:
        """Samples of the loader, None if unknown."""
        from torch_compat.trainer.data.data_source import DataSource

        loop: Any = _active_loop(self._trainer)
        source = DataSource(self._trainer, loop.source.prefix, loop.source.mode)
        source.reset(loop.source.given)
        loaders = source.load().flattened
        try:
            return sum(len(loader.dataset) for loader in loaders)  # a mesh's loader keeps the user's dataset
        except (TypeError, AttributeError, NotImplementedError):
            return None


def _active_loop(trainer: Trainer) -> Any:
    assert trainer.state.fn is not None
    fn = trainer.state.fn.value
    return getattr(trainer, f"{fn}_loop")


def _reload(trainer: Trainer) -> None:
    """The run's own loops get their loaders again, with the size that was found: training has two."""
    loops = [_active_loop(trainer)]
    if trainer.state.fn == "fit" and trainer.enable_validation:
        loops.append(trainer.validate_loop)
    for loop in loops:
        loop.source.combined = None
        loop.setup_data()
