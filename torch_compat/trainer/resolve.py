"""The choice of a strategy, with its devices and plugins, from Trainer flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_compat.accelerators import Accelerator, AcceleratorRegistry, MPSAccelerator
from torch_compat.accelerators.accelerator import HARDWARE_MEMBERS
from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch_compat.plugins.precision import Precision
from torch_compat.plugins.precision_names import make_precision
from torch_compat.run import eras
from torch_compat.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from torch_compat.strategies.layout import planned_strategy
from torch_compat.strategies.on_device import DeviceStrategy
from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.trainer.devices import check_platform, find_devices
from torch_compat.utilities.exceptions import (
    ArgumentTypeError,
    ArgumentValueError,
    MisconfigurationException,
    SetupRuntimeError,
)
from torch_compat.utilities.overrides import require

_REFUSED = {
    "ddp_notebook_fork": "JAX does not survive a fork: use 'ddp', where one process drives all devices",
    "dp": "every strategy here drives all devices of a process: use 'ddp'",
    "ddp2": "every strategy here drives all devices of a process: use 'ddp'",
    "horovod": "XLA compiles the collectives: use 'ddp'",
    "bagua": "XLA compiles the collectives: use 'ddp'",
    "collaborative": "processes join one world: use 'ddp'",
    "colossalai": "its kernels are for CUDA: use 'fsdp'",
    "ddp_cpu": "use accelerator='cpu', strategy='ddp'",
    "ddp_fully_sharded": "1.x's name: use 'fsdp'",
    "ddp_sharded": "1.x's name: use 'fsdp', which shards parameters, gradients and optimizer state",
    "fsdp_native": "1.x's name: use 'fsdp'",
    "tpu_spawn": "1.x's name: JAX drives the chips: use accelerator='tpu', strategy='ddp'",
    "model_parallel": "it has no name: make the object, ModelParallelStrategy(data_parallel_size=…, tensor_parallel_size=…)",
    "fsdp_cpu_offload": "parameters stay on the devices: shard over more of them with 'fsdp'",
    "deepspeed": "DeepSpeed's kernels are for CUDA: use 'fsdp', which shards parameters, gradients and optimizer state too",
}
_KINDS = {
    Precision: "precision",
    CheckpointIO: "checkpoint_io",
    ClusterEnvironment: "cluster_environment",
    LayerSync: "layer_sync",
}
_KIND_NAMES = {name: kind.__name__ for kind, name in _KINDS.items()} | {"training_type": "TrainingTypePlugin"}


@dataclass
class Plugins:
    """The plugins of ``Trainer(plugins=…)``, by kind."""

    precision: Precision | None = None
    checkpoint_io: CheckpointIO | None = None
    cluster_environment: ClusterEnvironment | None = None
    layer_sync: LayerSync | None = None
    training_type: Any = None  # of eras 1.3 to 1.5
    strategy: str | None = field(default=None)


def resolve(
    strategy: Any,
    accelerator: Any,
    devices: Any,
    num_nodes: int,
    precision: Any,
    plugins: Any,
    *,
    sync_batchnorm: bool = False,
    owner: str = "Trainer",
) -> tuple[Strategy, Precision]:
    """The strategy, with its plugins and with the devices that the flags come to; and the precision.

    Joins the world of processes and starts JAX, except for a strategy that starts its own processes.

    Raises:
        MisconfigurationException: an unknown or refused name, or flags that contradict each other; hardware that is not there,
            which is a ``RuntimeError`` too, as Fabric of stock has it.
        TypeError: a plugin that lacks a member which its role needs.
    """
    given = sort_plugins(plugins, sync_batchnorm=sync_batchnorm)
    hub = accelerator if isinstance(accelerator, Accelerator) and accelerator.is_hub else None
    chosen = _one_strategy(strategy, given, hub)
    hardware, platform = _hardware(accelerator, hub)
    made = _strategy(chosen)
    if made is not None:
        own = None if made.has_devices else made.accelerator  # else that of the Trainer before
        if own is not None and accelerator not in ("auto", None, own, hub):
            _twice(made, accelerator, "accelerator")
        _attach(made, given, hardware)
    environment = getattr(made, "cluster_environment", None) or given.cluster_environment
    if made is not None and made.launcher is not None:
        made.launcher.configure(devices, num_nodes, platform)
        kind = platform or "cpu"
    elif isinstance(made, DeviceStrategy):
        made.start_backend(platform, devices)
        made.take_hosts(find_devices("cpu", made.backend.local_devices, num_nodes, environment, owner=owner))
        kind = made.backend.platform
    else:
        found = find_devices(platform, _counted(devices, hardware, made), num_nodes, environment, owner=owner)
        kind = found[0].platform
        if made is None:
            made = planned_strategy() or (SingleDeviceStrategy() if len(found) == 1 else DDPStrategy())
            _attach(made, given, hardware)
        made.take_devices(found)
    if made.accelerator is None:
        made.accelerator = AcceleratorRegistry.get({"gpu": "cuda"}.get(kind, kind), Accelerator())
    return made, _precision(made, given, precision, kind, owner)


def sort_plugins(plugins: Any, *, sync_batchnorm: bool = False) -> Plugins:
    """``Trainer(plugins=…)`` by kind.

    Raises:
        MisconfigurationException: two of a kind; ``sync_batchnorm`` beside a user's own layer synchronisation.
        ArgumentTypeError: something that is no plugin.
    """
    found = Plugins()
    if plugins is None:
        return found
    for plugin in plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]:
        if isinstance(plugin, str) and (plugin in StrategyRegistry or plugin.startswith(tuple(_REFUSED))):
            name = "strategy"
        else:
            kinds = {**_KINDS, **dict.fromkeys(eras.training_types(), "training_type")}
            name = next((name for kind, name in kinds.items() if isinstance(plugin, kind)), None)
        if name is None:
            raise ArgumentTypeError(
                f"Found invalid type for plugin {plugin}. Expected one of: Precision, CheckpointIO, ClusterEnvironment, "
                "LayerSync, or a TrainingTypePlugin (eras 1.3 to 1.5) in `Trainer(plugins=…)`"
            )
        if (other := getattr(found, name)) is not None:
            raise MisconfigurationException(
                f"Received multiple values for {_KIND_NAMES.get(name, name)} flags in `plugins`: {type(other).__name__} and "
                f"{type(plugin).__name__}; give one"
            )
        setattr(found, name, plugin)
    if sync_batchnorm and not isinstance(found.layer_sync, TorchSyncBatchNorm | None):
        raise MisconfigurationException(
            f"You set `Trainer(sync_batchnorm=True)` and provided a `{type(found.layer_sync).__name__}` plugin, but this is not "
            "allowed: leave `sync_batchnorm` out, or the plugin"
        )
    return found


def _one_strategy(strategy: Any, given: Plugins, hub: Accelerator | None) -> Any:
    """The strategy, which may be given in one place only: ``strategy=``, ``plugins=`` or ``accelerator=``."""
    candidates = {
        "strategy=": None if strategy == "auto" else strategy,
        "plugins=": given.training_type or given.strategy,
        "accelerator=": hub,
    }
    said = {place: value for place, value in candidates.items() if value is not None}
    if len(said) > 1:
        listed = " and ".join(
            f"{place}{value if isinstance(value, str) else type(value).__name__}" for place, value in said.items()
        )
        raise MisconfigurationException(f"Trainer: {listed} are two strategies at once; give one of them")
    return next(iter(said.values()), "auto")


def _hardware(accelerator: Any, hub: Accelerator | None) -> tuple[Accelerator | None, str | None]:
    """The accelerator plugin that was given, and the JAX platform that it means (None: JAX's choice)."""
    if hub is not None:
        return None, getattr(type(hub), "platform", None)
    if isinstance(accelerator, str):
        if accelerator == "mps":
            raise SetupRuntimeError(_unavailable(MPSAccelerator))
        if accelerator in AcceleratorRegistry and accelerator not in ("cpu", "cuda", "tpu"):
            accelerator = AcceleratorRegistry.get(accelerator)
        else:
            return None, check_platform(accelerator)
    if not isinstance(accelerator, Accelerator):
        raise ArgumentValueError(
            f"You selected an invalid accelerator name: `accelerator={accelerator!r}`. Expected is a name ('auto', "
            f"{', '.join(map(repr, sorted({*AcceleratorRegistry, 'gpu'})))}) or an Accelerator"
        )
    platform = getattr(type(accelerator), "platform", None)
    if platform is None:
        require(
            accelerator,
            HARDWARE_MEMBERS,
            f"Trainer(accelerator={type(accelerator).__name__}())",
            "an Accelerator of Lightning 2.x",
        )
        platform = {"cuda": "gpu", "gpu": "gpu", "cpu": "cpu", "tpu": "tpu"}.get(accelerator.name())
    if not accelerator.is_available():
        raise SetupRuntimeError(_unavailable(type(accelerator)))
    return accelerator, platform


def _unavailable(kind: type) -> str:
    return (
        f"`{kind.__qualname__}` can not run on your system since the accelerator is not available; `xlatrain doctor` says what "
        "there is."
    )


def _counted(devices: Any, hardware: Accelerator | None, strategy: Strategy | None) -> Any:
    """``Trainer(devices=…)`` as a count or indices, by the accelerator plugin that was given."""
    if devices == "auto" and getattr(strategy, "drives_one_device", False):  # plugins of eras 1.3 to 1.5
        return 1
    if hardware is None:
        return devices
    parsed = hardware.auto_device_count() if devices == "auto" else hardware.parse_devices(devices)
    found = list(hardware.get_parallel_devices(parsed))
    indices = [getattr(device, "index", None) for device in found]
    return [int(index) for index in indices if index is not None] if None not in indices and found else len(found)


def _strategy(chosen: Any) -> Strategy | None:
    """The strategy object; None for ``"auto"``, which depends on the devices."""
    if isinstance(chosen, (Accelerator, *eras.training_types())):
        return eras.strategy_of_plugins(chosen)
    if isinstance(chosen, Strategy):
        return chosen
    if not isinstance(chosen, str):
        raise ArgumentValueError(
            f"You selected an invalid strategy name: `strategy={chosen!r}`. Expected is a name "
            f"({', '.join(map(repr, ('auto', *sorted(StrategyRegistry))))}) or a Strategy object"
        )
    if chosen == "auto":
        return None
    if chosen in StrategyRegistry:
        made = StrategyRegistry.get(chosen)
        return eras.strategy_of_plugins(made) if isinstance(made, eras.training_types()) else made
    name = next((refused for refused in _REFUSED if chosen == refused or chosen.startswith(f"{refused}_")), None)
    if name is not None:
        raise ArgumentValueError(
            f"You selected an invalid strategy name: `strategy={chosen!r}`. It is not supported: {_REFUSED[name]}"
        )
    raise ArgumentValueError(
        f"You selected an invalid strategy name: `strategy={chosen!r}`. Choose one of "
        f"{', '.join(map(repr, ('auto', *sorted(StrategyRegistry))))}"
    )


def _attach(strategy: Strategy, given: Plugins, hardware: Accelerator | None) -> None:
    """Give the strategy the other plugins.

    Raises:
        MisconfigurationException: a plugin that the strategy has already, or has no use for.
    """
    if given.checkpoint_io is not None:
        if strategy._checkpoint_io not in (None, given.checkpoint_io):
            _twice(strategy, given.checkpoint_io, "checkpoint_io")
        strategy.checkpoint_io = given.checkpoint_io
    if given.cluster_environment is not None:
        if isinstance(strategy, (ParallelStrategy, *eras.strategies())):
            of_processes: Any = strategy
            if of_processes.cluster_environment not in (None, given.cluster_environment):
                _twice(strategy, given.cluster_environment, "cluster_environment")
            of_processes.cluster_environment = given.cluster_environment
        elif not isinstance(strategy, SingleDeviceStrategy):
            raise MisconfigurationException(
                f"Trainer(plugins=[{type(given.cluster_environment).__name__}()]): {type(strategy).__name__} is no "
                "ParallelStrategy, which alone has a cluster environment"
            )
    if hardware is not None:
        strategy.accelerator = hardware
    strategy.layer_sync = given.layer_sync or strategy.layer_sync


def _twice(strategy: Strategy, plugin: Any, argument: str) -> None:
    place = "accelerator flag" if argument == "accelerator" else "plugins"
    raise ArgumentValueError(
        f"{argument} set through both strategy class and {place}, choose one: {type(strategy).__name__} has its own, and the "
        f"Trainer was given {plugin if isinstance(plugin, str) else type(plugin).__name__}"
    )


def _precision(strategy: Strategy, given: Plugins, precision: Any, platform: str, owner: str) -> Precision:
    plugin = given.precision
    if plugin is not None and strategy._precision_plugin not in (None, plugin):
        _twice(strategy, plugin, "precision")
    if plugin is not None and precision is not None:
        raise ArgumentValueError(
            f"Received both `precision={precision}` and `plugins={plugin}`. Choose one: each of them sets the precision"
        )
    chosen = plugin or strategy._precision_plugin or make_precision(precision, platform, owner)
    strategy.precision_plugin = chosen
    return chosen
