"""A run in processes that its strategy starts, and what comes back from them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.run.hook_calls import on_exception
from torch_compat.run.states import TrainerFn, TrainerState, TrainerStatus
from torch_compat.strategies.ddp_spawn import FakeQueue
from torch_compat.trainer.devices import find_devices
from torch_compat.trainer.fit_counts import Progress
from torch_compat.trainer.jax_modules import jax_host

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


@dataclass
class SpawnOutput:
    """The output that process 0 sends back; the weights are in a file.

    Attributes:
        results: what the run gave.
        state: the Trainer's.
        progress: the training loop's counters.
        callbacks: each callback's state, in order.
        logged, progress_bar: the last metrics.
        queue: what the strategy's ``add_to_queue`` put in.
    """

    results: Any
    state: TrainerState
    progress: Progress
    callbacks: list[Mapping[str, Any]]
    logged: dict[str, torch.Tensor]
    progress_bar: dict[str, float]
    queue: FakeQueue


def run_spawned(
    trainer: Trainer,
    module: LightningModule,
    datamodule: LightningDataModule | None,
    fn: TrainerFn,
    ckpt_path: str | None,
    weights_only: bool | None,
) -> Any:
    """Run ``module`` in fresh processes; afterwards this process's objects are as if it had run here.

    Raises:
        ProcessRaisedException: a process raised; with its traceback.
    """
    strategy: Any = trainer.strategy
    trainer._module, module.trainer, trainer.datamodule = module, trainer, datamodule or trainer.datamodule
    with tempfile.TemporaryDirectory(prefix="xlatrain-spawn-") as folder:
        weights = os.path.join(folder, "weights.pt")
        try:
            output = strategy.spawn(_in_process, trainer, module, datamodule, fn, ckpt_path, weights_only, weights)
        except BaseException as exception:
            trainer.state.status = TrainerStatus.INTERRUPTED
            on_exception(trainer, exception)  # of the callbacks here; those of the processes have been told there
            for logger in trainer.loggers:
                logger.finalize("failed")
            raise
        if (host := jax_host(module)) is not None:
            host.configure_model()  # what it makes has its values from the file
        module.load_state_dict(torch.load(weights, weights_only=True))
    trainer.state = output.state
    trainer.fit_loop.progress = output.progress
    for callback, state in zip(trainer.callbacks, output.callbacks, strict=True):
        if state:
            callback.load_state_dict(dict(state))
    trainer.metric_log.clear()
    trainer.metric_log.logged.update(output.logged)
    trainer.metric_log.progress_bar.update(output.progress_bar)
    strategy.get_from_queue(trainer, output.queue)
    return output.results


def _in_process(
    trainer: Trainer,
    module: LightningModule,
    datamodule: LightningDataModule | None,
    fn: TrainerFn,
    ckpt_path: str | None,
    weights_only: bool | None,
    weights: str,
) -> SpawnOutput | None:
    """Run the Trainer's function in a spawned process."""
    from torch_compat.trainer.run import run

    strategy: Any = trainer.strategy
    strategy.take_devices(find_devices(strategy._platform, "auto", 1))
    results = run(trainer, module, datamodule, fn, lambda: ckpt_path, weights_only)
    if not strategy.is_global_zero:
        return None
    torch.save({name: value.detach().cpu() for name, value in module.state_dict().items()}, weights)
    queue = FakeQueue()
    strategy.add_to_queue(trainer, queue)
    return SpawnOutput(
        results,
        trainer.state,
        trainer.fit_loop.progress,
        [callback.state_dict() for callback in trainer.callbacks],
        dict(trainer.logged_metrics),
        dict(trainer.progress_bar_metrics),
        queue,
    )
