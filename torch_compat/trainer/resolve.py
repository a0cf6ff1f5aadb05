"""From Trainer flags to a strategy and a precision: a function of the flags, which changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_compat.plugins.precision import Precision, make_precision
from torch_compat.strategies import DDPStrategy, FSDPStrategy, MeshStrategy, SingleDeviceStrategy, Strategy
from torch_compat.utilities.exceptions import MisconfigurationException

_BY_NAME: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "ddp_find_unused_parameters_true": DDPStrategy,
    "ddp_find_unused_parameters_false": DDPStrategy,
    "ddp_notebook": DDPStrategy,
    "ddp_notebook_find_unused_parameters_true": DDPStrategy,
    "ddp_notebook_find_unused_parameters_false": DDPStrategy,
    "fsdp": FSDPStrategy,
    "mesh": MeshStrategy,
    "single_device": SingleDeviceStrategy,
}
_REFUSED = {
    "ddp_spawn": "processes are not spawned by the Trainer in this version: one process drives all devices of a host; use 'ddp'",
    "ddp_fork": "JAX does not survive a fork; one process drives all devices of a host: use 'ddp'",
    "fsdp_cpu_offload": "parameters stay on the devices: shard over more of them with 'fsdp'",
    "deepspeed": "DeepSpeed's kernels are for CUDA: use 'fsdp', which shards parameters, gradients and optimizer state too",
    "xla": "the torch-xla path is not in this version: JAX drives TPUs with 'auto', 'ddp' or 'fsdp'",
    "xla_fsdp": "the torch-xla path is not in this version: JAX drives TPUs with 'fsdp'",
    "xla_debug": "the torch-xla path is not in this version: JAX drives TPUs with 'auto', 'ddp' or 'fsdp'",
}


@dataclass(frozen=True)
class Choice:
    """What the flags come to."""

    strategy: Strategy
    precision: Precision


def resolve(strategy: str | Strategy, precision: Any, plugins: Any, n_devices: int, platform: str) -> Choice:
    """The strategy and precision for ``n_devices`` devices of a JAX platform.

    Raises:
        MisconfigurationException: an unknown or refused name, or flags that contradict each other.
    """
    chosen = _strategy(strategy, n_devices)
    plugin = _precision_plugin(plugins)
    if plugin is not None and precision is not None:
        raise MisconfigurationException(
            f"Trainer(precision={precision!r}, plugins=[{type(plugin).__name__}]): give the precision once, as either of them"
        )
    if plugin is None and type(chosen.precision_plugin) is not Precision:
        plugin = chosen.precision_plugin
    return Choice(chosen, plugin or make_precision(precision, platform))


def _strategy(strategy: str | Strategy, n_devices: int) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise MisconfigurationException(
            f"strategy={strategy!r}: expected a name ({', '.join(map(repr, ('auto', *_BY_NAME)))}) or a Strategy object"
        )
    if strategy == "auto":
        return SingleDeviceStrategy() if n_devices == 1 else DDPStrategy()
    name = next((refused for refused in _REFUSED if strategy == refused or strategy.startswith(f"{refused}_")), None)
    if strategy not in _BY_NAME and name is not None:
        raise MisconfigurationException(f"strategy={strategy!r} is not supported: {_REFUSED[name]}")
    if strategy not in _BY_NAME:
        raise MisconfigurationException(
            f"strategy={strategy!r} is unknown; choose one of {', '.join(map(repr, ('auto', *_BY_NAME)))}"
        )
    return _BY_NAME[strategy]()


def _precision_plugin(plugins: Any) -> Precision | None:
    found = (
        plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins] if plugins is not None else []
    )
    precisions = [plugin for plugin in found if isinstance(plugin, Precision)]
    if others := [plugin for plugin in found if not isinstance(plugin, Precision)]:
        raise MisconfigurationException(
            f"Trainer(plugins={others!r}): only precision plugins are offered in this version; cluster environments are detected "
            "(xlatrain launch, torchrun, SLURM), and there is one checkpoint format"
        )
    if len(precisions) > 1:
        raise MisconfigurationException(f"Trainer(plugins=…): {len(precisions)} precision plugins; give one")
    return precisions[0] if precisions else None
