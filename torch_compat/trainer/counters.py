"""Counters of training in the form of stock's trackers; setting a tracker that decides where training goes on sets ours.

Between two batches the counts are stock's at each hook. Inside of a step they are those at its beginning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torch_compat.trainer.progress import (
    _BatchProgress,
    _OptimizationProgress,
    _OptimizerProgress,
    _ProcessedTracker,
    _Progress,
    _ReadyCompletedTracker,
    _SchedulerProgress,
    _StartedTracker,
)

if TYPE_CHECKING:
    from torch_compat.trainer.counted_loop import CountedFitLoop


class Stage(IntEnum):
    """The stage of a batch, or of an epoch."""

    NONE = 0
    READY = 1
    STARTED = 2
    PROCESSED = 3
    COMPLETED = 4


@dataclass(frozen=True)
class Began:
    """The counters at the time when an epoch's batches began."""

    steps: int = 0
    schedulers: int = 0


def epochs(loop: CountedFitLoop) -> _Progress:
    """``epoch_progress``: ``current.completed`` is ``trainer.current_epoch``, and sets it."""

    def move(name: str, value: int) -> None:
        if name not in ("processed", "completed"):
            raise _fixed(f"epoch_progress.{name}", "epoch_progress.current.completed")
        loop.progress.epoch = value

    found = counts(_now(loop, "current_epoch", loop.progress.epoch), loop.epoch_stage)
    return _Progress(_watched(_ProcessedTracker, move, **found), _watched(_ProcessedTracker, move, **found))


def batches(loop: CountedFitLoop) -> _BatchProgress:
    """``epoch_loop.batch_progress``; its totals can be set."""

    def move_total(name: str, value: int) -> None:
        loop.progress.total_batch = value

    def move_current(name: str, value: int) -> None:
        raise _fixed(f"batch_progress.current.{name}", "fit(ckpt_path=…), which continues inside an epoch")

    stage = loop.batch_stage
    total = counts(_now(loop, "total_batch", loop.progress.total_batch), stage)
    done = _now(loop, "batch", loop.progress.batch) if loop.shown_batches is None else loop.shown_batches
    current = counts(done, stage)
    return _BatchProgress(
        _watched(_ProcessedTracker, move_total, **total),
        _watched(_ProcessedTracker, move_current, **current),
        _now(loop, "is_last_batch", loop.shown_last_batch),
    )


def optimization(loop: CountedFitLoop) -> _OptimizationProgress:
    """``epoch_loop.automatic_optimization.optim_progress``: ``optimizer.step.total`` is ``trainer.global_step``, and sets it."""
    if not loop.is_automatic:
        return _OptimizationProgress()
    steps = _now(loop, "global_step", loop.progress.global_step)
    in_epoch = steps - _now(loop, "steps_before", loop.began.steps)
    begun = int(loop.has_gradients)
    zeroed = [_StartedTracker(count + begun, count + begun, count + begun) for count in (steps, in_epoch)]
    ready = int(loop.batch_stage is Stage.STARTED and not loop.accumulates())  # the step runs inside of the optimizer's
    return _OptimizationProgress(_OptimizerProgress(_steps(loop, in_epoch, ready), _Progress(*zeroed)))


def manual_steps(loop: CountedFitLoop) -> _Progress:
    """``epoch_loop.manual_optimization.optim_step_progress``: its ``total`` is ``trainer.global_step``, and sets it."""
    if loop.is_automatic:
        return _Progress.from_defaults(_ReadyCompletedTracker)
    return _steps(loop, _now(loop, "global_step", loop.progress.global_step))


def schedulers(loop: CountedFitLoop) -> _SchedulerProgress:
    """``epoch_loop.scheduler_progress``: steps that the Trainer made of schedulers."""
    total = _now(loop, "scheduler_steps", loop.scheduler_steps)
    current = total - _now(loop, "scheduler_steps_before", loop.began.schedulers)
    return _SchedulerProgress(_ReadyCompletedTracker(total, total), _ReadyCompletedTracker(current, current))


def logged_step(loop: CountedFitLoop) -> int:
    """``epoch_loop._batches_that_stepped``."""
    return _now(loop, "logged_step", loop.progress.logged_step)


def _steps(loop: CountedFitLoop, current: int, ready: int = 0) -> _Progress:
    def move(name: str, value: int) -> None:
        loop.progress.global_step = value

    steps = _now(loop, "global_step", loop.progress.global_step)
    return _Progress(
        _watched(_ReadyCompletedTracker, move, ready=steps + ready, completed=steps),
        _watched(_ReadyCompletedTracker, lambda name, value: None, ready=current + ready, completed=current),
    )


def _now(loop: CountedFitLoop, name: str, value: int) -> Any:
    """A counter; while a step is captured, one that is read anew for every step."""
    tracer = loop.trainer.executor.tracer
    return value if tracer is None else tracer.counter(name)


def counts(done: int, stage: Stage) -> dict[str, int]:
    """A tracker's counts where ``done`` events are over and the next one is at ``stage``."""
    names = ("ready", "started", "processed", "completed")
    return {name: done + (stage >= level) for name, level in zip(names, list(Stage)[1:], strict=True)}


def _fixed(name: str, instead: str) -> AttributeError:
    return AttributeError(f"trainer.fit_loop: {name} follows from the run and cannot be set; use {instead}")


def _watched(kind: type[_ReadyCompletedTracker], move: Callable[[str, int], None], **counts: int) -> Any:
    tracker = _watching(kind)(**counts)
    vars(tracker)["_move"] = move
    return tracker


@functools.cache
def _watching(kind: type[_ReadyCompletedTracker]) -> type[_ReadyCompletedTracker]:
    """A subclass of ``kind`` whose counts, once it has a ``_move``, move ours when they are set."""
    names = {one.name for one in fields(kind)}

    def set_count(self: Any, name: str, value: Any) -> None:
        if name in names and (move := vars(self).get("_move")) is not None:
            move(name, value)
        object.__setattr__(self, name, value)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)

    def equal(self: Any, other: object) -> bool:
        return isinstance(other, kind) and self.state_dict() == other.state_dict()

    body = {"__setattr__": set_count, "load_state_dict": load_state_dict, "__eq__": equal, "__hash__": None}
    return type(kind.__name__, (kind,), {**body, "__module__": kind.__module__})
