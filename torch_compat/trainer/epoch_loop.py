"""``trainer.fit_loop.epoch_loop``: the fit loop as stock divides it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.trainer import counters
from torch_compat.trainer.loop import Loop
from torch_compat.trainer.progress import _BatchProgress, _OptimizationProgress, _Progress, _SchedulerProgress
from torch_compat.utilities.parts import of

if TYPE_CHECKING:
    from torch_compat.trainer.evaluation_loop import EvaluationLoop
    from torch_compat.trainer.fit_loop import FitLoop


class AutomaticProgress:
    """Stock's ``epoch_loop.automatic_optimization``."""

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop

    @property
    def optim_progress(self) -> _OptimizationProgress:
        """Counts of optimizer steps."""
        return counters.optimization(self._loop)


class ManualProgress:
    """Stock's ``epoch_loop.manual_optimization``."""

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop

    @property
    def optim_step_progress(self) -> _Progress:
        """Counts of optimizer steps."""
        return counters.manual_steps(self._loop)


class TrainingEpochLoop(Loop):
    """The batches of the fit loop. API: ``lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop``.

    Our fit loop runs epochs and batches; this is a view of its counters and limits under stock's names.
    """

    def __init__(self, fit_loop: FitLoop) -> None:
        super().__init__(fit_loop.trainer)
        self._fit_loop = fit_loop
        self.automatic_optimization = AutomaticProgress(fit_loop)
        self.manual_optimization = ManualProgress(fit_loop)

    @property
    def batch_progress(self) -> _BatchProgress:
        """Counts of batches."""
        return counters.batches(self._fit_loop)

    @property
    def scheduler_progress(self) -> _SchedulerProgress:
        """Counts of the schedulers' steps."""
        return counters.schedulers(self._fit_loop)

    val_loop: EvaluationLoop = of("_trainer.validate_loop", "The validation inside of training.")

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch; -1 before the first."""
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch over all epochs; -1 before the first."""
        return self.batch_progress.total.ready - 1

    global_step: int = of("_trainer.global_step", "Optimizer steps.")

    @property
    def done(self) -> bool:
        """Whether the epoch is over."""
        return self._fit_loop.epoch_done()

    restarting: bool = of(
        "_fit_loop.restarting", "Whether the run goes on inside of an epoch, from a checkpoint, and has not taken a batch yet."
    )
    min_steps: int | None = of(
        "_fit_loop.min_steps", "Optimizer steps before which ``should_stop`` has no effect.", settable=True
    )
    max_steps: int = of("_fit_loop.max_steps", "Optimizer steps after which training ends; -1: no limit.", settable=True)

    @property
    def _batches_that_stepped(self) -> int:
        """The loggers' step."""
        return counters.logged_step(self._fit_loop)

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, value: int) -> None:
        self._fit_loop.progress.logged_step = value

    _results: Any = of("_fit_loop.results")

    def _should_accumulate(self) -> bool:
        """Whether the current batch only adds its gradients."""
        return self._fit_loop.accumulates()

    def _num_ready_batches_reached(self) -> bool:
        """Whether the current batch is the epoch's last."""
        return self._fit_loop.all_batches_done

    def _accumulated_batches_reached(self) -> bool:
        """Whether the current batch is the last of its accumulation."""
        return self.batch_progress.current.ready % self._trainer.accumulate_grad_batches == 0
