"""The training loop: epochs, batches, accumulation, validation in between, schedulers, logging."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.checkpoint import stock_loops
from torch_compat.run import hook_calls as call
from torch_compat.run import profiling
from torch_compat.run.states import RunningStage
from torch_compat.trainer import memory_snapshots
from torch_compat.trainer.announcement import announce, warn_of_eval_mode
from torch_compat.trainer.before_validation import BeforeValidation
from torch_compat.trainer.counted_loop import Phase, Progress
from torch_compat.trainer.counters import Began, Stage
from torch_compat.trainer.data import host_random, in_flight
from torch_compat.trainer.data.epoch_batches import EpochBatches
from torch_compat.trainer.data.in_flight import resume_loaders
from torch_compat.trainer.limited_loop import LimitedFitLoop
from torch_compat.trainer.loops_state import fit_state
from torch_compat.trainer.preemption import Preempted
from torch_compat.trainer.results import Results
from torch_compat.trainer.scheduler_steps import step_schedulers
from torch_compat.utilities.rank_zero import WarningCache
from xlatrain.cluster.distributed import any_process

if TYPE_CHECKING:
    from torch_compat.step.optimization.forward_only import ForwardOnly
    from torch_compat.step.outcome import StepOutcome
    from torch_compat.trainer.memory_snapshots import MemorySnapshots
    from torch_compat.trainer.trainer import Trainer


class FitLoop(LimitedFitLoop):
    """Runs training until one of its limits is reached.

    Args:
        trainer: the Trainer.
        min_epochs, max_epochs, min_steps, max_steps: limits, -1 or None for none.

    Attributes:
        restarts: what was loaded is continued as by stock's loops that call themselves restarting: inside of an epoch, or where
            steps are counted instead of epochs. No sanity check is made then.
    """

    def __init__(
        self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None, min_steps: int | None, max_steps: int
    ) -> None:
        super().__init__(trainer, min_epochs, max_epochs, min_steps, max_steps)
        self.results = Results(training=True, sync=trainer.strategy.reduce_value, look=self._look)
        self._step_ran = False  # the current batch's step has run, its counters have not moved yet
        self._epoch: EpochBatches | None = None
        self._loaded = False  # the run goes on from a checkpoint, and has not finished an epoch yet
        self._resumed_validation = False
        self.restarts = False
        self._continues_epoch = False  # whether the checkpoint was saved among the batches of the epoch that is next
        self._ended_epoch = False  # whether the checkpoint was saved in the hooks at an epoch's end
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
            self._loaded, self._snapshots = False, None

    def _train(self) -> None:
        trainer = self._trainer
        self.restarts = self._ended_epoch = False
        self.setup_data()
        if self.skip:
            return
        if self.validates and trainer.validate_loop.source.combined is None:  # no sanity check was made
            trainer.validate_loop.setup_data()
        self.validation.begin()
        trainer.validate_loop.forget_batches(current=True)  # those of the sanity check
        self.forget_results()
        trainer.run_time.begin_training(trainer)
        self._snapshots = memory_snapshots.begin(trainer)
        warn_of_eval_mode(trainer.lightning_module)
        with torch.enable_grad(), trainer.run_time.account.span("step"):
            call.hooks(trainer, "on_train_start")
            self._resume_between_epochs()
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
        trainer = self._trainer
        self.setup_data()
        self._phase = Phase.STARTING
        if not self._loaded:
            self.shown_batches = self.progress.batch
        self.is_last_batch = False
        resumed, self.resumed_batches = self.resumed_batches, 0
        self.progress.batch = resumed
        self.source.set_epoch(self.progress.epoch)
        if not self._continues_epoch:  # the epoch has begun already, as in stock
            call.hooks(trainer, "on_train_epoch_start")
        self._continues_epoch = False
        self._bind()
        self.shown_batches = None
        trainer.validate_loop.forget_batches(current=False)
        self.began = Began(self.progress.global_step, self.scheduler_steps)
        self._phase = Phase.BATCHES
        trainer.executor.epoch_begins("training_step")
        with profiling.action(trainer, "run_training_epoch"):
            with self._reading():
                epoch = self._begin_batches(resumed)
            self._run_batches(epoch, resumed)
        self._ended_with_last = self.is_last_batch or self.progress.batch >= self.max_batches
        self._phase = Phase.ENDING
        self.close_data()
        self._end_epoch()
        self._phase = Phase.BETWEEN
        self._loaded = False
        self._at_boundary()

    def _at_boundary(self) -> None:
        """Between two batches, or epochs: all there is can be saved."""
        if self._snapshots is not None:
            self._snapshots.take_if_due()
        if self._trainer.preemption is not None:
            self._trainer.preemption.at_boundary()

    def _bind(self) -> None:
        self._on_batch_start = call.BoundHook(self._trainer, "on_train_batch_start")
        self._on_batch_end = call.BoundHook(self._trainer, "on_train_batch_end")

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        """The loader is waited for outside of the batches."""
        preemption = self._trainer.preemption
        return contextlib.nullcontext() if preemption is None else preemption.reading_again()

    def begin_data(self) -> None:
        """Make the iterators of loaders that were just loaded; where a checkpoint says where they are, draw what that draws."""
        if self._resumed is not None:
            self.source.draw_as_begun()
            return
        self.close_data()
        self._epoch = self.source.epoch_batches()
        with self._reading():
            self._epoch.begin()

    def _begin_batches(self, resumed: int) -> EpochBatches:
        """Begin the epoch's data, or continue it where a checkpoint was saved, metrics in flight and random streams included.

        The iterators that were made when the loaders were loaded serve the first epoch, or that of a checkpoint.
        """
        state, self._resumed = self._resumed, None
        if state is not None:
            self.close_data()
            self._epoch = self.source.epoch_batches()
            self._epoch.resume(state["train"]["position"], resumed)
            if state["train"]["inside"]:
                self.results.load_state_dict(state["results"], self._trainer.lightning_module)
                self._trainer.metric_log.first_batch = True  # was the one before, or an earlier one
                host_random.set_streams(state["streams"])
            return self._epoch
        if self._epoch is None or self._begins_anew:
            self.begin_data()
        assert self._epoch is not None
        for _ in itertools.islice(self._epoch, resumed):  # of a checkpoint that does not say how its epoch began
            pass
        return self._epoch

    @property
    def _begins_anew(self) -> bool:
        """Whether an epoch makes iterators although there are some that have not been used: all but the first, as in stock."""
        return self.progress.epoch > 0 and not self._loaded

    def _run_batches(self, epoch: EpochBatches, resumed: int) -> None:
        if self._resumed_validation:
            self._validate_resumed()
        if self.epoch_done():
            return
        batches = 0
        for batch, is_last in self._batches(epoch, resumed):
            batches += 1
            self.is_last_batch = is_last
            try:
                self._run_batch(batch)
            except _SkipRestOfEpoch:
                return
            if self.epoch_done():
                return
            self._at_boundary()
        if resumed and not batches:  # the checkpoint was saved in the last batch's hooks
            self.is_last_batch = True

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
        trainer = self._trainer
        progress = self.progress
        batch_idx = progress.batch
        self.batch_stage = Stage.READY
        batch = trainer.executor.transferred(batch, 0)
        trainer.metric_log.begin_batch(self.results, batch)
        stepped = not self.accumulates()
        outcome = None
        if batch is None:
            self._none_given.warn("train_dataloader yielded None. If this was on purpose, ignore it: no step is made.")
        else:
            outcome = self._step(batch, batch_idx, stepped)
        self._step_ran = True
        self.batch_stage = Stage.PROCESSED
        self._validated = False
        if outcome is not None:
            self.take_logs(outcome)
        last = self.all_batches_done
        if stepped:
            step_schedulers(trainer, "step", batch_idx=batch_idx, plateau=False)
        if last:
            step_schedulers(trainer, "epoch", batch_idx=batch_idx, plateau=False)
        if self._on_batch_end:
            seen = batch if outcome is None or outcome.batch is None else outcome.batch
            self._on_batch_end(None if outcome is None else outcome.result, seen, batch_idx)
        if outcome is not None and not trainer.run_time.announced:
            announce(trainer)
        self.batch_stage = Stage.COMPLETED
        if stepped and trainer.metric_log.is_due():
            trainer.metric_log.send(self.results.metrics(on_step=True).log)
        self._validate_if_due(batch_idx, last)
        if stepped:
            step_schedulers(trainer, "step", batch_idx=batch_idx, plateau=True)
            progress.logged_step += 1
        progress.batch += 1
        progress.total_batch += 1
        self._step_ran = False
        self.batch_stage = Stage.NONE

    def _step(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """The batch's first hooks and its step."""
        trainer = self._trainer
        if self._ends_epoch(batch, batch_idx):
            self.is_last_batch = True
            for interval in ("step", "epoch"):
                step_schedulers(trainer, interval, batch_idx=batch_idx, plateau=False)
            self.progress.batch += 1
            self.progress.total_batch += 1
            self.batch_stage = Stage.NONE
            raise _SkipRestOfEpoch
        self.batch_stage = Stage.STARTED
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
        if not self.accumulates():  # manual accumulation does not go on after a validation, as in stock
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
            progress = self.progress
            progress.batch -= 1
            progress.total_batch -= 1
            stepped = int(not self.accumulates())
            progress.logged_step -= stepped
            self._step_ran = True
            self.batch_stage = Stage.COMPLETED
            self._validate()
            progress.batch += 1
            progress.total_batch += 1
            progress.logged_step += stepped
            self._step_ran = False
            self.batch_stage = Stage.NONE
        self._resumed_validation = False

    @property
    def validates(self) -> bool:
        """Whether the current epoch is one of those with validation."""
        return self.validation.has_epoch(self.progress.epoch)

    def _val_is_due(self, batch_idx: int, last: bool) -> bool:
        stopping = self._trainer.should_stop and self.can_stop_early()
        return self.validation.is_due(self.progress, batch_idx, last=last, stopping=stopping)

    # -- end of an epoch -------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        trainer = self._trainer
        trainer.executor.look()
        trainer.metric_log.end_batches(self.results, kept=self._validated)
        call.on_train_epoch_end(trainer)
        trainer.metric_log.keep(self.results, on_step=False)
        if self._ended_with_last:
            step_schedulers(trainer, "epoch", batch_idx=self.progress.batch - 1, plateau=True)
        self.progress.logged_step -= 1
        trainer.metric_log.send(trainer.metric_log.keep(self.results, on_step=False).log)
        trainer.metric_log.end_epoch(self.results)
        self.progress.logged_step += 1
        self.progress.epoch += 1

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, in stock's layout: ``checkpoint["loops"]["fit_loop"]``."""
        return fit_state(self)

    def counters(self) -> dict[str, Any]:
        """Counters, as of the steps that have run: more than stock's layout has a place for."""
        progress = self.progress
        ran = int(self._step_ran)
        return {
            "epoch": progress.epoch + (self._phase == Phase.ENDING),
            "unfinished_epoch": self._phase in (Phase.STARTING, Phase.BATCHES),
            "ended_epoch": self._phase == Phase.ENDING,
            "inside": self.is_inside,
            "shown_batches": (progress.batch if self.shown_batches is None else self.shown_batches) + ran,
            "batch": progress.batch + ran if self._phase == Phase.BATCHES else 0,
            "total_batch": progress.total_batch + ran,
            "global_step": progress.global_step,
            "logged_step": progress.logged_step + (ran and not self.accumulates()),
            "validation_pending": self._validation_is_pending(),
            "scheduler_steps": self.scheduler_steps,
            "is_last_batch": bool(ran and self._phase == Phase.BATCHES and self.all_batches_done),
        }

    def load_state_dict(self, state: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> None:
        """Continue where a checkpoint was saved, inside its epoch too; also from what stock's fit loop saved.

        Args:
            state: what :meth:`state_dict` gave.
            ours: ``"counters"``, what :meth:`counters` gave then, and ``"written"``, what :meth:`state_dict` did.
        """
        state = stock_loops.read(state, ours)
        self.progress = Progress(
            epoch=state["epoch"],
            total_batch=state["total_batch"],
            global_step=state["global_step"],
            logged_step=state["logged_step"],
        )
        self.scheduler_steps = state.get("scheduler_steps", 0)
        self.resumed_batches = state["batch"]
        self._resumed_validation = state["validation_pending"]
        self._ended_with_last = state["epoch"] > 0 and not state.get("unfinished_epoch", state["batch"] > 0)
        self.restarts = state.get("unfinished_epoch", state["batch"] > 0) or self.max_steps != -1
        self._ended_epoch = state.get("ended_epoch", False)
        self.shown_batches = state.get("shown_batches", state["batch"])
        self._continues_epoch = state.get("inside", state["batch"] > 0)
        self._loaded = True

    def _validation_is_pending(self) -> bool:
        """Whether a run that continues here begins with the validation of the last batch."""
        if self._resumed_validation:
            return True
        due = self._step_ran and not self._validated and self._phase == Phase.BATCHES
        return bool(due and self._val_is_due(self.progress.batch, self.all_batches_done))

    @contextlib.contextmanager
    def as_it_was_saved(self) -> Iterator[None]:
        """Show the ``current_epoch`` of the hooks in which the checkpoint was saved, as in stock's sanity check."""
        self.progress.epoch -= self._ended_epoch
        try:
            yield
        finally:
            self.progress.epoch += self._ended_epoch

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

    @property
    def is_inside(self) -> bool:
        """Whether the batches of an epoch are being taken."""
        return self._phase == Phase.BATCHES

    def data_state(self) -> dict[str, Any]:
        """The position of the loaders after the steps that have run; of this process."""
        batches = self.progress.batch + int(self._step_ran) if self.is_inside else 0
        if self._epoch is None or (self._begins_anew and not self.is_inside):
            return {"inside": False, "loaders": in_flight.loaders_between(self.source.combined)}
        return {"inside": self.is_inside, "batches": batches, "position": self._epoch.position(batches)}

    def resume_from(self, state: dict[str, Any]) -> None:
        """Take up a process's part of a checkpoint when the run gets there."""
        self._resumed = state

    def move_to_batch(self, batch: int) -> None:
        """The epoch is to be continued after so many batches, which are of another size than those that were counted."""
        self.resumed_batches = batch

    def _resume_between_epochs(self) -> None:
        """Restore random streams and the loaders' lasting state; the training loaders' where no epoch is continued."""
        if self._resumed is None:
            return
        resume_loaders(self._trainer.validate_loop.source.combined, self._resumed["val"], "val_dataloader")
        host_random.set_streams(self._resumed["streams"])
        if "position" not in self._resumed["train"]:
            self.close_data()
            resume_loaders(self.source.combined, self._resumed["train"]["loaders"], "train_dataloader")
            self._resumed = None

    def close_data(self) -> None:
        """Let the loaders' iterators and their workers go."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


_END: Any = object()


class _SkipRestOfEpoch(Exception):
    """The hook ``on_train_batch_start`` returned -1."""
