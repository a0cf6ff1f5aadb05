"""The choice of a strategy, with the mesh and the plugins, from Fabric's flags."""

from __future__ import annotations

from typing import Any

from torch_compat.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy, ParallelStrategy, SingleDeviceStrategy
from torch_compat.fabric.strategies.strategy import Strategy
from torch_compat.strategies import Strategy as TrainerStrategy
from torch_compat.strategies import StrategyRegistry
from torch_compat.strategies.on_device import DeviceStrategy
from torch_compat.trainer import resolve as trainer_resolve
from torch_compat.utilities.exceptions import ArgumentValueError, MisconfigurationException
from torch_compat.utilities.overrides import overrides

_OF_MESHES = ("ddp", "mesh", "single_device")
"""Names that say which mesh there is; Fabric's class follows from it."""
_NAMES = ("fsdp", *_OF_MESHES)


def resolve(
    accelerator: Any, strategy: Any, devices: Any, num_nodes: int, precision: Any, plugins: Any
) -> tuple[Strategy, TrainerStrategy]:
    """Fabric's strategy, and the strategy that has the mesh.

    Joins the world of processes and starts JAX.

    Raises:
        MisconfigurationException: an unknown or refused name, flags that contradict each other, or loss scaling.
        TypeError: a plugin that lacks a member which its role needs.
    """
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise ArgumentValueError(f"`num_nodes` must be a positive integer, but got {num_nodes!r}: it is the number of hosts")
    chosen = _given(strategy)
    _refuse_devices_of_torch(chosen)
    wanted = chosen.mesh_strategy if isinstance(chosen, Strategy) else chosen
    if isinstance(chosen, Strategy):
        plugins = _with_plugins_of(chosen, precision, plugins)
    mesh, made_precision = trainer_resolve.resolve(wanted, accelerator, devices, num_nodes, precision, plugins, owner="Fabric")
    if mesh.launcher is not None:
        raise MisconfigurationException(
            f"Fabric(strategy={strategy!r}) would start processes itself, which Fabric does not: one process drives all devices "
            "of a host (strategy='ddp'); start several with `xlatrain launch`"
        )
    if made_precision.scaler is not None:
        raise MisconfigurationException(
            f"Fabric(precision={precision!r}): loss scaling is the Trainer's here; use 'bf16-mixed', which needs none"
        )
    if overrides(made_precision, "optimizer_step"):
        raise MisconfigurationException(
            f"Fabric(plugins=[{type(made_precision).__name__}()]): `optimizer_step` of a precision plugin is not called, because "
            "the update runs on the mesh: override `optimizer_step` of a strategy (lightning.fabric.strategies.DDPStrategy)"
        )
    if isinstance(chosen, Strategy):
        made = chosen
    else:
        made = SingleDeviceStrategy() if mesh.world_size == 1 and chosen in ("auto", "single_device") else DDPStrategy()
    made.precision = made_precision
    if made.accelerator is None and mesh.accelerator is not None:
        made.accelerator = mesh.accelerator
    if mesh._checkpoint_io is not None and made._checkpoint_io is None:
        made.checkpoint_io = mesh._checkpoint_io
    if isinstance(made, ParallelStrategy) and made.cluster_environment is None:
        made.cluster_environment = getattr(mesh, "cluster_environment", None)
    return made, mesh


def _given(strategy: Any) -> Any:
    """A Fabric strategy, a strategy of the Trainer, or one of the Trainer's names."""
    if isinstance(strategy, Strategy | TrainerStrategy):
        return strategy
    if isinstance(strategy, str):
        is_class = strategy in STRATEGY_REGISTRY and strategy not in _OF_MESHES
        return STRATEGY_REGISTRY.get(strategy) if is_class else strategy  # the Trainer's registry refuses an unknown name
    raise ArgumentValueError(
        f"You selected an invalid strategy name: `strategy={strategy!r}`. Expected is a name "
        f"({', '.join(map(repr, ('auto', *_NAMES)))}) or a Strategy object of lightning.fabric.strategies"
    )


def _refuse_devices_of_torch(chosen: Any) -> None:
    """Raises:
    MisconfigurationException: the strategy is one of torch-xla or torch_tpu.
    """
    found = StrategyRegistry.get(chosen) if isinstance(chosen, str) and chosen in StrategyRegistry else chosen
    if isinstance(found, DeviceStrategy):
        raise MisconfigurationException(
            f"Fabric(strategy={found.strategy_name!r}): torch-xla and torch_tpu are for the Trainer; Fabric's calls run on JAX's "
            f"devices: choose one of {', '.join(map(repr, ('auto', *_NAMES)))}"
        )


def _with_plugins_of(strategy: Strategy, precision: Any, plugins: Any) -> Any:
    """``plugins`` and those that the strategy was made with.

    Raises:
        MisconfigurationException: one of a kind in both.
    """
    given = trainer_resolve.sort_plugins(plugins)
    environment = strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None
    for argument, here, there in (
        ("precision", given.precision, strategy._precision),
        ("checkpoint_io", given.checkpoint_io, strategy._checkpoint_io),
        ("cluster_environment", given.cluster_environment, environment),
    ):
        if here is not None and there not in (None, here):
            raise MisconfigurationException(
                f"Fabric(plugins=[{type(here).__name__}()]): {type(strategy).__name__} has its own {argument}; give one"
            )
    if strategy._precision is not None and precision is not None:
        raise MisconfigurationException(
            f"Fabric(precision={precision!r}): {type(strategy).__name__} has its own precision, "
            f"{type(strategy._precision).__name__}; give one"
        )
    listed = [] if plugins is None else list(plugins) if isinstance(plugins, list | tuple) else [plugins]
    own = [one for one in (strategy._precision, environment) if one is not None]
    return listed + [one for one in own if not any(one is other for other in listed)]
