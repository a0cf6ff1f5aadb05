"""Logged values on their way from the loops to callbacks, loggers and the progress bar."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.core.logging import LogOptions, resolve
from torch_compat.run.states import RunningStage
from torch_compat.trainer.results import Metrics, Results
from torch_compat.utilities.device_transfer import convert_tensors_to_scalars
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.errors import CaptureError, user_line

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.step.outcome import StepOutcome
    from torch_compat.trainer.trainer import Trainer


class MetricLog:
    """Takes what ``self.log`` gives, keeps each metric's latest value, and sends metrics to the loggers.

    Attributes:
        callback: for callbacks, 0-d tensors by name.
        logged: sent to loggers, 0-d tensors by name.
        progress_bar: for the progress bar, numbers by name.
        first_batch: whether the running loop is at the first batch of its epoch (or of a loader); None before it, and when the
            last is done: then the loop's values are those of the epoch, no longer those of its last step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.clear()

    def clear(self) -> None:
        """Forget every value."""
        self.callback: dict[str, torch.Tensor] = {}
        self.logged: dict[str, torch.Tensor] = {}
        self.progress_bar: dict[str, float] = {}
        self.first_batch: bool | None = None
        self._hook: str | None = None  # that logged last

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Every value."""
        return {"callback": dict(self.callback), "logged": dict(self.logged), "progress_bar": dict(self.progress_bar)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with these values."""
        self.callback.update(state["callback"])
        self.logged.update(state["logged"])
        self.progress_bar.update(state["progress_bar"])

    @property
    def results(self) -> Results | None:
        """The results that values are logged to now: those of the loop that runs."""
        trainer, stage = self._trainer, self._trainer.state.stage
        if stage == RunningStage.TRAINING:
            return trainer.fit_loop.results
        if stage in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
            return trainer.validate_loop.results
        return trainer.test_loop.results if stage == RunningStage.TESTING else None

    def log(self, module: LightningModule, name: str, value: Any, options: LogOptions) -> None:
        """Log a value for ``LightningModule.log``.

        Raises:
            MisconfigurationException: outside of the loops, or in a hook that cannot log.
        """
        hook, results, recorder = module._current_fx_name, self.results, self._trainer.executor.recorder
        if hook is None or results is None:
            raise MisconfigurationException(
                f"You can't `self.log({name!r}, …)` outside of the loops, or inside `{hook}`: log from a step or a training, "
                "validation or test hook, or use `self.logger.experiment`"
            )
        if recorder is None:
            if self._begins(hook):
                results.begin_hook(hook)
            results.log(hook, name, value, options)
        else:
            resolve(options, hook)  # a wrong combination is an error at the user's line
            strategy = self._trainer.strategy
            if options.sync_dist and strategy.overrides("reduce") and isinstance(value, torch.Tensor):
                value = strategy.reduce(value, reduce_op=options.reduce_fx)  # in a step values are global: only the user's own
            recorder.record(hook, name, value, options)

    def _begins(self, hook: str) -> bool:
        """Whether ``hook`` logs after another one, where that begins its values anew: before an epoch's second batch."""
        begins = hook != self._hook and self.first_batch is not False
        self._hook = hook
        return begins

    def begin_batch(self, results: Results, batch: Any) -> None:
        """Count values that are logged from now on to ``batch``, this process's rows."""
        self.first_batch = self.first_batch is None
        results.begin_batch(batch)

    def take(self, results: Results, outcome: StepOutcome) -> None:
        """Take the values that a step logged."""
        results.batch_size = outcome.logged_size
        anew = [index for index, entry in enumerate(outcome.logs) if self._begins(entry.hook)]
        results.push(outcome.logs, outcome.packed, outcome.logged_size, outcome.result_of, anew)

    def end_batches(self, results: Results, *, kept: bool = False) -> None:
        """The last batch is done: its values outlive it (unless they do already), and from now on values are the epoch's."""
        if self.first_batch is not None and not kept:
            self.keep(results, on_step=True)
        self.first_batch = None
        results.begin_batch(None)

    def end_epoch(self, results: Results) -> None:
        """Everything has been sent: forget the values of the epoch."""
        results.reset()
        self._hook = None

    def current(self, kind: str) -> dict[str, Any]:
        """Values of one kind, brought up to date by the loop that runs.

        Args:
            kind: ``"callback"``, ``"logged"`` or ``"progress_bar"``.

        Raises:
            CaptureError: a step that is being captured asks, which would have today's values for ever.
        """
        if self._trainer.executor.tracer is not None:
            raise CaptureError(
                f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it reads the Trainer's metrics, "
                "which change from step to step.\n  Fix: keep the value as an attribute, in a hook outside of the step: "
                "self.last = float(self.trainer.callback_metrics[name])."
            )
        kept: dict[str, Any] = getattr(self, kind)
        if (results := self.results) is not None:
            kept.update(getattr(results.metrics(self.first_batch is not None), kind))
        return kept

    def interrupt(self) -> None:
        """The run ends with an exception: values of the last batch that ended outlive it."""
        if (results := self.results) is not None and self.first_batch is not None:
            self.keep(results, on_step=True, ended=True)

    def keep(self, results: Results, *, on_step: bool, ended: bool = False) -> Metrics:
        """Make a loop's current values those that outlive it; arguments as those of :meth:`Results.metrics`."""
        found = results.metrics(on_step, ended=ended)
        self.callback.update(found.callback)
        self.logged.update(found.logged)
        self.progress_bar.update(found.progress_bar)
        return found

    def is_due(self) -> bool:
        """Whether the current training step's metrics go to the loggers."""
        trainer = self._trainer
        if not trainer.loggers:
            return False
        every = trainer.log_every_n_steps
        return trainer.should_stop or (every > 0 and (trainer.fit_loop.progress.logged_step + 1) % every == 0)

    def send(self, metrics: Mapping[str, torch.Tensor], step: int | None = None) -> None:
        """Send metrics to the loggers; a metric called ``step`` sets the step."""
        trainer = self._trainer
        if not trainer.loggers or not metrics:
            return
        self.logged.update(metrics)
        scalars: dict[str, Any] = convert_tensors_to_scalars(metrics)
        if step is None and "step" in scalars:
            step = int(scalars.pop("step"))
            self.logged.pop("step", None)
        if step is None:
            scalars.setdefault("epoch", trainer.current_epoch)
            step = trainer.fit_loop.progress.logged_step
        for logger in trainer.loggers:
            logger.log_metrics(metrics=scalars, step=step)
            logger.save()
