"""The connectors of stock's Trainer, for code that looks there. API: ``lightning.pytorch.trainer.connectors``.

There are no connectors here (``docs/architecture.md``): each of these asks the Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_compat.accelerators.device_parser import _determine_root_gpu_device, _select_auto_accelerator
from torch_compat.trainer import state_io
from torch_compat.trainer.argument_types import PluginInput as _PLUGIN_INPUT
from torch_compat.trainer.argument_types import PrecisionInput as _PRECISION_INPUT
from torch_compat.trainer.metric_log import MetricLog
from torch_compat.trainer.results import Metric as _ResultMetric
from torch_compat.trainer.results import Results as _ResultCollection
from torch_compat.utilities.refused import refusing

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

__path__: list[str] = []  # lightning.pytorch.trainer.connectors.data_connector and its like are this module
_LITERAL_WARN = Literal["warn"]
__all__ = [
    "_PLUGIN_INPUT",
    "_PRECISION_INPUT",
    "_ResultCollection",
    "_ResultMetric",
    "_determine_root_gpu_device",
    "_select_auto_accelerator",
]


class Connector:
    """A view of a Trainer.

    Raises:
        AttributeError: for a part of stock's connector that is not here; names it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`trainer.{_PLACES.get(type(self), '_connector')}.{name}` is internal to stock Lightning and not offered: use the"
            " Trainer's public attributes"
        )


class _AcceleratorConnector(Connector):
    """Strategy, accelerator and plugins."""

    @property
    def strategy(self) -> Any:
        return self.trainer.strategy

    @property
    def accelerator(self) -> Any:
        return self.trainer.accelerator

    @property
    def precision_plugin(self) -> Any:
        return self.trainer.precision_plugin

    @property
    def cluster_environment(self) -> Any:
        return getattr(self.trainer.strategy, "cluster_environment", None)

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one device."""
        return self.trainer.world_size > 1

    @property
    def use_distributed_sampler(self) -> bool:
        return self.trainer.use_distributed_sampler


class _CallbackConnector(Connector):
    """The callbacks."""

    @property
    def callbacks(self) -> list[Any]:
        return self.trainer.callbacks


class _CheckpointConnector(Connector):
    """Checkpoint dicts."""

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint dict of the run as it stands; its tensors are live: clone what is kept."""
        return state_io.dump(self.trainer, bool(weights_only))


class _DataConnector(Connector):
    """The data module."""

    @property
    def datamodule(self) -> Any:
        return self.trainer.datamodule


class _LoggerConnector(Connector):
    """Logged metrics."""

    @property
    def _log(self) -> MetricLog:
        return self.trainer.metric_log

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        return self.trainer.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        return self.trainer.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return self.trainer.progress_bar_metrics

    @property
    def should_update_logs(self) -> bool:
        """Whether the current training step's metrics go to the loggers."""
        return self._log.is_due()

    def log_metrics(self, metrics: Mapping[str, torch.Tensor], step: int | None = None) -> None:
        """Send metrics to the loggers, at ``step`` or the run's own."""
        self._log.send({name: torch.as_tensor(value) for name, value in metrics.items()}, step)


class _SignalConnector(Connector):
    """Signals."""

    @property
    def received_sigterm(self) -> bool:
        return self.trainer.received_sigterm


_PLACES: dict[type, str] = {
    _AcceleratorConnector: "_accelerator_connector",
    _CallbackConnector: "_callback_connector",
    _CheckpointConnector: "_checkpoint_connector",
    _DataConnector: "_data_connector",
    _LoggerConnector: "_logger_connector",
    _SignalConnector: "_signal_connector",
}


class Connected:
    """The mixin that gives a Trainer its connectors."""

    def __getattr__(self, name: str) -> Any:
        for kind, place in _PLACES.items():
            if name == place:
                return kind(self)  # pyright: ignore[reportArgumentType]  a Trainer
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}", name=name, obj=self)


_DATA = "loaders are re-batched for the mesh by `trainer.fit` and its like; see docs/sharding.md"
__getattr__ = refusing(
    "lightning.pytorch.trainer.connectors",
    {
        "_DataLoaderSource": _DATA,
        "_DataHookSelector": _DATA,
        "_get_distributed_sampler": _DATA,
        "_resolve_overfit_batches": _DATA,
        "_request_dataloader": _DATA,
        "_check_dataloader_iterable": _DATA,
        "_worker_check": _DATA,
        "_parse_num_batches": _DATA,
        "_process_dataloader": _DATA,
        "_FxValidator": "`self.log` says itself where it cannot log",
        "_METRICS": "see trainer.callback_metrics, logged_metrics and progress_bar_metrics",
        "_Sync": "values of a captured step are global; see `self.log(sync_dist=True)`",
        "_Metadata": "see torch_compat.core.logging",
        "_get_default_dtype": "use torch.get_default_dtype()",
        "_set_torch_flags": "Trainer(deterministic=…, benchmark=…)",
        "_validate_callbacks_list": "Trainer(callbacks=…) checks its callbacks",
        "_HandlersCompose": "handlers are chained by torch_compat.trainer.preemption",
        "_get_sigkill_signal": "use signal.SIGKILL",
        "_verify_loop_configurations": "trainer.fit and its like check the module",
        "_init_debugging_flags": "Trainer(fast_dev_run=…)",
        "_determine_batch_limits": "Trainer(limit_train_batches=…)",
        "_init_profiler": "Trainer(profiler=…)",
        "_log_device_info": "trainer.strategy says which devices it uses",
        "_parse_time_interval_seconds": "Trainer(val_check_interval=…) takes the interval",
    },
)
