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
    from torch_compat.trainer.evaluation_loop import EvaluationLoop
    from torch_compat.trainer.fit_loop import FitLoop
    from torch_compat.trainer.trainer import Trainer


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


NAMES = ("ready", "started", "processed", "completed")
"""The counts of a tracker; what is at a :class:`Stage` counts for that one and those before it."""


def _flags(kind: str, stage: Callable[[Any], Stage]) -> dict[str, Callable[[Any], Any]]:
    def flag(level: Stage) -> Callable[[Any], int]:
        return lambda loop: int(stage(loop) >= level)

    return {f"{kind}_{name}": flag(level) for name, level in zip(NAMES, list(Stage)[1:], strict=True)}


_OF_FIT: dict[str, Callable[[FitLoop], Any]] = {
    "batch": lambda loop: loop.counts.progress.batch if loop.counts.shown_batches is None else loop.counts.shown_batches,
    "total_batch": lambda loop: loop.counts.progress.total_batch,
    "is_last_batch": lambda loop: loop.counts.shown_last_batch,
    "logged_step": lambda loop: loop.counts.progress.logged_step,
    "scheduler_steps": lambda loop: loop.counts.scheduler_steps,
    "steps_before": lambda loop: loop.counts.began.steps,
    "scheduler_steps_before": lambda loop: loop.counts.began.schedulers,
    "has_gradients": lambda loop: int(loop.counts.has_gradients),
    # the step runs inside of the optimizer's
    "step_begun": lambda loop: int(loop.counts.batch_stage is Stage.STARTED and not loop.counts.accumulates()),
    **_flags("batch", lambda loop: loop.counts.batch_stage),
    **_flags("epoch", lambda loop: loop.counts.epoch_stage),
}
_OF_EVALUATION: dict[str, Callable[[EvaluationLoop], Any]] = {
    "done": lambda loop: loop.done,
    "done_before": lambda loop: loop.done_before,
    "is_last": lambda loop: loop.is_last,
    **_flags("batch", lambda loop: loop.batch_stage),
}


class LoopCounters:
    """The counters that a captured step may ask for, beside those of its batch: read anew for every step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def get(self, name: str) -> Callable[[], Any] | None:
        """Reader of the counter."""
        loop, _, counted = name.rpartition(".")
        read: Callable[[Any], Any] | None = (_OF_EVALUATION if loop else _OF_FIT).get(counted)
        return None if read is None else lambda: read(getattr(self._trainer, loop or "fit_loop"))


def epochs(loop: FitLoop) -> _Progress:
    """``epoch_progress``: ``current.completed`` is ``trainer.current_epoch``, and sets it."""

    def move(name: str, value: int) -> None:
        if name not in ("processed", "completed"):
            raise _fixed(f"epoch_progress.{name}", "epoch_progress.current.completed")
        loop.progress.epoch = value

    found = _counts(loop, loop.trainer.current_epoch, "epoch")
    return _Progress(_watched(_ProcessedTracker, move, **found), _watched(_ProcessedTracker, move, **found))


def batches(loop: FitLoop) -> _BatchProgress:
    """``epoch_loop.batch_progress``; its totals can be set."""

    def move_total(name: str, value: int) -> None:
        loop.progress.total_batch = value

    def move_current(name: str, value: int) -> None:
        raise _fixed(f"batch_progress.current.{name}", "fit(ckpt_path=…), which continues inside an epoch")

    return _BatchProgress(
        _watched(_ProcessedTracker, move_total, **_counts(loop, _now(loop, "total_batch"), "batch")),
        _watched(_ProcessedTracker, move_current, **_counts(loop, _now(loop, "batch"), "batch")),
        _now(loop, "is_last_batch"),
    )


def evaluated(loop: EvaluationLoop) -> _BatchProgress:
    """``batch_progress`` of an evaluation: of this pass, and of all passes in the training epoch."""
    done = _now(loop, "done")
    current, total = (_ProcessedTracker(**_counts(loop, count, "batch")) for count in (done, _now(loop, "done_before") + done))
    return _BatchProgress(total, current, _now(loop, "is_last"))


def optimization(loop: FitLoop) -> _OptimizationProgress:
    """``epoch_loop.automatic_optimization.optim_progress``: ``optimizer.step.total`` is ``trainer.global_step``, and sets it."""
    if not loop.is_automatic:
        return _OptimizationProgress()
    steps = loop.trainer.global_step
    in_epoch = steps - _now(loop, "steps_before")
    begun = _now(loop, "has_gradients")
    zeroed = [_StartedTracker(count + begun, count + begun, count + begun) for count in (steps, in_epoch)]
    return _OptimizationProgress(_OptimizerProgress(_steps(loop, in_epoch, _now(loop, "step_begun")), _Progress(*zeroed)))


def manual_steps(loop: FitLoop) -> _Progress:
    """``epoch_loop.manual_optimization.optim_step_progress``: its ``total`` is ``trainer.global_step``, and sets it."""
    if loop.is_automatic:
        return _Progress.from_defaults(_ReadyCompletedTracker)
    return _steps(loop, loop.trainer.global_step)


def schedulers(loop: FitLoop) -> _SchedulerProgress:
    """``epoch_loop.scheduler_progress``: steps that the Trainer made of schedulers."""
    total = _now(loop, "scheduler_steps")
    current = total - _now(loop, "scheduler_steps_before")
    return _SchedulerProgress(_ReadyCompletedTracker(total, total), _ReadyCompletedTracker(current, current))


def logged_step(loop: FitLoop) -> int:
    """``epoch_loop._batches_that_stepped``."""
    return _now(loop, "logged_step")


def _steps(loop: FitLoop, current: int, ready: int = 0) -> _Progress:
    def move(name: str, value: int) -> None:
        loop.progress.global_step = value

    steps = loop.trainer.global_step
    return _Progress(
        _watched(_ReadyCompletedTracker, move, ready=steps + ready, completed=steps),
        _watched(_ReadyCompletedTracker, lambda name, value: None, ready=current + ready, completed=current),
    )


def _now(loop: FitLoop | EvaluationLoop, name: str) -> Any:
    """A counter; while a step is captured, one that is read anew for every step."""
    table: dict[str, Callable[[Any], Any]] = _OF_FIT
    prefix = ""
    if (evaluation := getattr(loop, "counted_as", None)) is not None:
        table, prefix = _OF_EVALUATION, f"{evaluation}."
    tracer = loop.trainer.executor.tracer
    return table[name](loop) if tracer is None else tracer.counter(prefix + name)


def _counts(loop: FitLoop | EvaluationLoop, done: Any, kind: str) -> dict[str, Any]:
    return {name: done + _now(loop, f"{kind}_{name}") for name in NAMES}


def counts(done: int, stage: Stage) -> dict[str, int]:
    """A tracker's counts where ``done`` events are over and the next one is at ``stage``."""
    return {name: done + (stage >= level) for name, level in zip(NAMES, list(Stage)[1:], strict=True)}


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
