"""``Timer``: measures the stages of a run, and ends training when its time is up."""

from __future__ import annotations

import time
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.durations import to_timedelta
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

_STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Interval(StrEnum):
    """The interval at which ``Timer`` looks at the clock."""

    step = "step"
    epoch = "epoch"


class Timer(Callback):
    """Measures training, validation and test; ends training after ``duration``. ``Trainer(max_time=...)`` adds one.

    Time spent before a checkpoint was saved counts when training is resumed from it.

    ::

        timer = Timer("00:12:00:00")
        pl.Trainer(max_epochs=1, callbacks=[timer]).fit(module, loader)
        assert timer.time_elapsed("train") > 0

    Args:
        duration: "DD:HH:MM:SS", a timedelta, a dict of timedelta's arguments, or None for no limit.
        interval: "step" stops after any batch, "epoch" only after an epoch.
        verbose: report the end.

    Raises:
        MisconfigurationException: a ``duration`` or an ``interval`` that is none of these.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.Timer.html
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = Interval.step,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if interval not in set(Interval):
            raise MisconfigurationException(
                f"Unsupported parameter value `Timer(interval={interval})`. Possible choices are: step, epoch"
            )
        limit = None if duration is None else to_timedelta(duration, "`Timer(duration={!r})` is not a valid duration")
        self._duration = None if limit is None else limit.total_seconds()
        self._interval = interval
        self._verbose = verbose
        self._start_time: dict[str, float | None] = dict.fromkeys(_STAGES)
        self._end_time: dict[str, float | None] = dict.fromkeys(_STAGES)
        self._offset: float = 0

    def start_time(self, stage: str = "train") -> float | None:
        """The time at which the stage last started, in seconds of the monotonic clock; None if it has not."""
        return self._start_time[_checked(stage)]

    def end_time(self, stage: str = "train") -> float | None:
        """The time at which the stage last ended, in seconds of the monotonic clock; None if it has not."""
        return self._end_time[_checked(stage)]

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent in the stage so far; for "train" including what was spent before resuming."""
        start, end = self.start_time(stage), self.end_time(stage)
        offset = self._offset if stage == "train" else 0
        if start is None:
            return offset
        return (time.monotonic() if end is None else end) - start + offset

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds until the stage has taken ``duration``; None without a limit."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def on_fit_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        # The checkpoint that was resumed from may have used up the time already.
        if self._duration is not None:
            self._check_time_remaining(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start("train")

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._duration is not None and self._interval == Interval.step:
            self._check_time_remaining(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._duration is not None and self._interval == Interval.epoch:
            self._check_time_remaining(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_time["train"] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_time["validate"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start("test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_time["test"] = time.monotonic()

    def _start(self, stage: str) -> None:
        self._start_time[stage] = time.monotonic()

    def _check_time_remaining(self, trainer: Trainer) -> None:
        assert self._duration is not None
        # Clocks differ: process 0 decides, or some would stop a step earlier than the others.
        should_stop = trainer.strategy.broadcast(self.time_elapsed() >= self._duration)
        trainer.should_stop = trainer.should_stop or should_stop
        if should_stop and self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            rank_zero_info(f"Time limit reached. Elapsed time is {elapsed}. Signaling Trainer to stop.")

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._offset = state_dict.get("time_elapsed", {}).get("train", 0)


def _checked(stage: str) -> str:
    if stage not in _STAGES:
        raise ValueError(f"{stage!r} is not a stage: expected one of {', '.join(_STAGES)}.")
    return stage
