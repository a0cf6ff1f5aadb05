"""Trials: a few steps of a loop, after which weights, optimizers and counters are as they were."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.loggers.logger import DummyLogger
from torch_compat.trainer import state_io
from torch_compat.utilities.host_arrays import to_torch
from xlatrain.mesh.snapshot import HostSnapshot

if TYPE_CHECKING:
    from torch_compat.callbacks.callback import Callback
    from torch_compat.trainer.evaluation_loop import EvaluationLoop
    from torch_compat.trainer.fit_loop import FitLoop
    from torch_compat.trainer.prediction_loop import PredictionLoop
    from torch_compat.trainer.trainer import Trainer

_KEPT = (
    "callbacks",
    "lr_scheduler_configs",
    "should_stop",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "fit_loop",
    "validate_loop",
    "test_loop",
    "predict_loop",
)


@contextlib.contextmanager
def trial(trainer: Trainer, callbacks: Sequence[Callback] = ()) -> Iterator[Snapshot]:
    """Run loops in the block and undo them: weights, optimizers and counters are as before.

    The trainer's own callbacks and loggers see nothing of the steps. As in stock, hooks see a checkpoint saved and loaded, and
    random generators stay where the steps leave them.

    Args:
        callbacks: take the place of the trainer's.
    """
    with state_io.around_a_trial(trainer), _trial(trainer, callbacks) as snapshot:
        yield snapshot


@contextlib.contextmanager
def _trial(trainer: Trainer, callbacks: Sequence[Callback]) -> Iterator[Snapshot]:
    kept = {name: getattr(trainer, name) for name in _KEPT}
    loggers, stage = trainer.loggers, trainer.state.stage
    metrics, first_batch = trainer.metric_log.state_dict(), trainer.metric_log.first_batch
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.disable()
    snapshot = Snapshot(trainer)
    trainer.callbacks = list(callbacks)
    trainer.loggers = [DummyLogger() for _ in loggers[:1]]
    try:
        yield snapshot
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)
        trainer.loggers = loggers
        trainer.state.stage = stage
        if any(metrics.values()):  # a callback searches in a later epoch; before the first one values stay, as in stock
            trainer.metric_log.clear()
            trainer.metric_log.load_state_dict(metrics)
        trainer.metric_log.first_batch = first_batch  # a callback may search at the beginning of an epoch
        snapshot.restore()
        if bar is not None and trainer.is_global_zero:
            bar.enable()


def fit_loop_of_a_trial(trainer: Trainer, max_steps: int, *, goes_on: bool = False) -> FitLoop:
    """A training loop that starts where the run is, and takes its place until the end of the trial; so does one of validation.

    Args:
        max_steps: as the Trainer's.
        goes_on: it takes the loaders that the run has, if there are any.
    """
    from torch_compat.trainer.evaluation_loop import EvaluationLoop
    from torch_compat.trainer.fit_loop import FitLoop

    before, validates = trainer.fit_loop, trainer.validate_loop
    loop = FitLoop(trainer, before.min_epochs, before.max_epochs, before.min_steps, max_steps=max_steps)
    loop.progress = dataclasses.replace(before.progress, batch=0)
    loop.source.reset(before.source.given)
    validation = EvaluationLoop(trainer, "validation", "val")
    validation.source.reset(validates.source.given)
    if goes_on:
        loop.data.share(before.data)
        validation.share(validates)
    trainer.fit_loop, trainer.validate_loop = loop, validation
    return loop


def evaluation_loop_of_a_trial(trainer: Trainer) -> EvaluationLoop | PredictionLoop:
    """A loop that evaluates as the run's does, and takes its place until the end of the trial."""
    from torch_compat.trainer.evaluation_loop import EvaluationLoop
    from torch_compat.trainer.prediction_loop import PredictionLoop

    assert trainer.state.fn is not None
    name = f"{trainer.state.fn.value}_loop"
    before = getattr(trainer, name)
    loop = PredictionLoop(trainer) if name == "predict_loop" else EvaluationLoop(trainer, before.name, before.source.prefix)
    loop.source.reset(before.source.given)
    setattr(trainer, name, loop)
    return loop


class Snapshot:
    """A snapshot of what a run changes: weights, optimizers, schedulers. :meth:`restore` may be called several times."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._groups = [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedulers = [(scheduler, copy.deepcopy(scheduler.state_dict())) for scheduler in schedulers]
        self._optimizers = trainer.executor.placed_optimizers
        placed = trainer.strategy.placed
        self._arrays: HostSnapshot | None = None
        self._restore_eager: Callable[[], None] | None = None
        if placed is not None:
            placed.push_writes()
            self._arrays = HostSnapshot(placed.state)
        else:
            self._restore_eager = _eager_state(trainer)

    def restore(self) -> None:
        """Put everything back."""
        trainer = self._trainer
        if self._arrays is not None:
            self._restore_arrays(self._arrays.restore())
        elif self._restore_eager is not None:
            self._restore_eager()
        for optimizer, groups in zip(trainer.optimizers, self._groups, strict=True):
            del optimizer.param_groups[len(groups) :]
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for name in set(group) - set(options) - {"params"}:
                    del group[name]
                group.update(copy.deepcopy(options))
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))

    def _restore_arrays(self, state: Any) -> None:
        trainer = self._trainer
        if (placed := trainer.strategy.placed) is not None:
            beside = {name: placed.state.buffers[name] for name in placed.beside}  # no part of a module, nor of its checkpoint
            placed.advance(dataclasses.replace(state, buffers={**state.buffers, **beside}))
            return
        # A step of the trial could not be compiled, and the run goes on eagerly.
        if self._optimizers is not None:
            self._optimizers.functional.write_states(state.opt_state)
        _overwrite(trainer.lightning_module, {**state.params, **state.buffers})


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _eager_state(trainer: Trainer) -> Callable[[], None]:
    module = trainer.lightning_module
    tensors = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers]

    def restore() -> None:
        _overwrite(module, tensors)
        for optimizer, state in zip(trainer.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    return restore


@torch.no_grad()
def _overwrite(module: torch.nn.Module, values: dict[str, Any]) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        value = values[name]
        tensor.copy_(value if isinstance(value, torch.Tensor) else to_torch(value, tensor.dtype))
