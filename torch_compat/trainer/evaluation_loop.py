"""The validation and test loop."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.run import hook_calls as call
from torch_compat.run import profiling
from torch_compat.run.states import TrainerFn
from torch_compat.trainer import counters
from torch_compat.trainer.announcement import announce
from torch_compat.trainer.counters import Stage
from torch_compat.trainer.data.data_source import DataSource, read_ahead
from torch_compat.trainer.loop import Loop
from torch_compat.trainer.progress import _BatchProgress
from torch_compat.trainer.results import Results

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class EvaluationLoop(Loop):
    """Runs ``{step}_step`` over all loaders of a stage, one after the other, and reduces what is logged.

    Args:
        trainer: the Trainer.
        name: ``"validation"`` or ``"test"``: hooks and step are called ``on_{name}_…`` and ``{name}_step``.
        prefix: of the dataloader hook.
    """

    def __init__(self, trainer: Trainer, name: str, prefix: str) -> None:
        super().__init__(trainer)
        self.name = name
        self.source = DataSource(trainer, prefix, "sequential")
        self.results = self._new_results()
        self._max_batches_in: dict[bool, list[int | float]] = {}  # by whether it is in training
        self.step_counts: dict[tuple[bool, int], int] = defaultdict(int)  # by (in training, loader)
        self.verbose = True
        self.done = 0  # batches of this pass
        self.done_before = 0  # of the passes before; in training those of the epoch
        self.batch_stage = Stage.NONE
        self._loader = 0  # whose batches are run
        self._first: Iterator[Any] | None = None  # the batches of the first, before a pass takes them
        self._logged: list[dict[str, torch.Tensor]] = []  # of the epochs of the loaders before it

    def _new_results(self) -> Results:
        return Results(training=False, sync=self._trainer.strategy.reduce_value, look=self._look)

    def forget_results(self) -> None:
        """Forget the values that the last run logged."""
        self.results = self._new_results()

    @property
    def batch_progress(self) -> _BatchProgress:
        """Counts of batches: of this pass, and of all passes in the training epoch."""
        return counters.evaluated(self)

    @property
    def is_last(self) -> bool:
        """Whether the current batch, or where none is current the one before, is the last of the pass."""
        return self.done + (self.batch_stage > Stage.NONE) >= max(sum(self.max_batches), 1)

    @property
    def counted_as(self) -> str:
        """The Trainer's name for the loop."""
        return "test_loop" if self.name == "test" else "validate_loop"

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return 0 if self.source.combined is None else len(self.source.combined.flattened)

    @property
    def max_batches(self) -> list[int | float]:
        """Batches to run of each loader; the sanity check runs fewer."""
        if not self._trainer.sanity_checking:
            return self._max_batches
        return [min(self._trainer.num_sanity_val_steps, limit) for limit in self._max_batches]

    @property
    def _max_batches(self) -> list[int | float]:
        return self.batches_of_loaders(self._in_training)

    @property
    def _in_training(self) -> bool:
        return self.name == "validation" and self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _combined_loader(self) -> Any:
        return self.source.combined

    @property
    def _results(self) -> Results:
        return self.results

    @property
    def limit(self) -> int | float:
        trainer = self._trainer
        return trainer.limit_val_batches if self.name == "validation" else trainer.limit_test_batches

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do: no step, no loader, or no batch allowed."""
        trainer = self._trainer
        return (
            self.limit == 0
            or not self.source.is_defined
            or (trainer.state.fn == TrainerFn.FITTING and not call.is_overridden("validation_step", trainer.lightning_module))
        )

    def setup_data(self) -> None:
        """Load the loaders, again where ``reload_dataloaders_every_n_epochs`` says so."""
        trainer = self._trainer
        every = trainer.reload_dataloaders_every_n_epochs
        due = every and self._in_training and trainer.current_epoch - self.source.loaded_at_epoch >= every
        fresh = self.source.combined is not None
        if fresh and not due:
            return
        self.source.load()
        if not trainer.sanity_checking or trainer.fit_loop.validates:  # else it is done again for the first validation
            self.source.loaded_at_epoch = trainer.current_epoch
        if fresh:  # loaded again: stock counts anew
            self.step_counts.clear()
        self._max_batches_in[self._in_training] = self.source.limit(self.limit)

    def share(self, other: EvaluationLoop) -> None:
        """Take the loaders of another loop, if it has loaded them."""
        if other.source.combined is not None:
            self.source.combined, self.source.loaded_at_epoch = other.source.combined, other.source.loaded_at_epoch
            self._max_batches_in[self._in_training] = self.source.limit(self.limit)

    def begin_again(self) -> None:
        """Load the loaders again, in a hook at the beginning of a pass, and begin it with them."""
        self.source.combined = None
        self.setup_data()
        self._first = self._begin_first()

    def run(self) -> list[dict[str, torch.Tensor]]:
        """Run a pass; returns what was logged per epoch, a dict for each loader that had a batch before it or of its own."""
        self.setup_data()
        self.forget_results()
        if not sum(self._max_batches):
            return []
        self.done_before += self.done
        self.done = self._loader = 0
        with torch.no_grad():
            self._first = self._begin_first()
            self._start()
            first, self._first = self._first, None
            assert first is not None
            for index, (loader, limit) in enumerate(passes := self.source.passes(self.max_batches)):
                batches = self._begin(loader) if index else first
                self._run_loader(batches, index, limit, multiple=len(passes) > 1)
            self._end_loader()
            return self._end()

    def _begin_first(self) -> Iterator[Any]:
        """Begin the first loader's pass: before the hooks, as in stock."""
        self.source.set_epoch(self._trainer.current_epoch)
        return self._begin(self.source.passes(self.max_batches)[0][0])

    def _begin(self, loader: Any) -> Iterator[Any]:
        batches = self._trainer.executor.batches(loader, f"{self.source.prefix}_dataloader")
        return read_ahead(batches, reads=self.source.length() == float("inf"))

    def forget_batches(self, *, current: bool) -> None:
        """Count from zero: in all, and if ``current`` in the last pass too."""
        self.done = 0 if current else self.done
        self.done_before = -self.done

    def batches_of_loaders(self, fitting: bool) -> list[int | float]:
        """Batches of each loader, in training or not, as the last such run has found them."""
        return self._max_batches_in.get(fitting, [])

    def _start(self) -> None:
        trainer = self._trainer
        trainer.executor.epoch_begins(f"{self.name}_step")
        self._modes = {module: module.training for module in trainer.lightning_module.modules()}
        call.module_hook(trainer, f"on_{self.name}_model_eval")
        call.hooks(trainer, f"on_{self.name}_start")
        call.hooks(trainer, f"on_{self.name}_epoch_start")
        self._on_start = call.BoundHook(trainer, f"on_{self.name}_batch_start")
        self._on_end = call.BoundHook(trainer, f"on_{self.name}_batch_end")

    def _run_loader(self, batches: Iterator[Any], index: int, limit: int | float, *, multiple: bool) -> None:
        for batch_idx, batch in enumerate(self._batches(batches, limit)):
            self._run_batch(batch, batch_idx, index, multiple=multiple)
            if (preemption := self._trainer.preemption) is not None and not self.is_last:
                preemption.at_boundary(new=not self._trainer.sanity_checking)

    def _end_loader(self) -> None:
        """The values of the loader are now those of its epoch: a torchmetrics object that several share is computed for each."""
        log = self._trainer.metric_log
        log.end_batches(self.results)
        self._logged.append({} if self._trainer.sanity_checking else log.keep(self.results, on_step=False).logged)

    def _batches(self, batches: Iterator[Any], limit: int | float) -> Iterator[Any]:
        if limit == 0:
            return
        batches = profiling.profiled_batches(self._trainer, f"[_EvaluationLoop].{self.source.prefix}_next", batches)
        if (preemption := self._trainer.preemption) is not None:
            batches = preemption.waits(batches)
        for count, batch in enumerate(batches, start=1):
            yield batch
            if count >= limit:
                return

    def _run_batch(self, batch: Any, batch_idx: int, index: int, *, multiple: bool) -> None:
        trainer = self._trainer
        if index != self._loader:
            self._end_loader()
            self._loader = index
        batch = trainer.executor.transferred(batch, index)
        indices = (batch_idx, index) if multiple else (batch_idx,)
        self.batch_stage = Stage.READY
        self.results.dataloader_idx = index if multiple else None
        trainer.metric_log.begin_batch(self.results, batch)
        if self._on_start:
            self._on_start(batch, *indices)
        self.batch_stage = Stage.STARTED
        with profiling.strategy_action(trainer, f"{self.name}_step"):
            outcome = trainer.executor.evaluate(f"{self.name}_step", batch, indices)
        trainer.metric_log.take(self.results, outcome)
        self.batch_stage = Stage.PROCESSED
        if self._on_end:
            self._on_end(outcome.result, batch if outcome.batch is None else outcome.batch, *indices)
        self.results.end_batch()
        if not trainer.run_time.announced and trainer.state.fn != TrainerFn.FITTING:
            announce(trainer)
        self.batch_stage = Stage.NONE
        self.done += 1
        self._log_step(index)

    def _log_step(self, index: int) -> None:
        trainer = self._trainer
        if trainer.sanity_checking:
            return
        place = (trainer.state.fn == TrainerFn.FITTING, index)
        if trainer.loggers and self.results.logs_steps():
            trainer.metric_log.send(self.results.metrics(on_step=True).logged, step=self.step_counts[place])
        self.step_counts[place] += 1  # batches that log nothing count, as in stock

    def _end(self) -> list[dict[str, torch.Tensor]]:
        trainer, log = self._trainer, self._trainer.metric_log
        trainer.executor.look()
        self.results.dataloader_idx = None
        call.hooks(trainer, f"on_{self.name}_epoch_end")
        found = log.keep(self.results, on_step=False).logged
        if not trainer.sanity_checking:
            log.send({**ChainMap(*self._logged), **found})
            for one in self._logged:
                one.update(found)
        call.hooks(trainer, f"on_{self.name}_end")
        log.end_epoch(self.results)
        if call.is_overridden(f"on_{self.name}_model_train", trainer.lightning_module):
            call.module_hook(trainer, f"on_{self.name}_model_train")
        else:
            for module, mode in self._modes.items():
                if module.training != mode:
                    module.training = mode
        logged, self._logged = self._logged, []
        return logged
