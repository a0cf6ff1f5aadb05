"""``DeviceStatsMonitor``: logs the load of the host and the memory of the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.device_stats import cpu_stats, memory_stats
from torch_compat.callbacks.log_interval import should_log
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.overrides import overrides

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import STEP_OUTPUT


class DeviceStatsMonitor(Callback):
    """Logs device statistics before and after the batches that are logged, as ``DeviceStatsMonitor.<hook>/<name>``.

    ::

        trainer = pl.Trainer(logger=CSVLogger("logs"), callbacks=[DeviceStatsMonitor()])

    On CPU: ``cpu_percent``, ``cpu_vm_percent``, ``cpu_swap_percent`` of this host. On GPU and TPU: what XLA's allocator says of
    each of this process's devices, such as ``bytes_in_use.tpu:0``, ``peak_bytes_in_use.tpu:0``, ``bytes_limit.tpu:0`` (not the
    names of ``torch.cuda.memory_stats``: that allocator is not used).

    Args:
        cpu_stats: log the host's statistics: True always, False never, None if the devices are CPUs.

    Raises:
        MisconfigurationException: the trainer has no logger (at the start of ``fit``).

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.DeviceStatsMonitor.html
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._eval_batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.loggers:
            raise MisconfigurationException(
                "Cannot use `DeviceStatsMonitor` callback with `Trainer(logger=False)`, which has no logger: remove the callback"
                " or pass a logger."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._log(trainer, "on_train_batch_start", trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self._log(trainer, "on_train_batch_end", trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(batch_idx, dataloader_idx)
        self._log(trainer, "on_validation_batch_start", self._eval_batches)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._log(trainer, "on_validation_batch_end", self._eval_batches)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(batch_idx, dataloader_idx)
        self._log(trainer, "on_test_batch_start", self._eval_batches)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._log(trainer, "on_test_batch_end", self._eval_batches)

    def _count(self, batch_idx: int, dataloader_idx: int) -> None:
        """Batches of this evaluation run before the current one, over all dataloaders."""
        self._eval_batches = 0 if batch_idx == 0 and dataloader_idx == 0 else self._eval_batches + 1

    def _log(self, trainer: Trainer, hook: str, batches_done: int) -> None:
        if not should_log(trainer, batches_done):
            return
        stats = self._stats(trainer)
        if not stats:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the same until the validation after a step is over
        for logger in trainer.loggers:
            prefix = f"{type(self).__qualname__}.{hook}{logger.group_separator}"
            logger.log_metrics({f"{prefix}{name}": value for name, value in stats.items()}, step=step)

    def _stats(self, trainer: Trainer) -> dict[str, float]:
        devices = trainer.strategy.mesh.local_devices
        if overrides(trainer.accelerator, "get_device_stats"):
            own = trainer.accelerator.get_device_stats(trainer.strategy.root_device)
            return {**own, **cpu_stats()} if self._cpu_stats and trainer.strategy.root_device.type != "cpu" else own
        on_cpu = devices[0].platform == "cpu"
        stats = {} if on_cpu else memory_stats(devices)
        if self._cpu_stats or (self._cpu_stats is None and on_cpu):
            stats |= cpu_stats()
        return stats
