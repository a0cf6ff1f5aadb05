"""Counters of events, as stock's loops keep them and its checkpoints hold them. API: ``lightning.pytorch.loops.progress``.

Our loops count in :class:`~torch_compat.trainer.fit_counts.FitCounts`; ``fit_loop.epoch_progress`` and its like give these.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass
class _BaseProgress:
    """A dataclass of counters that can be saved, loaded and reset."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            part = getattr(self, name, None)
            if isinstance(part, _BaseProgress):
                part.load_state_dict(value)
            else:
                self.__dict__[name] = value

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Self:
        """A new object with that state."""
        made = cls()
        made.load_state_dict(state_dict)
        return made

    def reset(self) -> None:
        """Back to zero."""
        self._each("reset")

    def reset_on_run(self) -> None:
        """The loop begins anew."""
        self._each("reset_on_run")

    def reset_on_restart(self) -> None:
        """Begin again what was begun but not completed."""
        self._each("reset_on_restart")

    def _each(self, method: str) -> None:
        """Call a method of each counter in it."""
        for part in vars(self).values():
            if isinstance(part, _BaseProgress):
                getattr(part, method)()


@dataclass
class _ReadyCompletedTracker(_BaseProgress):
    """Counts of one event.

    Attributes:
        ready: about to begin.
        completed: over, its ``on_…_end`` hooks too.
    """

    ready: int = 0
    completed: int = 0

    def reset(self) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, 0)

    def reset_on_restart(self) -> None:
        """Begin again what was ready but not completed."""
        self.ready = self.completed

    def increment_by(self, n: int) -> None:
        """``n`` events are over."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + n)


@dataclass
class _StartedTracker(_ReadyCompletedTracker):
    """Counts like its base's, and ``started``: its ``on_…_start`` hooks have run."""

    started: int = 0

    def reset_on_restart(self) -> None:
        super().reset_on_restart()
        self.started = self.completed


@dataclass
class _ProcessedTracker(_StartedTracker):
    """Counts like its base's, and ``processed``: the event itself has happened."""

    processed: int = 0

    def reset_on_restart(self) -> None:
        super().reset_on_restart()
        self.processed = self.completed


@dataclass
class _Progress(_BaseProgress):
    """Counts of an event in all and in the current run of its loop.

    Raises:
        ValueError: two kinds of counters.
    """

    total: _ReadyCompletedTracker = field(default_factory=_ProcessedTracker)
    current: _ReadyCompletedTracker = field(default_factory=_ProcessedTracker)

    def __post_init__(self) -> None:
        if type(self.total) is not type(self.current):
            raise ValueError(
                "The `total` and `current` instances should be of the same class, found "
                f"{type(self.total).__name__} and {type(self.current).__name__}"
            )

    def _increment(self, name: str) -> None:
        for tracker in (self.total, self.current):
            if not hasattr(tracker, name):
                raise TypeError(f"`{type(tracker).__name__}` doesn't have a `{name}` attribute")
            setattr(tracker, name, getattr(tracker, name) + 1)

    def increment_ready(self) -> None:
        self._increment("ready")

    def increment_started(self) -> None:
        self._increment("started")

    def increment_processed(self) -> None:
        self._increment("processed")

    def increment_completed(self) -> None:
        self._increment("completed")

    @classmethod
    def from_defaults(cls, tracker_cls: type[_ReadyCompletedTracker], **kwargs: int) -> Self:
        """Two counters of a kind, both with the given counts."""
        return cls(total=tracker_cls(**kwargs), current=tracker_cls(**kwargs))

    def reset_on_run(self) -> None:
        self.current.reset()

    def reset_on_restart(self) -> None:
        self.current.reset_on_restart()

    def increment_by(self, n: int) -> None:
        self.total.increment_by(n)
        self.current.increment_by(n)


@dataclass
class _BatchProgress(_Progress):
    """Counts of batches.

    Attributes:
        is_last_batch: the current one is its epoch's last.
    """

    is_last_batch: bool = False

    def reset(self) -> None:
        super().reset()
        self.is_last_batch = False

    def reset_on_run(self) -> None:
        super().reset_on_run()
        self.is_last_batch = False

    def increment_by(self, n: int, is_last_batch: bool = False) -> None:
        super().increment_by(n)
        self.is_last_batch = is_last_batch


@dataclass
class _SchedulerProgress(_Progress):
    """Counts of schedulers' steps."""

    total: _ReadyCompletedTracker = field(default_factory=_ReadyCompletedTracker)
    current: _ReadyCompletedTracker = field(default_factory=_ReadyCompletedTracker)


@dataclass
class _OptimizerProgress(_BaseProgress):
    """Counts of optimizers' steps and cleared gradients."""

    step: _Progress = field(default_factory=lambda: _Progress.from_defaults(_ReadyCompletedTracker))
    zero_grad: _Progress = field(default_factory=lambda: _Progress.from_defaults(_StartedTracker))


@dataclass
class _OptimizationProgress(_BaseProgress):
    """Counts of automatic optimization."""

    optimizer: _OptimizerProgress = field(default_factory=_OptimizerProgress)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in all: ``global_step``."""
        return self.optimizer.step.total.completed
