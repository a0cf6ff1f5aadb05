"""The training loop: epochs, batches, accumulation, validation in between, schedulers, logging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.checkpoint import stock_loops
from torch_compat.run import hook_calls as call
from torch_compat.run import profiling
from torch_compat.run.states import RunningStage
from torch_compat.step.capture.outside import OutsideFirstError
from torch_compat.trainer import counters, memory_snapshots
from torch_compat.trainer.announcement import announce, warn_of_eval_mode
from torch_compat.trainer.before_validation import BeforeValidation
from torch_compat.trainer.counters import Stage
from torch_compat.trainer.data.epoch_batches import EpochBatches
from torch_compat.trainer.data.training_data import TrainingData
from torch_compat.trainer.epoch_loop import TrainingEpochLoop
from torch_compat.trainer.fit_counts import FitCounts, Phase, Progress
from torch_compat.trainer.fit_limits import FitLimits
from torch_compat.trainer.loop import Loop
from torch_compat.trainer.loops_state import fit_state
from torch_compat.trainer.preemption import Preempted
from torch_compat.trainer.progress import _Progress
from torch_compat.trainer.results import Results
from torch_compat.trainer.resumption import Resumption, saved
from torch_compat.trainer.scheduler_steps import step_schedulers
from torch_compat.trainer.validation_schedule import ValidationSchedule
from torch_compat.utilities.parts import of
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_info
from xlatrain.cluster.distributed import any_process

if TYPE_CHECKING:
    from torch_compat.step.optimization.forward_only import ForwardOnly
    from torch_compat.step.outcome import StepOutcome
    from torch_compat.trainer.memory_snapshots import MemorySnapshots
    from torch_compat.trainer.trainer import Trainer


class FitLoop(Loop):
    """Runs training until one of its limits is reached.

    Args:
        trainer: the Trainer.
        min_epochs, max_epochs, min_steps, max_steps: limits, -1 or None for none.

    Attributes:
        counts: where training is.
        limits: how long it goes on.
        validation: when batches are followed by a validation.
        resumption: where a checkpoint lets it go on.
        data: the training loaders, and the iterators of epochs.
        results: what was logged.
        epoch_loop: the loop over an epoch's batches, for whoever looks for the counters there.
    """

    min_epochs: int | None = of("limits.min_epochs", settable=True)
    max_epochs: int | None = of("limits.max_epochs", settable=True)
    min_steps: int | None = of("limits.min_steps", settable=True)
    max_steps: int = of("limits.max_steps", settable=True)
    done: bool = of("limits.done")
    skip: bool = of("limits.skip")
    epoch_done = of("limits.epoch_done")
    set_epoch_limits = of("limits.set_epoch_limits")
    progress: Progress = of("counts.progress", settable=True)
    max_batches: int | float = of("counts.max_batches", settable=True)
    scheduler_steps: int = of("counts.scheduler_steps", settable=True)
    is_last_batch: bool = of("counts.is_last_batch")
    shown_last_batch: bool = of("counts.shown_last_batch")
    all_batches_done: bool = of("counts.all_batches_done")
    is_inside: bool = of("counts.is_inside")
    accumulates = of("counts.accumulates")
    restarts: bool = of("resumption.restarts")
    source = of("data.source")
    setup_data = of("data.setup")
    batch_idx: int = of("epoch_loop.batch_idx")
    total_batch_idx: int = of("epoch_loop.total_batch_idx")

    def __init__(
        self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None, min_steps: int | None, max_steps: int
    ) -> None:
        super().__init__(trainer)
        self.counts = FitCounts(trainer)
        self.limits = FitLimits(trainer, self.counts, min_epochs, max_epochs, min_steps, max_steps)
        self.validation = ValidationSchedule(trainer)
        self.resumption = Resumption()
        self.data = TrainingData(trainer, self.counts, self.validation, self.resumption)
        self.results = Results(training=True, sync=trainer.strategy.reduce_value, look=self._look)
        self.epoch_loop = TrainingEpochLoop(self)
        self._validated = False  # the validation that the current batch made due has begun
        self._none_given = WarningCache()
        self._forward_only: ForwardOnly | None = None
        self._snapshots: MemorySnapshots | None = None

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train."""
        self._forward_only = None  # of a run that ended within such an epoch
        try:
            self._train()
        finally:
            self.resumption.loaded, self._snapshots = False, None

    def _train(self) -> None:
        trainer = self._trainer
        self.resumption.restarts = self.resumption.ended_epoch = False
        self.data.setup()
        if self.skip:
            return
        if self.validates and trainer.validate_loop.source.combined is None:  # no sanity check was made
            trainer.validating = True
            trainer.validate_loop.setup_data()
            trainer.training = True
        self.validation.begin()
        trainer.validate_loop.forget_batches(current=True)  # those of the sanity check
        self.forget_results()
        trainer.run_time.begin_training(trainer)
        self._snapshots = memory_snapshots.begin(trainer)
        warn_of_eval_mode(trainer.lightning_module)
        with torch.enable_grad(), trainer.run_time.account.span("step"):
            call.hooks(trainer, "on_train_start")
            self.data.resume_between_epochs()
            while not self.done:
                self._run_epoch()
            if trainer.preemption is not None:
                trainer.preemption.finish()
            if self._snapshots is not None:
                self._snapshots.finish()
            trainer.executor.wait()
            call.hooks(trainer, "on_train_end")

    def forget_results(self) -> None:
        """Forget the values that the last run logged."""
        trainer = self._trainer
        self.results = Results(training=True, sync=trainer.strategy.reduce_value, look=self._look)

    # -- one epoch -------------------------------------------------------------------------------------------------

    def _run_epoch(self) -> None:
        trainer, counts, resumption = self._trainer, self.counts, self.resumption
        self.data.setup()
        resumed, resumption.batches = resumption.batches, 0
        counts.begin_epoch(resumed, loaded=resumption.loaded)
        self.source.set_epoch(counts.progress.epoch)
        if not resumption.continues_epoch:  # the epoch has begun already, as in stock
            call.hooks(trainer, "on_train_epoch_start")
        resumption.continues_epoch = False
        self._on_batch_start = call.BoundHook(trainer, "on_train_batch_start")
        self._on_batch_end = call.BoundHook(trainer, "on_train_batch_end")
        counts.shown_batches = None
        trainer.validate_loop.forget_batches(current=False)
        counts.begin_batches()
        trainer.executor.epoch_begins("training_step")
        with profiling.action(trainer, "run_training_epoch"):
            self._run_batches(self.data.begin_epoch(resumed, self.results), resumed)
        counts.end_batches()
        self.data.close()
        self._end_epoch()
        counts.phase = Phase.BETWEEN
        resumption.loaded = False
        self._at_boundary()

    def _at_boundary(self) -> None:
        """Between two batches, or epochs: all there is can be saved."""
        if self._snapshots is not None:
            self._snapshots.take_if_due()
        if self._trainer.preemption is not None:
            self._trainer.preemption.at_boundary()

    def _run_batches(self, epoch: EpochBatches, resumed: int) -> None:
        if self.resumption.validation:
            self._validate_resumed()
        if self.limits.epoch_done():
            return
        batches = 0
        for batch, is_last in self._batches(epoch, resumed):
            batches += 1
            self.counts.is_last_batch = is_last
            try:
                self._run_batch(batch)
            except _SkipRestOfEpoch:
                return
            if self.limits.epoch_done():
                return
            self._at_boundary()
        if resumed and not batches:  # the checkpoint was saved in the last batch's hooks
            self.counts.is_last_batch = True

    def _batches(self, epoch: EpochBatches, resumed: int) -> Iterator[tuple[Any, bool]]:
        """The rest of the epoch's batches, each with whether it is the last.

        A loader without a length is read one batch ahead.
        """
        length = self.source.length()
        batches = profiling.profiled_batches(
            self._trainer,
            "[_TrainingEpochLoop].train_dataloader_next",
            self._trainer.executor.batches(epoch, "train_dataloader", epoch.loaders),
        )
        batches = self._trainer.run_time.waits(batches, self._trainer)
        if self._trainer.preemption is not None:
            batches = self._trainer.preemption.waits(batches)
        if length != float("inf"):
            for index, batch in enumerate(batches, start=resumed + 1):
                yield batch, index >= length
            return
        previous = next(batches, _END)
        for batch in batches:
            yield previous, False
            previous = batch
        if previous is not _END:
            yield previous, True

    def _run_batch(self, batch: Any) -> None:
        trainer, counts = self._trainer, self.counts
        batch_idx = counts.progress.batch
        counts.batch_stage = Stage.READY
        batch = trainer.executor.transferred(batch, 0)
        trainer.metric_log.begin_batch(self.results, batch)
        outcome = None
        if batch is None:
            self._none_given.warn("train_dataloader yielded None. If this was on purpose, ignore it: no step is made.")
        else:
            outcome = self._step(batch, batch_idx)
        counts.step_ran = True
        counts.batch_stage = Stage.PROCESSED
        self._validated = False
        if outcome is not None:
            self.take_logs(outcome)
        last = counts.all_batches_done
        if not counts.accumulates():  # asked each time: hooks may set how many batches accumulate
            step_schedulers(trainer, "step", batch_idx=batch_idx, plateau=False)
        if last:
            step_schedulers(trainer, "epoch", batch_idx=batch_idx, plateau=False)
        if self._on_batch_end:
            seen = batch if outcome is None or outcome.batch is None else outcome.batch
            self._on_batch_end(None if outcome is None else outcome.result, seen, batch_idx)
        self.results.end_batch()
        if outcome is not None and not trainer.run_time.announced:
            announce(trainer)
        counts.batch_stage = Stage.COMPLETED
        if not counts.accumulates() and trainer.metric_log.is_due():
            trainer.metric_log.send(self.results.metrics(on_step=True).logged)
        self._validate_if_due(batch_idx, last)
        if not counts.accumulates():
            step_schedulers(trainer, "step", batch_idx=batch_idx, plateau=True)
            counts.progress.logged_step += 1
        counts.end_batch()

    def _step(self, batch: Any, batch_idx: int) -> StepOutcome:
        """The batch's first hooks and its step."""
        trainer = self._trainer
        if self._ends_epoch(batch, batch_idx):
            self.counts.is_last_batch = True
            for interval in ("step", "epoch"):
                step_schedulers(trainer, interval, batch_idx=batch_idx, plateau=False)
            self.counts.end_batch()
            raise _SkipRestOfEpoch
        self.counts.batch_stage = Stage.STARTED
        stepped = not self.counts.accumulates()
        if profiling.records(trainer):
            with profiling.action(trainer, "run_training_batch"), profiling.strategy_action(trainer, "training_step"):
                return trainer.executor.train(batch, batch_idx, stepped)
        return trainer.executor.train(batch, batch_idx, stepped)

    def _ends_epoch(self, batch: Any, batch_idx: int) -> bool:
        """Whether ``on_train_batch_start`` returned -1: on any process, or the others would wait for it in the step."""
        if not self._on_batch_start:
            return False
        ends = self._on_batch_start(batch, batch_idx) == -1
        return any_process(ends) if self._on_batch_start.asks_module else ends

    def take_logs(self, outcome: StepOutcome) -> None:
        """Take the values that a training step logged, once: hooks between its gradients and its update see them already."""
        if not outcome.logged:
            self._trainer.metric_log.take(self.results, outcome)
            outcome.logged = True

    # -- validation ------------------------------------------------------------------------------------------------

    def _validate_if_due(self, batch_idx: int, last: bool) -> None:
        self._validated = False
        if self._val_is_due(batch_idx, last):
            self._validated = True
            self._validate()

    def _validate(self) -> None:
        trainer = self._trainer
        first_batch = trainer.metric_log.first_batch
        trainer.metric_log.keep(self.results, on_step=True)  # before those of validation, which may have the same names
        trainer.state.stage = RunningStage.VALIDATING
        before = None if trainer.preemption is None else BeforeValidation(trainer)
        if not self.counts.accumulates():  # manual accumulation does not go on after a validation, as in stock
            call.module_hook(trainer, "on_validation_model_zero_grad")
        try:
            with trainer.run_time.account.span("validation"):
                trainer.validate_loop.run()
        except Preempted:  # it is run again
            assert before is not None
            before.restore()
            self._validated = False
            raise
        finally:
            trainer.state.stage = RunningStage.TRAINING
            trainer.metric_log.first_batch = first_batch
        self.validation.begin()

    def _validate_resumed(self) -> None:
        """The validation that was due after the last batch, before which the checkpoint was saved."""
        if self._trainer.enable_validation:
            counts = self.counts
            counts.end_batch(-1)
            stepped = int(not counts.accumulates())
            counts.progress.logged_step -= stepped
            self._validate()
            counts.progress.logged_step += stepped
            counts.end_batch()
        self.resumption.validation = False

    @property
    def validates(self) -> bool:
        """Whether the current epoch is one of those with validation."""
        return self.validation.has_epoch(self.counts.progress.epoch)

    def _val_is_due(self, batch_idx: int, last: bool) -> bool:
        return self.validation.is_due(self.counts.progress, batch_idx, last=last, stopping=self.limits.stopping)

    # -- end of an epoch -------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        trainer, progress = self._trainer, self.counts.progress
        trainer.executor.look()
        trainer.metric_log.end_batches(self.results, kept=self._validated)
        call.on_train_epoch_end(trainer)
        trainer.metric_log.keep(self.results, on_step=False)
        if self.counts.ended_with_last:
            step_schedulers(trainer, "epoch", batch_idx=progress.batch - 1, plateau=True)
        progress.logged_step -= 1
        trainer.metric_log.send(trainer.metric_log.keep(self.results, on_step=False).logged)
        trainer.metric_log.end_epoch(self.results)
        progress.logged_step += 1
        progress.epoch += 1

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, in stock's layout: ``checkpoint["loops"]["fit_loop"]``."""
        return fit_state(self)

    def counters(self) -> dict[str, Any]:
        """Counters, as of the steps that have run: more than stock's layout has a place for."""
        return saved(self.counts, validation_pending=self._validation_is_pending())

    def load_state_dict(self, state: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> None:
        """Continue where a checkpoint was saved, inside its epoch too; also from what stock's fit loop saved.

        Args:
            state: what :meth:`state_dict` gave.
            ours: ``"counters"``, what :meth:`counters` gave then, and ``"written"``, what :meth:`state_dict` did.
        """
        self.resumption.load(stock_loops.read(state, ours), self.counts, counts_steps=self.max_steps != -1)

    def _validation_is_pending(self) -> bool:
        """Whether a run that continues here begins with the validation of the last batch."""
        counts = self.counts
        if self.resumption.validation:
            return True
        due = counts.step_ran and not self._validated and counts.is_inside
        return bool(due and self._val_is_due(counts.progress.batch, counts.all_batches_done))

    @contextlib.contextmanager
    def as_it_was_saved(self) -> Iterator[None]:
        """Show the ``current_epoch`` of the hooks in which the checkpoint was saved, as in stock's sanity check."""
        self.counts.progress.epoch -= self.resumption.ended_epoch
        try:
            yield
        finally:
            self.counts.progress.epoch += self.resumption.ended_epoch

    @property
    def _skip_backward(self) -> bool:
        """Whether batches learn nothing, as in SWA's last epoch: ``training_step`` runs, and no backward pass."""
        return self._forward_only is not None

    @_skip_backward.setter
    def _skip_backward(self, value: bool) -> None:
        if self._forward_only is None:
            self._forward_only = self._trainer.executor.forward_only() if value else None
        elif not value:
            self._forward_only.finish()
            self._forward_only = None

    # -- stock's names ---------------------------------------------------------------------------------------------

    @property
    def epoch_progress(self) -> _Progress:
        """Counts of epochs."""
        return counters.epochs(self)

    @property
    def restarting(self) -> bool:
        """Whether the run goes on inside of an epoch, from a checkpoint, and has not taken a batch yet."""
        return bool(self.resumption.batches)

    @property
    def is_automatic(self) -> bool:
        """Whether the Trainer optimizes; before a module is known, it will."""
        module = self._trainer._module
        return module is None or module.automatic_optimization

    def stepping_batches(self) -> int | float:
        """Optimizer steps that a run will take; loads the training loader if that has not happened."""
        if self.max_epochs != -1 and self._trainer._module is None:  # nothing to ask for a loader
            return self.max_steps
        if self.max_epochs != -1 and self.source.combined is None:
            if self._trainer.executor.tracer is not None:
                raise OutsideFirstError(self.stepping_batches)
            rank_zero_info("Loading `train_dataloader` to estimate number of stepping batches.")
            self.data.setup()
        return self.limits.stepping_batches()

    def _should_accumulate(self) -> bool:
        return self.counts.accumulates()

    @property
    def _can_stop_early(self) -> bool:
        return self.limits.can_stop_early()

    @property
    def _combined_loader(self) -> Any:
        return self.source.combined

    @property
    def _results(self) -> Results:
        return self.results


_END: Any = object()


class _SkipRestOfEpoch(Exception):
    """The hook ``on_train_batch_start`` returned -1."""
