"""The connectors of stock's Trainer, for code that looks there. API: ``lightning.pytorch.trainer.connectors``.

There are no connectors here (``docs/architecture.md``): each of these asks the Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_compat.accelerators import AcceleratorRegistry
from torch_compat.accelerators.device_parser import _determine_root_gpu_device, _select_auto_accelerator
from torch_compat.trainer import state_io
from torch_compat.trainer.argument_types import PluginInput as _PLUGIN_INPUT
from torch_compat.trainer.argument_types import PrecisionInput as _PRECISION_INPUT
from torch_compat.trainer.attachments import in_order, let_callbacks_log
from torch_compat.trainer.data.data_source import _DataLoaderSource
from torch_compat.trainer.metric_log import MetricLog
from torch_compat.trainer.results import Metric as _ResultMetric
from torch_compat.trainer.results import Results as _ResultCollection
from torch_compat.utilities.parts import of

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_LITERAL_WARN = Literal["warn"]
__all__ = [
    "_DataLoaderSource",
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
    """Strategy, accelerator and plugins.

    Made alone, as libraries do to find out what ``accelerator="auto", devices="auto"`` mean, it is that of a Trainer which has
    these arguments and does not run.
    """

    def __init__(
        self,
        devices: Any = "auto",
        num_nodes: int = 1,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        plugins: Any = None,
        precision: Any = None,
        sync_batchnorm: bool = False,
        benchmark: bool | None = None,
        use_distributed_sampler: bool = True,
        deterministic: bool | _LITERAL_WARN | None = None,
    ) -> None:
        from torch_compat.trainer.trainer import Trainer

        super().__init__(
            Trainer(
                devices=devices,
                num_nodes=num_nodes,
                accelerator=accelerator,
                strategy=strategy,
                plugins=plugins,
                precision=precision,
                sync_batchnorm=sync_batchnorm,
                benchmark=benchmark,
                use_distributed_sampler=use_distributed_sampler,
                deterministic=deterministic,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        )

    strategy: Any = of("trainer.strategy")
    accelerator: Any = of("trainer.accelerator")
    precision_plugin: Any = of("trainer.precision_plugin")

    @property
    def cluster_environment(self) -> Any:
        return getattr(self.trainer.strategy, "cluster_environment", None)

    checkpoint_io: Any = of("trainer.strategy._checkpoint_io", "The plugin that was given for checkpoints.")

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one device."""
        return self.trainer.world_size > 1

    use_distributed_sampler: bool = of("trainer.use_distributed_sampler", settable=True)

    @property
    def _accelerator_flag(self) -> Any:
        """The accelerator as ``Trainer(accelerator=…)`` takes it: its name, or the object where it is a user's own."""
        accelerator = self.trainer.accelerator
        names = [name for name in AcceleratorRegistry if AcceleratorRegistry[name]["accelerator"] is type(accelerator)]
        return names[0] if names else accelerator

    @property
    def _devices_flag(self) -> int | list[int]:
        """The devices of this process as ``Trainer(devices=…)`` takes them: indices of GPUs, else their number."""
        return self.trainer.device_ids if self._accelerator_flag in ("cuda", "gpu") else self.trainer.num_devices

    @property
    def _parallel_devices(self) -> list[torch.device]:
        """A torch device for each device of this process."""
        root = self.trainer.strategy.root_device
        if root.type == "cpu":
            return [root] * self.trainer.num_devices
        return [torch.device(root.type, index) for index in self.trainer.device_ids]

    _num_nodes_flag: int = of("trainer.num_nodes")
    _precision_flag: str = of("trainer.precision")
    _layer_sync: Any = of("trainer.strategy.layer_sync")


class _CallbackConnector(Connector):
    """The callbacks."""

    callbacks: list[Any] = of("trainer.callbacks")

    @staticmethod
    def _reorder_callbacks(callbacks: list[Any]) -> list[Any]:
        """The callbacks in the order in which they are called."""
        return in_order(callbacks)

    def _attach_model_logging_functions(self) -> None:
        """Give every callback the module's ``log`` and ``log_dict``."""
        let_callbacks_log(self.trainer)


class _CheckpointConnector(Connector):
    """Checkpoint dicts."""

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint dict of the run as it stands; its tensors are live: clone what is kept."""
        return state_io.dump(self.trainer, bool(weights_only))


class _DataConnector(Connector):
    """The data module."""

    datamodule: Any = of("trainer.datamodule")


class _LoggerConnector(Connector):
    """Logged metrics."""

    _log: MetricLog = of("trainer.metric_log")
    callback_metrics: dict[str, torch.Tensor] = of("trainer.callback_metrics")
    logged_metrics: dict[str, torch.Tensor] = of("trainer.logged_metrics")
    progress_bar_metrics: dict[str, float] = of("trainer.progress_bar_metrics")

    _callback_metrics = callback_metrics
    _logged_metrics = logged_metrics
    _progress_bar_metrics = progress_bar_metrics

    @property
    def should_update_logs(self) -> bool:
        """Whether the current training step's metrics go to the loggers."""
        return self._log.is_due()

    def log_metrics(self, metrics: Mapping[str, torch.Tensor], step: int | None = None) -> None:
        """Send metrics to the loggers, at ``step`` or the run's own."""
        self._log.send({name: torch.as_tensor(value) for name, value in metrics.items()}, step)


class _SignalConnector(Connector):
    """Signals."""

    received_sigterm: bool = of("trainer.received_sigterm")


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
                connector = object.__new__(kind)
                Connector.__init__(connector, self)  # pyright: ignore[reportArgumentType]  a Trainer
                return connector
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}", name=name, obj=self)
