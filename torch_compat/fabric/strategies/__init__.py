"""Strategies of Fabric. API: ``lightning.fabric.strategies``."""

from __future__ import annotations

from torch_compat.fabric.strategies.data_parallel import DDPStrategy, ParallelStrategy, SingleDeviceStrategy
from torch_compat.fabric.strategies.model_parallel import ModelParallelStrategy
from torch_compat.fabric.strategies.sharded import FSDPStrategy, MeshStrategy
from torch_compat.fabric.strategies.strategy import Strategy
from torch_compat.utilities.registry import StrategyRegistryType, register_stocks_own

STRATEGY_REGISTRY = StrategyRegistryType()
for _kind in (DDPStrategy, FSDPStrategy, MeshStrategy, SingleDeviceStrategy):
    _kind.register_strategies(STRATEGY_REGISTRY)
register_stocks_own(STRATEGY_REGISTRY, "lightning.fabric")

__all__ = [
    "STRATEGY_REGISTRY",
    "DDPStrategy",
    "FSDPStrategy",
    "MeshStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]

_StrategyRegistry = StrategyRegistryType
